//! What a call failed with, as C gets it: a code, a text, a remedy; the last of each thread.

use std::cell::Cell;
use std::ffi::{CStr, c_char};

use crate::engine::{ClaimError, Error, ObjectError, explain};

/// What a function returns that did what it was asked for.
pub const GPU_IPC_OK: i32 = 0;

/// The device has no room: collect, drop blocks or trim, then try again.
pub const GPU_IPC_OUT_OF_MEMORY: i32 = 1;
/// A limit of the library or of the system is reached: raise it or hold less.
pub const GPU_IPC_EXHAUSTED: i32 = 2;
/// The library was built without that vendor.
pub const GPU_IPC_NOT_COMPILED: i32 = 3;
/// This machine cannot run that vendor's driver.
pub const GPU_IPC_UNAVAILABLE: i32 = 4;
/// This process does not see the device.
pub const GPU_IPC_NO_DEVICE: i32 = 5;
/// The device, the driver or the memory cannot do that.
pub const GPU_IPC_UNSUPPORTED: i32 = 6;
/// An argument is wrong: mend the call.
pub const GPU_IPC_INVALID: i32 = 7;
/// The bytes are no descriptor: send it whole and unchanged.
pub const GPU_IPC_BAD_DESCRIPTOR: i32 = 8;
/// Both sides are well, but do not belong together.
pub const GPU_IPC_MISMATCH: i32 = 9;
/// No process, or one that is not allowed, is at the other end.
pub const GPU_IPC_CONNECT: i32 = 10;
/// The producer or the broker refused.
pub const GPU_IPC_REFUSED: i32 = 11;
/// The producer is dead or has closed its session: connect to its successor.
pub const GPU_IPC_PRODUCER_GONE: i32 = 12;
/// The participant is dead or gone: share with one that is connected.
pub const GPU_IPC_PARTICIPANT_GONE: i32 = 13;
/// The handle belongs to the parent of this forked child: open an own one.
pub const GPU_IPC_FORKED: i32 = 14;
/// The stream is being captured into a graph.
pub const GPU_IPC_CAPTURING: i32 = 15;
/// The session is shutting down.
pub const GPU_IPC_CLOSING: i32 = 16;
/// The time was over first: ask again, nothing was lost.
pub const GPU_IPC_DEADLINE: i32 = 17;
/// A call of the driver failed.
pub const GPU_IPC_DRIVER: i32 = 18;
/// A call of the operating system failed.
pub const GPU_IPC_SYSTEM: i32 = 19;
/// The call would have to wait: try again when the descriptor is readable.
pub const GPU_IPC_WOULD_BLOCK: i32 = 101;
/// The producer took the grant back: have it shared again.
pub const GPU_IPC_REVOKED: i32 = 102;
/// The descriptor was claimed before, as often as it can be.
pub const GPU_IPC_ALREADY_CLAIMED: i32 = 103;
/// The lease ended long ago: have it shared again.
pub const GPU_IPC_STALE: i32 = 104;
/// The descriptor is for another participant.
pub const GPU_IPC_NOT_ADDRESSEE: i32 = 105;
/// There is no such object that this user may open.
pub const GPU_IPC_NOT_FOUND: i32 = 201;
/// The name has another epoch than was expected.
pub const GPU_IPC_CONFLICT: i32 = 202;
/// The broker went while the object was being filled.
pub const GPU_IPC_WRITER_LOST: i32 = 203;
/// The object was aborted before its commit.
pub const GPU_IPC_ABORTED: i32 = 204;
/// The two epochs have different layouts: nothing changed.
pub const GPU_IPC_LAYOUT_DIFFERS: i32 = 205;
/// The addresses of a reader are lost: open the object anew.
pub const GPU_IPC_POISONED: i32 = 206;
/// The reader sleeps: wake it first.
pub const GPU_IPC_ASLEEP: i32 = 207;
/// The handle is null, closed, of another kind, or another library's.
pub const GPU_IPC_BAD_HANDLE: i32 = 301;
/// The library failed inside: a bug of it. What was asked for may be done in part.
pub const GPU_IPC_PANIC: i32 = 302;

/// The name of each code.
const NAMES: &[(i32, &CStr)] = &[
    (GPU_IPC_OK, c"ok"),
    (GPU_IPC_OUT_OF_MEMORY, c"out of memory"),
    (GPU_IPC_EXHAUSTED, c"exhausted"),
    (GPU_IPC_NOT_COMPILED, c"not compiled"),
    (GPU_IPC_UNAVAILABLE, c"unavailable"),
    (GPU_IPC_NO_DEVICE, c"no device"),
    (GPU_IPC_UNSUPPORTED, c"unsupported"),
    (GPU_IPC_INVALID, c"invalid"),
    (GPU_IPC_BAD_DESCRIPTOR, c"bad descriptor"),
    (GPU_IPC_MISMATCH, c"mismatch"),
    (GPU_IPC_CONNECT, c"cannot connect"),
    (GPU_IPC_REFUSED, c"refused"),
    (GPU_IPC_PRODUCER_GONE, c"producer gone"),
    (GPU_IPC_PARTICIPANT_GONE, c"participant gone"),
    (GPU_IPC_FORKED, c"forked"),
    (GPU_IPC_CAPTURING, c"capturing"),
    (GPU_IPC_CLOSING, c"closing"),
    (GPU_IPC_DEADLINE, c"deadline"),
    (GPU_IPC_DRIVER, c"driver failed"),
    (GPU_IPC_SYSTEM, c"system failed"),
    (GPU_IPC_WOULD_BLOCK, c"would block"),
    (GPU_IPC_REVOKED, c"revoked"),
    (GPU_IPC_ALREADY_CLAIMED, c"already claimed"),
    (GPU_IPC_STALE, c"stale"),
    (GPU_IPC_NOT_ADDRESSEE, c"not the addressee"),
    (GPU_IPC_NOT_FOUND, c"not found"),
    (GPU_IPC_CONFLICT, c"conflict"),
    (GPU_IPC_WRITER_LOST, c"writer lost"),
    (GPU_IPC_ABORTED, c"aborted"),
    (GPU_IPC_LAYOUT_DIFFERS, c"layout differs"),
    (GPU_IPC_POISONED, c"poisoned"),
    (GPU_IPC_ASLEEP, c"asleep"),
    (GPU_IPC_BAD_HANDLE, c"bad handle"),
    (GPU_IPC_PANIC, c"panic"),
];

/// What Rust programs call something, and C programs.
const NAMES_IN_C: &[(&str, &str)] = &[
    (
        "`SessionBuilder::max_slots`",
        "`max_leases` of gpu_ipc_session_options",
    ),
    ("`max_slots`", "`max_leases` of gpu_ipc_session_options"),
    (
        "SessionBuilder::allow_uids",
        "`uids` of gpu_ipc_session_options",
    ),
    ("`Session::alloc`", "gpu_ipc_alloc"),
    ("Session::alloc", "gpu_ipc_alloc"),
    ("(After::Done)", "(no stream)"),
    ("`share`", "gpu_ipc_share"),
    (
        "ask for read-write access: `Caps::read_only` says when",
        "connect without `read_only`",
    ),
    (
        "wait on the host: `Caps::stream_waits` says when",
        "wait without a stream",
    ),
    (
        "vouch for it with `HipBackend::adopt_memory` if it came from hipMalloc, or ",
        "",
    ),
    (", name it with `HipBackend::adopt_stream`,", ","),
    (
        "`Layout::pack_groups`",
        "`groups` of gpu_ipc_create_options",
    ),
];

/// Writes a text of the engine's with the names that C has.
fn in_c(text: String) -> String {
    if !text.contains("::") && !text.contains('`') {
        return text;
    }
    NAMES_IN_C
        .iter()
        .fold(text, |text, (rust, c)| text.replace(rust, c))
}

/// What a call failed with.
#[derive(Debug)]
pub(crate) struct Failure {
    code: i32,
    text: String,
    remedy: String,
}

impl Failure {
    /// Makes the failure of a handle; the text ends with the remedy.
    pub fn handle(text: String) -> Failure {
        Failure::of(GPU_IPC_BAD_HANDLE, text)
    }

    /// Makes the failure of an argument.
    pub fn invalid(what: &'static str, got: impl ToString, must: &'static str) -> Failure {
        Error::invalid(what, got, must).into()
    }

    /// Makes the failure of a shutdown whose time was over while something was held.
    pub fn held(report: String) -> Failure {
        Failure::of(
            GPU_IPC_DEADLINE,
            format!("{report}; wait longer, or let it end by itself"),
        )
    }

    /// Makes the failure of a panic.
    pub fn panic(said: &str) -> Failure {
        Failure::of(
            GPU_IPC_PANIC,
            format!("the library failed inside: {said}; report it with this text"),
        )
    }

    pub fn code(&self) -> i32 {
        self.code
    }

    /// Makes a failure of a text whose remedy stands behind its last semicolon.
    fn of(code: i32, text: String) -> Failure {
        let text = in_c(text);
        let remedy = text
            .rsplit_once("; ")
            .map_or("", |(_, remedy)| remedy)
            .to_owned();
        Failure { code, text, remedy }
    }

    /// Makes a failure of an error: its text with its causes, and the remedy of its own text.
    fn caused(code: i32, error: &dyn std::error::Error) -> Failure {
        Failure {
            text: in_c(explain(error)),
            ..Failure::of(code, error.to_string())
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let must = match &error {
            Error::Invalid { must, .. } => Some(format!("pass what is {must}")),
            Error::Driver { .. } => {
                Some("look up the driver's error, which the text has".to_owned())
            }
            _ => None,
        };
        let mut failure = Failure::caused(error.code(), &error);
        failure.remedy = must.unwrap_or(failure.remedy);
        failure
    }
}

impl From<ClaimError> for Failure {
    fn from(error: ClaimError) -> Failure {
        match error {
            ClaimError::Backend(error) => error.into(),
            error => Failure::caused(error.code(), &error),
        }
    }
}

impl From<ObjectError> for Failure {
    fn from(error: ObjectError) -> Failure {
        match error {
            ObjectError::Gpu(error) => error.into(),
            error => Failure::caused(error.code(), &error),
        }
    }
}

/// What a call gives, before C gets a number.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// Makes the failure of an argument that is null.
#[cold]
pub(crate) fn null(what: &'static str) -> Failure {
    Failure::invalid(what, "null", "the address of one")
}

/// The bytes of a text with its zero byte; what is longer is cut.
const TEXT_BYTES: usize = 4096;
/// As [`TEXT_BYTES`], of a remedy.
const REMEDY_BYTES: usize = 1024;

/// The last failure of a thread, as C reads it.
///
/// The texts stay at one address for the thread's life, so that one that is read too late is
/// another text and not freed memory. Nothing is dropped, so that they are there in destructors
/// that run after those of thread-locals too.
struct Last {
    code: Cell<i32>,
    text: Cell<[u8; TEXT_BYTES]>,
    remedy: Cell<[u8; REMEDY_BYTES]>,
}

thread_local! {
    static LAST: Last = const {
        Last {
            code: Cell::new(GPU_IPC_OK),
            text: Cell::new([0; TEXT_BYTES]),
            remedy: Cell::new([0; REMEDY_BYTES]),
        }
    };
}

/// Keeps a failure for the thread that asks, and returns its code.
#[cold]
pub(crate) fn keep(failure: Failure) -> i32 {
    LAST.with(|last| {
        last.code.set(failure.code);
        last.text.set(terminated(&failure.text));
        last.remedy.set(terminated(&failure.remedy));
    });
    failure.code
}

/// Writes a text with a zero byte behind; one that is too long ends with three dots.
fn terminated<const N: usize>(text: &str) -> [u8; N] {
    const DOTS: &str = "...";
    let mut bytes = [0; N];
    let mut len = 0;
    let mut put = |c: char, room: usize| {
        let fits = len + c.len_utf8() <= room;
        if fits {
            c.encode_utf8(&mut bytes[len..]);
            len += c.len_utf8();
        }
        fits
    };
    let is_cut = text.bytes().filter(|&byte| byte != 0).count() >= N;
    let room = if is_cut { N - 1 - DOTS.len() } else { N - 1 };
    let fitted = text.chars().filter(|&c| c != '\0').all(|c| put(c, room));
    if !fitted {
        DOTS.chars().all(|dot| put(dot, N - 1));
    }
    bytes
}

/// Returns the code of the last call that failed on this thread; 0 when none has since
/// `gpu_ipc_clear_error`. As `errno` it is not touched by a call that succeeds.
///
/// Keeps: nothing. Thread: any; each has its own. Blocks: no. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_last_error() -> i32 {
    LAST.with(|last| last.code.get())
}

/// Forgets the last failure of this thread: the code is 0 and both texts are empty until the next
/// call that fails. For calls that return a value, where that alone does not say whether they
/// failed.
///
/// Keeps: nothing. Thread: any; each has its own. Blocks: no. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_clear_error() {
    LAST.with(|last| {
        last.code.set(GPU_IPC_OK);
        last.text.set([0; TEXT_BYTES]);
        last.remedy.set([0; REMEDY_BYTES]);
    });
}

/// Returns what the last call that failed on this thread says: both sides of what differs, and the
/// cause.
///
/// The text is UTF-8, never null, cut after 4,095 bytes, and at one address until the thread's end:
/// the next call on this thread that fails writes over it.
///
/// Keeps: nothing. Thread: any; each has its own. Blocks: no. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_last_error_text() -> *const c_char {
    LAST.with(|last| last.text.as_ptr().cast_const().cast())
}

/// Returns what to do about the last call that failed on this thread; empty where there is nothing.
///
/// The text is UTF-8, never null, cut after 1,023 bytes, and at one address until the thread's end:
/// the next call on this thread that fails writes over it.
///
/// Keeps: nothing. Thread: any; each has its own. Blocks: no. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_last_error_remedy() -> *const c_char {
    LAST.with(|last| last.remedy.as_ptr().cast_const().cast())
}

/// Returns a code's name, a few words that stay the same in every version; "unknown" for a code of
/// a later version.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_error_name(code: i32) -> *const c_char {
    let found = NAMES
        .iter()
        .find(|(number, _)| *number == code)
        .map(|(_, name)| *name);
    found.unwrap_or(c"unknown").as_ptr()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn text() -> String {
        // SAFETY: `from_ptr` asks for a text with a zero byte: the header says so of this function.
        let text = unsafe { CStr::from_ptr(gpu_ipc_last_error_text()) };
        text.to_str().expect("UTF-8").to_owned()
    }

    #[test]
    fn a_text_stays_at_its_address_and_is_cut_between_characters() {
        let before = gpu_ipc_last_error_text();
        keep(Failure::handle("one; two".into()));
        assert_eq!(
            (text().as_str(), gpu_ipc_last_error()),
            ("one; two", GPU_IPC_BAD_HANDLE)
        );
        // Of two bytes each, behind one.
        keep(Failure::panic(&format!("a{}", "é".repeat(TEXT_BYTES))));
        assert!(
            text().ends_with("é...") && text().len() >= TEXT_BYTES - 2,
            "{}",
            text().len()
        );
        assert_eq!(gpu_ipc_last_error_text(), before);
        assert_eq!(&terminated::<5>("abcd"), b"abcd\0");
        assert_eq!(&terminated::<5>("abcde"), b"a...\0");
        assert_eq!(&terminated::<5>("a\0bcd"), b"abcd\0");
        gpu_ipc_clear_error();
        assert_eq!((text().as_str(), gpu_ipc_last_error()), ("", GPU_IPC_OK));
    }

    /// Finds `Type::name` in the texts of a file, up to its tests.
    fn names_in_texts(file: &Path) -> Vec<String> {
        let source = std::fs::read_to_string(file).expect("text");
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().map(str::trim).filter(|line| {
            let not_for_users = [
                "//",
                "#[",
                "panic!",
                "unreachable!",
                "debug_assert",
                "assert",
            ];
            !not_for_users.iter().any(|head| line.starts_with(head)) && !line.contains(".expect(")
        });
        let texts = lines.flat_map(|line| line.split('"').skip(1).step_by(2));
        texts
            .filter(|text| {
                text.match_indices("::").any(|(at, _)| {
                    let before = text[..at].rsplit(|c: char| !c.is_alphanumeric()).next();
                    before.is_some_and(|word| word.starts_with(char::is_uppercase))
                })
            })
            .map(str::to_owned)
            .collect()
    }

    /// What a C program cannot reach, or has no other name for.
    const OF_RUST: &[&str] = &[
        "share by handle (`Sharing::Handle`)",
        "create it with `EventKind::Interprocess`",
        "ask `Caps::stream_writes` and `Caps::stream_waits` first",
        "ask `Caps::ranges` first, or choose another backend",
        "ask `Caps::managed` first, or allocate device memory",
        "share by handle (`Sharing::Handle`), which maps memory for every device, or use one device a process",
        "what `GroupWriter::commit` writes",
    ];

    #[test]
    fn remedies_name_functions_that_c_has() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .expect("crates");
        let names = [
            "ipc-rc",
            "transport",
            "broker",
            "driver",
            "backend-host",
            "backend-cuda",
            "backend-hip",
        ];
        let mut folders: Vec<_> = names
            .iter()
            .map(|name| crates.join(name).join("src"))
            .collect();
        let mut found = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    found.extend(names_in_texts(&path));
                }
            }
        }
        assert!(found.len() > 10, "only {found:?}");
        found.retain(|text| in_c(text.clone()).contains("::") && !OF_RUST.contains(&text.as_str()));
        assert!(
            found.is_empty(),
            "name what C has for it in NAMES_IN_C: {found:#?}"
        );
    }
}
