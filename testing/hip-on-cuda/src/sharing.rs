//! HIP's functions about handles, with AMD's rules: the handle names its process, and an equal
//! number is refused.
//!
//! A handle of AMD's is 32 bytes of the driver's, the size, an offset, and the process number of
//! the exporting process. One of the driver below is 64 bytes, which it cannot hold: a
//! [`server`] has them, or, where KFD's calls would, a file of shared memory.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process;
use std::sync::{Mutex, Once};

use gpu_api::lock::Acquire;

use crate::device::entered;
use crate::export::hip;
use crate::machine::{INVALID_VALUE, Kind, Outcome};
use crate::server::{self, Below, Token};
use crate::settings::{Fault, Settings};

pub(crate) const INVALID_DEVICE_POINTER: u32 = 17;
const INVALID_CONTEXT: u32 = 201;
const ALREADY_MAPPED: u32 = 208;

/// `hipIpcMemHandle_t`, and the handle of an event.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Handle {
    bytes: [u8; 64],
}

impl Handle {
    pub(crate) fn bytes(self) -> [u8; 64] {
        self.bytes
    }
}

/// Names of exported allocations, by the allocation's base.
static TOKENS: Mutex<BTreeMap<u64, Token>> = Mutex::new(BTreeMap::new());

fn path(name: &Token) -> PathBuf {
    let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    PathBuf::from(format!("/dev/shm/gpu-ipc-shim-{name}"))
}

/// The number that this process goes by.
fn process_number() -> u32 {
    if Settings::get().has(Fault::EqualPid) {
        1
    } else {
        process::id()
    }
}

/// Forgets what was exported of an allocation that is freed; says whether anything was.
pub(crate) fn forget(base: u64) -> bool {
    let exported = TOKENS.acquire().remove(&base);
    if let Some(token) = &exported {
        server::forget(token);
        // There is none of a server's, and somebody else may have cleared the directory.
        let _ = fs::remove_file(path(token));
    }
    exported.is_some()
}

/// Numbers the PID namespace: a process number means something only in its own.
fn namespace() -> u32 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino() as u32)
}

/// Clears away what killed processes left.
fn sweep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // What cannot be read or removed stays: it is a few bytes.
        for entry in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let hex = name.strip_prefix("gpu-ipc-shim-");
            let hex = hex.and_then(|rest| rest.get(..16)).unwrap_or_default();
            let Ok(numbers) = u64::from_str_radix(hex, 16) else {
                continue;
            };
            let (number, its_namespace) = ((numbers >> 32) as u32, numbers as u32);
            let here = its_namespace.swap_bytes() == namespace();
            if here && !PathBuf::from(format!("/proc/{}", number.swap_bytes())).exists() {
                let _ = fs::remove_file(entry.path());
            }
        }
    });
}

/// Makes the name of an allocation.
fn name(base: u64) -> Token {
    let mut name = [0; 32];
    name[..4].copy_from_slice(&process::id().to_le_bytes());
    name[4..8].copy_from_slice(&namespace().to_le_bytes());
    name[8..16].copy_from_slice(&base.to_le_bytes());
    let time = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    name[16..32].copy_from_slice(&time.as_nanos().to_le_bytes());
    name
}

fn export(device: i32, base: u64, len: usize, below: Below) -> Outcome<Handle> {
    // One that was exported keeps its name ("Reuse token already stored on the BO").
    let known = TOKENS.acquire().get(&base).copied();
    let token = known.unwrap_or_else(|| name(base));
    if Settings::get().has_server() {
        server::register(token, below)?;
    } else {
        sweep();
        fs::write(path(&token), below).map_err(|_| crate::machine::UNKNOWN)?;
    }
    TOKENS.acquire().insert(base, token);
    let mut bytes = [0; 64];
    bytes[..32].copy_from_slice(&token);
    bytes[32..40].copy_from_slice(&(len as u64).to_le_bytes());
    bytes[48..52].copy_from_slice(&process_number().to_le_bytes());
    bytes[52..56].copy_from_slice(&device.to_le_bytes());
    Ok(Handle { bytes })
}

/// Finds what the driver below needs, and opens it.
fn attach<T>(handle: &Handle, open: impl FnOnce(Below) -> Outcome<T>) -> Outcome<T> {
    let token: Token = handle.bytes[..32].try_into().map_err(|_| INVALID_VALUE)?;
    if Settings::get().has_server() {
        let process = handle.bytes[48..52].try_into().map_err(|_| INVALID_VALUE)?;
        return server::attach(u32::from_le_bytes(process), token, open);
    }
    let bytes = fs::read(path(&token)).map_err(|_| INVALID_DEVICE_POINTER)?;
    open(bytes.try_into().map_err(|_| INVALID_DEVICE_POINTER)?)
}

hip! {
    hipIpcGetMemHandle(handle: Handle; base: u64) {
        let (machine, settings) = (entered()?.0, Settings::get());
        let (start, len) = machine.range(base)?;
        if start != base {
            return Err(INVALID_VALUE);
        }
        let device = match machine.kind(base)? {
            Some(Kind::Device { device, .. }) => device,
            _ => return Err(INVALID_VALUE),
        };
        let below = machine.handle(if settings.has(Fault::OpensOthers) { machine.alloc(device, len)? } else { base })?;
        let mut handle = export(device, base, len, below)?;
        if settings.has(Fault::NoKernelIpc) && !settings.has_server() {
            if !settings.within((5, 7), (6, 2)) {
                return Err(INVALID_VALUE);
            }
            // A success all the same, with a handle of nothing.
            handle.bytes[..32].fill(0);
        }
        Ok(handle)
    }
    hipIpcOpenMemHandle(base: u64; handle: Handle, flags: u32) {
        let ((machine, device), settings) = (entered()?, Settings::get());
        if flags != u32::from(settings.at_least(6, 0)) {
            return Err(INVALID_VALUE);
        }
        if handle.bytes[32..40] == [0; 8] {
            return Err(INVALID_VALUE);
        }
        if handle.bytes[48..52] == process_number().to_le_bytes() {
            return Err(INVALID_CONTEXT);
        }
        // The exporter's number of its device, looked up among this process' own.
        let device_there = i32::from_le_bytes(handle.bytes[52..56].try_into().map_err(|_| INVALID_VALUE)?);
        if settings.at_least(7, 0) && device_there >= machine.count() {
            return Err(INVALID_VALUE);
        }
        if settings.has(Fault::AttachFails) {
            return Err(INVALID_DEVICE_POINTER);
        }
        let open = |below| machine.open(device, below).map_err(|code| match code {
            2 | ALREADY_MAPPED => code,
            _ => INVALID_DEVICE_POINTER,
        });
        attach(&handle, open)
    }
    hipIpcCloseMemHandle(; base: u64) {
        let machine = entered()?.0;
        // AMD's waits for the whole device.
        machine.synchronize()?;
        machine.close(base)
    }
    hipIpcGetEventHandle(handle: Handle; event: u64) {
        entered()?.0.event_handle(event).map(|bytes| Handle { bytes })
    }
}
