//! The library's errors as Python's.
//!
//! The classes are Python's own, in `gpu_ipc._errors`, because most have a second base
//! (`TimeoutError`, `MemoryError`).

use gpu_ipc::backend::explain;
use gpu_ipc::broker::ObjectError;
use gpu_ipc::{ClaimError, Error, Gone};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Names the class of each code.
const CLASSES: [(i32, &str); 31] = [
    (1, "OutOfMemory"),
    (2, "Exhausted"),
    (3, "NotCompiled"),
    (4, "Unavailable"),
    (5, "NoDevice"),
    (6, "Unsupported"),
    (7, "Invalid"),
    (8, "BadDescriptor"),
    (9, "Mismatch"),
    (10, "ConnectFailed"),
    (11, "Refused"),
    (12, "ProducerGone"),
    (13, "ParticipantGone"),
    (14, "Forked"),
    (15, "Capturing"),
    (16, "Closed"),
    (17, "Timeout"),
    (18, "DriverFailed"),
    (19, "SystemFailed"),
    (101, "WouldBlock"),
    (102, "Revoked"),
    (103, "AlreadyClaimed"),
    (104, "Stale"),
    (105, "WrongParticipant"),
    (201, "NotFound"),
    (202, "Conflict"),
    (203, "WriterLost"),
    (204, "Aborted"),
    (205, "LayoutDiffers"),
    (206, "Poisoned"),
    (207, "Asleep"),
];

/// Turns the library's results into Python's.
pub(crate) trait OrRaise<T> {
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, Error> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(raise)
    }
}

impl<T> OrRaise<T> for Result<T, ClaimError> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(raise_claim)
    }
}

impl<T> OrRaise<T> for Result<T, ObjectError> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(raise_object)
    }
}

/// Makes the exception of what went wrong with an object.
fn raise_object(error: ObjectError) -> PyErr {
    exception(error.code(), explain(&error))
}

/// Makes the exception of an error.
pub(crate) fn raise(error: Error) -> PyErr {
    let raised = exception(error.code(), explain(&error));
    if let Some(Gone::Participant(participant)) = Gone::of(&error) {
        // Without the name the error says it in its text alone.
        let _ = Python::attach(|py| {
            let id = py
                .import("gpu_ipc._gpu_ipc")?
                .getattr("ParticipantId")?
                .call1((participant.0,))?;
            raised.value(py).setattr("participant", id)
        });
    }
    raised
}

/// Makes the exception of a failed claim.
pub(crate) fn raise_claim(error: ClaimError) -> PyErr {
    match error {
        ClaimError::Backend(error) => raise(error),
        error => exception(error.code(), explain(&error)),
    }
}

/// Makes the exception of a wrong argument.
pub(crate) fn invalid(what: &'static str, got: impl ToString, must: &'static str) -> PyErr {
    raise(Error::Invalid {
        what,
        got: got.to_string(),
        must,
    })
}

/// Makes the exception of what cannot be done with this array or memory.
pub(crate) fn unsupported(
    what: &'static str,
    why: impl Into<String>,
    remedy: &'static str,
) -> PyErr {
    raise(Error::Unsupported {
        what,
        why: why.into(),
        remedy,
    })
}

/// Makes the exception of contents that are garbage.
pub(crate) fn poisoned() -> PyErr {
    exception(
        104,
        "the contents are garbage: the producer died or broke before its work on them was finished; have them shared \
         again"
            .into(),
    )
}

/// Makes what the array protocols want where an array cannot be handed out.
pub(crate) fn no_buffer(text: impl Into<String>) -> PyErr {
    PyBufferError::new_err(text.into())
}

fn exception(code: i32, text: String) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    Python::attach(|py| {
        let name = CLASSES
            .iter()
            .find(|(known, _)| *known == code)
            .map_or("Error", |(_, name)| name);
        let made = || -> PyResult<PyErr> {
            let module =
                MODULE.get_or_try_init(py, || py.import("gpu_ipc._errors").map(Bound::unbind))?;
            let class = module.bind(py).getattr(name)?.cast_into::<PyType>()?;
            Ok(PyErr::from_type(class, text))
        };
        made().unwrap_or_else(|error| error)
    })
}
