//! The Python module `gpu_ipc`: share any tensor with another process in two lines.
//!
//! Each folder imports from those above it in this table alone, and each file from those above it
//! in its row.
//!
//! | folder | files | what |
//! |---|---|---|
//! | `interpreter` | `errors`, `waiting`, `queue`, `process`, `later`, `logging`, `keeper` | how Python learns of failures, waits and logs; what other threads leave to it |
//! | `data` | `layout`, `number`, `sealed`, `addressee`, `descriptor`, `descriptors`, `device`, `stream`, `notice`, `stats` | what programs name and read: types that only hold data |
//! | `arrays` | `abi`, `view`, `dlpack`, `export`, `exchange`, `interface`, `buffer`, `read`, `class` | the four protocols that arrays speak, in and out |
//! | `producer` | `adopted`, `shared`, `block`, `sharing`, `loan`, `torch_pool`, `session` | sessions, from any array to a grant |
//! | `consumer` | `received`, `participant` | participants, from a grant to any array |
//! | `objects` | `specs`, `part`, `mapping`, `scratch`, `writer`, `object`, `torch_pool`, `pool`, `pool_reader`, `broker` | objects of a broker, and the arrays in them |
//! | `testing` | `memory`, `panic`, `seals`, `segments`, `server`, `stall`, `timing` | for comparison and tests: somebody else's memory, failures, a broker, the same calls without Python |
//!
//! Three rules hold everywhere:
//!
//! - No call into the library is made with the interpreter's lock held if it can wait or reach the
//!   driver.
//! - No lock of this crate is held while the interpreter's lock is waited for, or while a Python
//!   reference is dropped.
//! - No thread of the library touches a reference count: what it gives up goes through the
//!   `keeper`'s queue.

// Tests: `crates/python/tests/test_session.py`, `crates/python/tests/test_processes.py`.

mod arrays;
mod consumer;
mod data;
mod interpreter;
mod objects;
mod producer;
#[cfg(feature = "faults")]
mod testing;

/// The native half of `gpu_ipc`.
#[pyo3::pymodule]
mod _gpu_ipc {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    #[pymodule_export]
    use crate::consumer::participant::{Participant, connect};
    #[pymodule_export]
    use crate::consumer::received::Received;
    #[pymodule_export]
    use crate::data::addressee::{ParticipantId, Ticket};
    #[pymodule_export]
    use crate::data::descriptor::Descriptor;
    #[pymodule_export]
    use crate::data::descriptors::Descriptors;
    #[pymodule_export]
    use crate::data::device::{Detected, Device, detect};
    #[pymodule_export]
    use crate::data::notice::{Notice, SessionNotice};
    #[pymodule_export]
    use crate::data::sealed::{Sealed, journal_bytes};
    #[pymodule_export]
    use crate::data::stats::{
        Collected, Holder, SessionReport, ShutdownReport, SourceUsage, Stats, inspect, sessions,
    };
    #[pymodule_export]
    use crate::data::stream::Stream;
    #[pymodule_export]
    use crate::interpreter::keeper::{keep, stop};
    #[pymodule_export]
    use crate::interpreter::process::forked;
    #[pymodule_export]
    use crate::objects::broker::{Broker, connect_broker};
    #[pymodule_export]
    use crate::objects::object::Object;
    #[pymodule_export]
    use crate::objects::part::Part;
    #[pymodule_export]
    use crate::objects::pool::Pool;
    #[pymodule_export]
    use crate::objects::pool_reader::PoolReader;
    #[pymodule_export]
    use crate::objects::scratch::Scratch;
    #[pymodule_export]
    use crate::objects::writer::ObjectWriter;
    #[pymodule_export]
    use crate::producer::block::Block;
    #[pymodule_export]
    use crate::producer::loan::Loan;
    #[pymodule_export]
    use crate::producer::session::Session;
    #[cfg(feature = "faults")]
    #[pymodule_export]
    use crate::testing::memory::{PlainMemory, Segment};
    #[cfg(feature = "faults")]
    #[pymodule_export]
    use crate::testing::panic::panic_on_sessions_thread;
    #[cfg(feature = "faults")]
    #[pymodule_export]
    use crate::testing::seals::time_seals;
    #[cfg(feature = "faults")]
    #[pymodule_export]
    use crate::testing::segments::take_segments;
    #[cfg(feature = "faults")]
    #[pymodule_export]
    use crate::testing::server::serve_broker;
    #[cfg(feature = "faults")]
    #[pymodule_export]
    use crate::testing::stall::stall;
    #[cfg(feature = "faults")]
    #[pymodule_export]
    use crate::testing::timing::{time_claims, time_shares};
}
