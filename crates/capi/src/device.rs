//! Devices.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use crate::boundary::{call, out, out_handle};
use crate::engine::{BackendKind, Error, Gpu};
use crate::failure::{Failure, Outcome, null};
use crate::kinds::gpu_ipc_device;
use crate::process::Process;
use crate::sized::{self, sized_struct};

/// Shared memory instead of a GPU.
pub const GPU_IPC_HOST: u32 = 1;
/// NVIDIA, through the CUDA driver.
pub const GPU_IPC_CUDA: u32 = 2;
/// AMD, through the HIP runtime.
pub const GPU_IPC_HIP: u32 = 3;

/// What a device is.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_device_info {
    /// `sizeof(gpu_ipc_device_info)`.
    pub size: usize,
    /// `GPU_IPC_HOST`, `GPU_IPC_CUDA`, `GPU_IPC_HIP`, or a vendor of a later version.
    pub backend: u32,
    /// The number under which this process sees it.
    pub number: u32,
    /// The identity under which every process sees it.
    pub uuid: [u8; 16],
    /// Bytes of device memory.
    pub total_bytes: u64,
    /// The vendor's name for it, cut after 127 bytes.
    pub name: [c_char; 128],
}
sized_struct!(gpu_ipc_device_info of 168 { size, backend, number, uuid, total_bytes, name });

/// Finds the devices that this process can use, GPUs first, and opens each.
///
/// Writes as many handles as fit into `capacity` and the number of all to `count`. Loads every
/// vendor's driver that there is. `gpu_ipc_device_open` says of a vendor that is missing why.
///
/// Keeps: nothing; the handles are the caller's to close. Thread: any. Blocks: while drivers start,
/// up to seconds. Errors: `INVALID`, `EXHAUSTED`.
///
/// # Safety
///
/// `devices` has room for `capacity` handles, or is null and `capacity` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_detect(
    devices: *mut *mut gpu_ipc_device,
    capacity: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> i32 {
    call(|process| {
        let count = out(count, "count")?;
        if devices.is_null() && capacity > 0 {
            return Err(null("devices"));
        }
        let found = all(process)?;
        count.set(found.len());
        for (at, gpu) in found.into_iter().take(capacity).enumerate() {
            let device = process.open::<gpu_ipc_device>(gpu)?;
            // SAFETY: `add` asks to stay inside: `at` is below the capacity.
            let place = unsafe { devices.add(at) };
            // SAFETY: `write` asks for a place that may be written: inside the capacity.
            unsafe { place.write(device) };
        }
        Ok(())
    })
}

/// Opens a device by its vendor and number; vendor 0 is the first that there is, GPUs first.
///
/// Loads that vendor's driver alone.
///
/// Keeps: nothing. Thread: any. Blocks: while the driver starts, up to seconds. Errors:
/// `NOT_COMPILED`, `UNAVAILABLE` with the reason, `INVALID`, `DRIVER`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_device_open(
    backend: u32,
    number: u32,
    device: Option<&mut MaybeUninit<*mut gpu_ipc_device>>,
) -> i32 {
    call(|process| {
        let device = out_handle(device, "device")?;
        let gpu = match backend {
            0 => {
                let found = all(process)?.into_iter().nth(number as usize);
                found.ok_or_else(|| {
                    Failure::invalid(
                        "the number of a device",
                        number.to_string(),
                        "below their count",
                    )
                })?
            }
            backend => process.device(kind(backend)?, number)?,
        };
        device.set(process.open(gpu)?);
        Ok(())
    })
}

/// Fills in a device's properties.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `info` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_device_get_info(
    device: *mut gpu_ipc_device,
    info: *mut gpu_ipc_device_info,
) -> i32 {
    call(|process| {
        let gpu = process.get(device)?;
        let mut ours = sized::zeroed::<gpu_ipc_device_info>();
        (ours.backend, ours.number) = (gpu.kind() as u32, gpu.device().0);
        (ours.uuid, ours.total_bytes) = (gpu.uuid().0, gpu.info().total_bytes);
        let name = gpu
            .info()
            .name
            .bytes()
            .filter(|&byte| byte != 0)
            .take(ours.name.len() - 1);
        ours.name
            .iter_mut()
            .zip(name)
            .for_each(|(place, byte)| *place = byte as c_char);
        // SAFETY: `write` asks for what this function asks for.
        unsafe { sized::write(info, &ours) }
    })
}

/// Closes a device; sessions, participants and streams that were opened with it go on. Null is
/// passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_device_close(device: *mut gpu_ipc_device) -> i32 {
    call(|process| process.close(device))
}

fn kind(backend: u32) -> Outcome<BackendKind> {
    u8::try_from(backend)
        .ok()
        .and_then(BackendKind::from_byte)
        .ok_or_else(|| {
            Failure::invalid(
                "the vendor",
                backend.to_string(),
                "0, GPU_IPC_HOST, GPU_IPC_CUDA or GPU_IPC_HIP",
            )
        })
}

fn all(process: &Process) -> Outcome<Vec<Gpu>> {
    let mut found = Vec::new();
    for kind in BackendKind::ALL {
        let backend = match process.backends.get(kind) {
            Ok(backend) => backend,
            Err(error @ Error::Invalid { .. }) => return Err(error.into()),
            Err(_) => continue,
        };
        // A device that fails must not take the others down.
        let count = backend.device_count().unwrap_or(0);
        found.extend((0..count).filter_map(|number| process.device(kind, number).ok()));
    }
    Ok(found)
}
