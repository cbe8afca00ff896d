//! What a case asks of the fake driver.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use backend_cuda::CudaBackend;
use cudarc::driver::sys;
use gpu_api::{DeviceId, Error, MemHandle, Result};

/// The one device of most cases.
pub const GPU: DeviceId = DeviceId(0);

/// What the fake driver counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Kind {
    Plain = 1,
    Physical = 2,
    Reserved = 3,
    Mapped = 4,
    Opened = 5,
    Event = 6,
    Stream = 7,
    Host = 8,
    Registered = 9,
    Pool = 10,
    Managed = 11,
    Pinned = 12,
    Foreign = 13,
    /// A pool itself; `Pool` is memory of one.
    MemPool = 14,
}

const GIVEN_OUT: [Kind; 12] = [
    Kind::Plain,
    Kind::Physical,
    Kind::Reserved,
    Kind::Mapped,
    Kind::Opened,
    Kind::Event,
    Kind::Stream,
    Kind::Host,
    Kind::Registered,
    Kind::Pool,
    Kind::Managed,
    Kind::MemPool,
];

/// Calls that give something back: what a failure of one of them leaves is leaked on purpose.
const GIVING_BACK: [&str; 12] = [
    "cuMemFree_v2",
    "cuMemRelease",
    "cuMemUnmap",
    "cuMemAddressFree",
    "cuIpcCloseMemHandle",
    "cuEventDestroy_v2",
    "cuStreamDestroy_v2",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuDevicePrimaryCtxRelease_v2",
    "cuMemFreeAsync",
    "cuMemPoolDestroy",
];

macro_rules! control {
    ($($name:ident = $symbol:literal : fn($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(pub fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: `culib`: the case runs over the fake library, which is loaded already.
            let library = unsafe { sys::culib() };
            // SAFETY: `Library::get`: the type is the function's in libcuda.c.
            let function = unsafe {
                library.get::<unsafe extern "C" fn($($type),*) $(-> $result)?>($symbol.as_bytes())
            };
            let function = function.expect("the fake driver has all of its controls");
            // SAFETY: the fake driver's controls take any value; addresses are of what lives here.
            unsafe { function($($argument),*) }
        })*
    };
}

control! {
    fail_nth = "fake_fail_nth": fn(nth: c_long, code: u32);
    fail_call = "fake_fail_call": fn(name: *const c_char, code: u32);
    failed_text = "fake_failed": fn() -> *const c_char;
    trace_text = "fake_trace": fn() -> *const c_char;
    placed_text = "fake_placed": fn() -> *const c_char;
    clear_trace = "fake_clear_trace": fn();
    violations = "fake_violations": fn() -> c_int;
    depth = "fake_depth": fn() -> c_int;
    mode = "fake_mode": fn() -> u32;
    set_mode = "fake_set_mode": fn(to: u32);
    deinitialize = "fake_deinitialize": fn();
    set_capture = "fake_set_capture": fn(to: c_int);
    capture = "fake_capture": fn() -> c_int;
    set_pending = "fake_set_pending": fn(to: c_int);
    retained = "fake_retained": fn(device: c_int) -> c_int;
    last_access_count = "fake_last_access_count": fn() -> u64;
    foreign_context = "fake_foreign_context": fn() -> *mut c_void;
    current = "fake_current": fn() -> *mut c_void;
    live_number = "fake_live": fn(kind: c_int) -> c_long;
    add_number = "fake_add": fn(kind: c_int, len: u64, exportable: u64) -> u64;
    flags_number = "fake_flags": fn(kind: c_int, key: u64) -> u32;
    foreign_handle_bytes = "fake_foreign_handle": fn(out: *mut u8);
    foreign_stream = "fake_foreign_stream": fn() -> *mut c_void;
    push = "cuCtxPushCurrent_v2": fn(context: *mut c_void) -> u32;
    pop = "cuCtxPopCurrent_v2": fn(context: *mut *mut c_void) -> u32;
}

/// Loads the backend over the fake driver.
pub fn cuda() -> Arc<CudaBackend> {
    CudaBackend::load().expect("the fake driver starts")
}

/// Lets the next call of `name` fail.
pub fn fail(name: &str, code: u32) {
    let name = CString::new(name).expect("a function's name has no zero");
    fail_call(name.as_ptr(), code);
}

/// Returns the call that was made to fail, empty if none was yet.
pub fn failed() -> String {
    text(failed_text())
}

/// Returns the calls since the trace was cleared, without those that look after the thread.
pub fn trace() -> Vec<String> {
    const THREAD: [&str; 5] = [
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamGetCtx",
    ];
    let all = text(trace_text());
    all.split_whitespace()
        .filter(|name| !THREAD.contains(name) && *name != "cuDeviceGetAttribute")
        .map(str::to_owned)
        .collect()
}

/// Returns the calls about streams since the trace was cleared: the function, the stream's number,
/// and the device whose context was current, -1 where none was.
pub fn placed() -> Vec<(String, u64, i64)> {
    let all = text(placed_text());
    all.lines()
        .map(|line| {
            let mut words = line.split(' ');
            let mut next = || words.next().expect("three words");
            (
                next().to_owned(),
                next().parse().expect("a number"),
                next().parse().expect("a number"),
            )
        })
        .collect()
}

/// Counts what is alive.
pub fn live(kind: Kind) -> i64 {
    live_number(kind as c_int)
}

/// Returns everything that is alive.
pub fn all_live() -> Vec<(Kind, i64)> {
    GIVEN_OUT
        .into_iter()
        .map(|kind| (kind, live(kind)))
        .filter(|(_, count)| *count != 0)
        .collect()
}

/// Makes memory that the backend did not make.
pub fn add(kind: Kind, exportable: bool) -> u64 {
    add_number(kind as c_int, 0x20_0000, u64::from(exportable))
}

/// Returns the flags that something was made with.
pub fn flags(kind: Kind, key: u64) -> u32 {
    flags_number(kind as c_int, key)
}

/// Returns a handle that another process exported.
pub fn foreign_handle() -> MemHandle {
    let mut bytes = [0; 64];
    foreign_handle_bytes(bytes.as_mut_ptr());
    MemHandle(bytes)
}

/// Makes a descriptor that the fake driver takes for memory of `len` bytes.
pub fn foreign_fd(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("fake-gpu", rustix::fs::MemfdFlags::CLOEXEC)
        .expect("a memfd can be made");
    rustix::fs::ftruncate(&fd, len).expect("a memfd can be sized");
    fd
}

/// Runs `attempt` with its first call failing, its second, and so on until it makes no more calls;
/// after each one the thread must be as it was, and nothing may be left but what a failed giving
/// back leaks.
pub fn each_failure<T: Debug>(attempt: impl Fn() -> Result<T>, undo: impl Fn(T)) {
    let before = all_live();
    for nth in 1.. {
        assert!(nth < 100, "a hundred calls for one operation");
        fail_nth(nth, 719);
        let result = attempt();
        let failed = failed();
        fail_nth(0, 0);
        assert_eq!(
            (depth(), mode()),
            (0, 0),
            "the thread after a failure of {failed}"
        );
        assert_eq!(violations(), 0, "after a failure of {failed}");
        match result {
            Ok(made) => {
                // Properties of the device that cannot be asked have a safe answer, and what a call
                // gives back at its end it may leak; any other failure must be told.
                let may_pass = failed.is_empty()
                    || failed == "cuDeviceGetAttribute"
                    || GIVING_BACK.contains(&failed.as_str());
                assert!(may_pass, "a failure of {failed} was swallowed");
                undo(made);
            }
            Err(error) => assert!(!failed.is_empty(), "an error without a failure: {error:?}"),
        }
        if failed.is_empty() {
            assert!(nth > 1, "the operation makes no call at all");
            return;
        }
        if !GIVING_BACK.contains(&failed.as_str()) {
            assert_eq!(all_live(), before, "after a failure of {failed}");
        }
    }
}

/// Returns the driver's code that an error carries.
pub fn code(error: &Error) -> Option<u32> {
    match error {
        Error::Driver { source, .. } => Some(source.code),
        _ => None,
    }
}

fn text(text: *const c_char) -> String {
    // SAFETY: `CStr::from_ptr`: the fake driver gives its own static arrays, which end with a zero.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .expect("names are ASCII")
        .to_owned()
}
