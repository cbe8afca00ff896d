//! One error type, classified by what the caller can do.

use std::borrow::Cow;
use std::fmt;
use std::io;

use crate::{BackendKind, DeviceId, DeviceUuid};

/// The result of everything that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A code that a driver returned: an integer with a name, because drivers return codes that no
/// header lists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DriverError {
    /// The vendor.
    pub backend: BackendKind,
    /// The code.
    pub code: u32,
    /// The driver's name for it, where it has one.
    pub name: Cow<'static, str>,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} error {} ({})", self.backend, self.code, self.name)
    }
}

impl std::error::Error for DriverError {}

/// Writes an error with its causes, each behind a colon: the text of an error does not repeat its
/// cause.
///
/// # Examples
///
/// ```
/// use gpu_api::{Error, explain};
///
/// let source = std::io::Error::from_raw_os_error(12);
/// let error = Error::System { call: "mmap", remedy: "raise RLIMIT_AS", source };
/// assert_eq!(explain(&error), format!("{error}: Cannot allocate memory (os error 12)"));
/// ```
pub fn explain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// An error, classified by what the caller can do.
///
/// The cause, where there is one, is in [`source`](std::error::Error::source) and not repeated in
/// the text.
///
/// # Examples
///
/// ```
/// use gpu_api::{BackendKind, Error};
///
/// fn what_next(error: &Error) -> &'static str {
///     match error {
///         Error::NotCompiled { .. } | Error::Unavailable { .. } => "use another backend",
///         Error::Deadline { .. } => "ask again",
///         _ => "give up",
///     }
/// }
/// assert_eq!(what_next(&Error::NotCompiled { backend: BackendKind::Cuda }), "use another backend");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device is out of memory. Collect, drop blocks, or trim, then try again.
    #[error("out of memory on {device}: asked for {asked} bytes, {free} are free; {hint}")]
    OutOfMemory {
        /// Where.
        device: DeviceId,
        /// Bytes asked for.
        asked: u64,
        /// Bytes free at that moment.
        free: u64,
        /// What holds the rest and what to do.
        hint: String,
    },
    /// A limit of this library or of the system is reached. Raise it or hold less.
    #[error("{what} used up: the limit is {limit}; {remedy}")]
    Exhausted {
        /// The resource.
        what: &'static str,
        /// Its limit.
        limit: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// The backend is not in this binary.
    #[error("the {backend} backend is not compiled in; build with the feature `{backend}`")]
    NotCompiled {
        /// Which.
        backend: BackendKind,
    },
    /// The backend is in this binary, but this machine cannot run it.
    #[error("the {backend} backend is unavailable: {why}; {remedy}")]
    Unavailable {
        /// Which.
        backend: BackendKind,
        /// What is missing.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// This process cannot see the device.
    #[error("no {backend} device has the uuid {uuid}; make it visible to this process")]
    NoDevice {
        /// The vendor.
        backend: BackendKind,
        /// The device.
        uuid: DeviceUuid,
    },
    /// The device, the driver or the memory cannot do that.
    #[error("{what} is not supported: {why}; {remedy}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// Why not.
        why: String,
        /// What to change.
        remedy: &'static str,
    },
    /// An argument is wrong. Correct the call.
    #[error("{what} is {got}, but must be {must}")]
    Invalid {
        /// Which argument.
        what: &'static str,
        /// What it was.
        got: String,
        /// What it must be.
        must: &'static str,
    },
    /// The bytes are not a descriptor of this version. Pass them on whole and unchanged.
    #[error(
        "not a descriptor: {what} is {got}, but must be {must}; pass the bytes of `share` on whole and unchanged"
    )]
    BadDescriptor {
        /// Which field.
        what: &'static str,
        /// What it was.
        got: String,
        /// What it must be.
        must: String,
    },
    /// The two sides do not match, for example in version or device.
    #[error("{what} differs: {theirs} there, {ours} here; {remedy}")]
    Mismatch {
        /// The property that differs.
        what: &'static str,
        /// The other side's.
        theirs: String,
        /// This side's.
        ours: String,
        /// What to do.
        remedy: &'static str,
    },
    /// No process, or one that is not allowed, is at the other end.
    #[error("cannot connect to {path}: {why}; {remedy}")]
    Connect {
        /// The socket.
        path: String,
        /// Why not.
        why: String,
        /// What to do.
        remedy: &'static str,
        /// The system's own error, where there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// The other side refused the request: a producer, a broker, a keeper.
    #[error("refused: {why}; {remedy}")]
    Refused {
        /// Why.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// This is a forked child of the process that made the object. Make a new one in the child.
    #[error(
        "made before a fork: {what} belongs to the parent process; open a new one in the child"
    )]
    Forked {
        /// What.
        what: &'static str,
    },
    /// The stream is being captured into a graph, and a graph may run more than once.
    #[error("stream {stream:#x} is being captured into a graph; {remedy}")]
    Capturing {
        /// Its number.
        stream: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// The deadline passed. Try again; nothing was lost.
    #[error("the deadline passed while waiting for {what}; ask again")]
    Deadline {
        /// What was awaited.
        what: &'static str,
    },
    /// A call of the driver failed.
    #[error("{call} failed on {device}")]
    Driver {
        /// The call.
        call: &'static str,
        /// The device.
        device: DeviceId,
        /// The code.
        source: DriverError,
    },
    /// A call of the operating system failed.
    #[error("{call} failed; {remedy}")]
    System {
        /// The call.
        call: &'static str,
        /// What to do.
        remedy: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// An error of a crate above the backends, which says more of it. No backend gives one.
    #[error("{0}")]
    Other(Box<dyn OtherError>),
}

/// An error that no backend gives, for [`Error::Other`].
pub trait OtherError: std::error::Error + Send + Sync + 'static {
    /// Returns its number for other languages: 12, 13 or 16, which [`Error::code`] leaves free.
    fn code(&self) -> i32;
}

impl Error {
    /// Makes the error of a wrong argument.
    pub fn invalid(what: &'static str, got: impl ToString, must: &'static str) -> Error {
        let got = got.to_string();
        Error::Invalid { what, got, must }
    }

    /// Makes the error of bytes that are no descriptor.
    pub fn bad_descriptor(what: &'static str, got: impl ToString, must: impl ToString) -> Error {
        let (got, must) = (got.to_string(), must.to_string());
        Error::BadDescriptor { what, got, must }
    }

    /// Makes the error of two sides that do not match.
    pub fn mismatch(
        what: &'static str,
        theirs: impl ToString,
        ours: impl ToString,
        remedy: &'static str,
    ) -> Error {
        Error::Mismatch {
            what,
            theirs: theirs.to_string(),
            ours: ours.to_string(),
            remedy,
        }
    }

    /// Makes the error of what a device, a driver or memory cannot do.
    pub fn unsupported(what: &'static str, why: impl ToString, remedy: &'static str) -> Error {
        let why = why.to_string();
        Error::Unsupported { what, why, remedy }
    }

    /// Makes the error of a backend that cannot be used here.
    pub fn unavailable(backend: BackendKind, why: impl ToString, remedy: &'static str) -> Error {
        let why = why.to_string();
        Error::Unavailable {
            backend,
            why,
            remedy,
        }
    }

    /// Makes the error of a limit that is reached.
    pub fn exhausted(what: &'static str, limit: u64, remedy: &'static str) -> Error {
        Error::Exhausted {
            what,
            limit,
            remedy,
        }
    }

    /// Makes the error of a refused request.
    pub fn refused(why: impl ToString, remedy: &'static str) -> Error {
        let why = why.to_string();
        Error::Refused { why, remedy }
    }

    /// Makes the error of a deadline that passed.
    pub fn deadline(what: &'static str) -> Error {
        Error::Deadline { what }
    }

    /// Makes the error of a forked child that uses what its parent made.
    pub fn forked(what: &'static str) -> Error {
        Error::Forked { what }
    }

    /// Makes the error of a failed system call.
    pub fn system(call: &'static str, remedy: &'static str, source: impl Into<io::Error>) -> Error {
        Error::System {
            call,
            remedy,
            source: source.into(),
        }
    }

    /// Makes the error of a call that found no free descriptor.
    pub fn without_descriptors(call: &'static str, source: impl Into<io::Error>) -> Error {
        let remedy = "raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files";
        Error::system(call, remedy, source)
    }

    /// Returns a number that stays the same in every version, for other languages.
    pub fn code(&self) -> i32 {
        match self {
            Error::OutOfMemory { .. } => 1,
            Error::Exhausted { .. } => 2,
            Error::NotCompiled { .. } => 3,
            Error::Unavailable { .. } => 4,
            Error::NoDevice { .. } => 5,
            Error::Unsupported { .. } => 6,
            Error::Invalid { .. } => 7,
            Error::BadDescriptor { .. } => 8,
            Error::Mismatch { .. } => 9,
            Error::Connect { .. } => 10,
            Error::Refused { .. } => 11,
            Error::Forked { .. } => 14,
            Error::Capturing { .. } => 15,
            Error::Deadline { .. } => 17,
            Error::Driver { .. } => 18,
            Error::System { .. } => 19,
            Error::Other(error) => error.code(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_variant() -> Vec<(i32, Error, &'static str)> {
        let io = || io::Error::from_raw_os_error(24);
        vec![
            (
                1,
                Error::OutOfMemory {
                    device: DeviceId(1),
                    asked: 4096,
                    free: 12,
                    hint: "3 blocks are in limbo".into(),
                },
                "out of memory on device 1: asked for 4096 bytes, 12 are free; 3 blocks are in limbo",
            ),
            (
                2,
                Error::Exhausted {
                    what: "lease slots",
                    limit: 8,
                    remedy: "raise `max_slots`",
                },
                "lease slots used up: the limit is 8; raise `max_slots`",
            ),
            (
                3,
                Error::NotCompiled {
                    backend: BackendKind::Hip,
                },
                "the hip backend is not compiled in; build with the feature `hip`",
            ),
            (
                4,
                Error::Unavailable {
                    backend: BackendKind::Cuda,
                    why: "no driver".into(),
                    remedy: "install one",
                },
                "the cuda backend is unavailable: no driver; install one",
            ),
            (
                5,
                Error::NoDevice {
                    backend: BackendKind::Host,
                    uuid: DeviceUuid([0; 16]),
                },
                "no host device has the uuid 00000000-0000-0000-0000-000000000000; make it visible to this process",
            ),
            (
                6,
                Error::Unsupported {
                    what: "export",
                    why: "pool memory".into(),
                    remedy: "allocate it plainly",
                },
                "export is not supported: pool memory; allocate it plainly",
            ),
            (
                7,
                Error::Invalid {
                    what: "alignment",
                    got: "3".into(),
                    must: "a power of two",
                },
                "alignment is 3, but must be a power of two",
            ),
            (
                8,
                Error::BadDescriptor {
                    what: "length",
                    got: "7".into(),
                    must: "192".into(),
                },
                "not a descriptor: length is 7, but must be 192; pass the bytes of `share` on whole and unchanged",
            ),
            (
                9,
                Error::Mismatch {
                    what: "protocol version",
                    theirs: "2".into(),
                    ours: "1".into(),
                    remedy: "build both sides from one version",
                },
                "protocol version differs: 2 there, 1 here; build both sides from one version",
            ),
            (
                10,
                Error::Connect {
                    path: "/run/x".into(),
                    why: "nobody listens".into(),
                    remedy: "start the producer",
                    source: Some(io()),
                },
                "cannot connect to /run/x: nobody listens; start the producer",
            ),
            (
                11,
                Error::Refused {
                    why: "uid 7 is not allowed".into(),
                    remedy: "allow it",
                },
                "refused: uid 7 is not allowed; allow it",
            ),
            (
                14,
                Error::Forked {
                    what: "this session",
                },
                "made before a fork: this session belongs to the parent process; open a new one in the child",
            ),
            (
                15,
                Error::Capturing {
                    stream: 0x20,
                    remedy: "share before the capture",
                },
                "stream 0x20 is being captured into a graph; share before the capture",
            ),
            (
                17,
                Error::Deadline {
                    what: "the producer's answer",
                },
                "the deadline passed while waiting for the producer's answer; ask again",
            ),
            (
                18,
                Error::Driver {
                    call: "cuMemFree",
                    device: DeviceId(0),
                    source: DriverError {
                        backend: BackendKind::Cuda,
                        code: 700,
                        name: "X".into(),
                    },
                },
                "cuMemFree failed on device 0",
            ),
            (
                19,
                Error::system("memfd_create", "raise RLIMIT_NOFILE", io()),
                "memfd_create failed; raise RLIMIT_NOFILE",
            ),
        ]
    }

    #[test]
    fn every_text_names_both_sides_and_the_remedy() {
        for (code, error, text) in every_variant() {
            assert_eq!(error.to_string(), text);
            assert_eq!(error.code(), code, "{text}");
        }
    }

    #[test]
    fn a_cause_is_in_source_and_not_in_the_text() {
        for (_, error, text) in every_variant() {
            if let Some(source) = std::error::Error::source(&error) {
                assert!(!text.contains(&source.to_string()), "{text}");
            }
        }
    }

    #[test]
    fn an_error_can_cross_threads() {
        fn crosses<T: Send + Sync + 'static>() {}
        crosses::<Error>();
    }
}
