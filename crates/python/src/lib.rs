//! The Python module `gpu_ipc`: share any tensor with another process in two lines.
//!
//! | module | what |
//! |---|---|
//! | `process`, `keeper` | what a process has one of; Python references that other threads give up |
//! | `errors`, `logging`, `waiting` | how Python learns of failures, of what the library logs, and waits |
//! | `device`, `streams` | devices and streams by the names that Python has for them |
//! | `layout`, `descriptor` | dtype, shape and strides, and the bytes that travel |
//! | `dlpack`, `exchange`, `interface`, `buffer` | the four protocols that arrays speak |
//! | `array` | from any array to an address and a layout |
//! | `session`, `shared`, `sharing`, `block`, `addressee` | the producer |
//! | `participant`, `received` | the consumer |
//! | `notice` | what each side is told |
//! | `object`, `part` | objects of a broker, and the arrays in them |
//! | `stats` | who holds what |
//! | `torch_pool` | PyTorch's allocator on memory of a session |
//! | `timing`, `plain` | for comparison and tests: the same calls without Python, somebody else's memory |
//!
//! Three rules hold everywhere:
//!
//! - No call into the library is made with the interpreter's lock held if it can wait or reach the driver.
//! - No lock of this crate is held while the interpreter's lock is waited for, or while a Python reference is dropped.
//! - No thread of the library touches a reference count: what it gives up goes through the `keeper`'s queue.

mod addressee;
mod array;
mod block;
mod buffer;
mod descriptor;
mod device;
mod dlpack;
mod errors;
mod exchange;
mod interface;
mod keeper;
mod layout;
mod logging;
mod notice;
mod object;
mod part;
mod participant;
mod plain;
mod process;
mod received;
mod session;
mod shared;
mod sharing;
mod stats;
mod streams;
mod timing;
mod torch_pool;
mod waiting;

/// The native half of `gpu_ipc`.
#[pyo3::pymodule]
mod _gpu_ipc {
    #[pymodule_export]
    use crate::addressee::{ParticipantId, Ticket};
    #[pymodule_export]
    use crate::block::Block;
    #[pymodule_export]
    use crate::descriptor::Descriptor;
    #[pymodule_export]
    use crate::device::{Detected, Device, detect};
    #[pymodule_export]
    use crate::keeper::{keep, stop};
    #[pymodule_export]
    use crate::notice::{Notice, SessionNotice};
    #[pymodule_export]
    use crate::object::{Broker, Object, ObjectWriter, connect_broker, serve_broker};
    #[pymodule_export]
    use crate::part::Part;
    #[pymodule_export]
    use crate::participant::{Participant, connect};
    #[pymodule_export]
    use crate::plain::{PlainMemory, Segment};
    #[pymodule_export]
    use crate::process::forked;
    #[pymodule_export]
    use crate::received::Received;
    #[pymodule_export]
    use crate::session::Session;
    #[pymodule_export]
    use crate::stats::{Collected, Holder, SessionReport, ShutdownReport, SourceUsage, Stats, inspect, sessions};
    #[pymodule_export]
    use crate::streams::Stream;
    #[pymodule_export]
    use crate::timing::{time_claims, time_shares};
}
