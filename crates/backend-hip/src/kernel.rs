//! What the kernel has of AMD's driver.

use std::env;
use std::path::Path;

/// The variable that makes the runtime share memory by KFD's own calls, as it did before 7.0.
const LEGACY: &str = "HSA_ENABLE_IPC_MODE_LEGACY";

/// Says whether the driver is the kernel's own. ROCm's (DKMS) gives its module a version.
///
/// The kernel's own has not KFD's calls for memory between processes (ROCm/ROCR-Runtime#270).
pub(crate) fn is_in_box() -> bool {
    !Path::new("/sys/module/amdgpu/version").exists()
}

/// Says why a handle of plain memory may be refused, and what to change.
pub(crate) fn no_handle() -> &'static str {
    let legacy = env::var(LEGACY).is_ok_and(|value| value == "1");
    match (is_in_box(), legacy) {
        (true, true) => {
            "the kernel's own amdgpu does not share memory by KFD's calls, which HSA_ENABLE_IPC_MODE_LEGACY=1 asks for \
             (ROCm/rocm-systems#2209): unset it in every process"
        }
        (true, false) => {
            "the kernel's own amdgpu does not share memory by KFD's calls (ROCm/ROCR-Runtime#270): install ROCm's driver \
             (amdgpu-dkms), or a runtime that shares by dma-buf (7.0 and later), or prove descriptors (`gpu-ipc doctor`)"
        }
        (false, false) => {
            "the driver does not export it: set HSA_ENABLE_IPC_MODE_LEGACY=1 in every process, as ROCm's driver has KFD's calls"
        }
        (false, true) => "the driver does not export it: see the kernel's log for amdgpu and amdkfd",
    }
}
