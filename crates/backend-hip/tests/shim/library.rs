//! The library that a case runs over, and its functions as an application in the same process calls
//! them.

use std::env;
use std::ffi::{c_int, c_void};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use libloading::os::unix::Library as Loaded;

use crate::Library;

/// Where Cargo puts the library that this test depends on.
fn whole() -> io::Result<PathBuf> {
    let program = env::current_exe()?;
    let beside = program.parent().expect("a program lies in a directory");
    let found = [
        beside.join("libhip_on_cuda.so"),
        beside.join("../libhip_on_cuda.so"),
    ];
    found
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| io::Error::other("libhip_on_cuda.so was not built"))
}

/// Provides a case's library, in `directory` where it has to be made; `None` where it lies there to
/// be found.
pub fn provide(library: Library, directory: &Path) -> io::Result<Option<PathBuf>> {
    match library {
        Library::Absent => Ok(Some(directory.join("none.so"))),
        Library::Foreign => Ok(Some(PathBuf::from("libc.so.6"))),
        Library::Without([]) => whole().map(Some),
        Library::Without(names) => {
            let path = directory.join("libamdhip64.so");
            without(names, &path)?;
            Ok(Some(path))
        }
        Library::Installed => {
            without(&["hipStreamGetId"], &directory.join("libamdhip64.so.8"))?;
            without(&[], &directory.join("libamdhip64.so.6"))?;
            Ok(None)
        }
        Library::Broken => {
            fs::write(
                directory.join("libamdhip64.so.7"),
                "this is no library at all, but long enough to be looked at",
            )?;
            Ok(None)
        }
    }
}

/// Makes a library that lacks some functions.
fn without(names: &[&str], path: &Path) -> io::Result<()> {
    let mut bytes = fs::read(whole()?)?;
    for name in names {
        blot_out(&mut bytes, name)?;
    }
    fs::write(path, bytes)
}

/// Changes a function's name wherever it stands: the loader finds its place by its hash, and then
/// another name there.
fn blot_out(bytes: &mut [u8], name: &str) -> io::Result<()> {
    let whole = [b"\0", name.as_bytes(), b"\0"].concat();
    let places: Vec<usize> = bytes
        .windows(whole.len())
        .enumerate()
        .filter(|(_, window)| *window == whole)
        .map(|(at, _)| at)
        .collect();
    for &at in &places {
        bytes[at + name.len()] = b'~';
    }
    if places.is_empty() {
        Err(io::Error::other(format!("the library never had {name}")))
    } else {
        Ok(())
    }
}

/// `hipMemAllocationProp` of memory on the first device that can be exported.
#[repr(C)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location: [u32; 2],
    win32: usize,
    flags: [u16; 4],
}

pub static PROPERTIES: Properties = Properties {
    kind: 1,
    handle_types: 1,
    location: [1, 0],
    win32: 0,
    flags: [0; 4],
};

macro_rules! function {
    ($($name:ident = $symbol:literal : fn($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(pub fn $name($($argument: $type),*) -> $result {
            let path = env::var_os(backend_hip::LIBRARY).expect("the parent names the library");
            // SAFETY: `Library::new`: the library is loaded already.
            let library = unsafe { Loaded::new(path) }.expect("it is loaded");
            // SAFETY: `Library::get`: the type is the function's.
            let function = unsafe {
                library.get::<unsafe extern "C" fn($($type),*) -> $result>($symbol.as_bytes())
            };
            let function = function.expect("the library has it");
            // SAFETY: what is passed is a number, or the address of what lives at the caller's.
            unsafe { function($($argument),*) }
        })*
    };
}

function! {
    get_last_error = "hipGetLastError": fn() -> u32;
    set_device = "hipSetDevice": fn(device: c_int) -> u32;
    get_device = "hipGetDevice": fn(device: *mut c_int) -> u32;
    exchange_mode = "hipThreadExchangeStreamCaptureMode": fn(mode: *mut u32) -> u32;
    malloc = "hipMalloc": fn(base: *mut u64, len: usize) -> u32;
    free = "hipFree": fn(base: u64) -> u32;
    stream_create = "hipStreamCreateWithFlags": fn(stream: *mut u64, flags: u32) -> u32;
    mem_create = "hipMemCreate": fn(handle: *mut u64, len: usize, properties: *const Properties, flags: u64) -> u32;
    mem_release = "hipMemRelease": fn(handle: u64) -> u32;
    mem_reserve = "hipMemAddressReserve": fn(base: *mut u64, len: usize, align: usize, hint: u64, flags: u64) -> u32;
    mem_map = "hipMemMap": fn(base: u64, len: usize, offset: usize, handle: u64, flags: u64) -> u32;
    mem_unmap = "hipMemUnmap": fn(base: u64, len: usize) -> u32;
    address_range = "hipMemGetAddressRange": fn(base: *mut u64, len: *mut usize, ptr: u64) -> u32;
    launch_host_func = "hipLaunchHostFunc": fn(stream: u64, function: unsafe extern "C" fn(*mut c_void), data: *mut c_void) -> u32;
    stream_destroy = "hipStreamDestroy": fn(stream: u64) -> u32;
}
