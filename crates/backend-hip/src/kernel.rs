//! What the kernel has of AMD's driver.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Where KFD shows whose queues there are: a file of the name of each process' pid, until after its
/// queues are gone (`kfd_process_remove_sysfs`).
pub(crate) const PROCESSES: &str = "/sys/class/kfd/kfd/proc";

/// The inode of the first PID namespace (`PROC_PID_INIT_INO`), whose pids KFD shows.
const FIRST_PIDS: u64 = 0xEFFF_FFFC;

/// Says whether this process' pids are those that KFD shows.
pub(crate) fn sees_kernels_pids() -> bool {
    use std::os::unix::fs::MetadataExt;

    fs::metadata("/proc/self/ns/pid").is_ok_and(|found| found.ino() == FIRST_PIDS)
}

/// Tells what changes the answers of a runtime: versions that its number does not have, and the
/// models of GPUs.
pub(crate) fn circumstances() -> Vec<String> {
    let read = |path: &str| {
        fs::read_to_string(path)
            .ok()
            .map(|text| format!("{path}: {}", text.trim()))
    };
    let mut told: Vec<String> = ["/sys/module/amdgpu/version", "/opt/rocm/.info/version"]
        .into_iter()
        .filter_map(read)
        .collect();
    let nodes = fs::read_dir("/sys/class/kfd/kfd/topology/nodes")
        .into_iter()
        .flatten()
        .flatten();
    let mut models: Vec<String> = nodes
        .filter_map(|node| model(&node.path().join("properties")))
        .collect();
    models.sort_unstable();
    models.dedup();
    told.append(&mut models);
    told
}

/// Reads the model of a GPU; a processor has none.
fn model(properties: &PathBuf) -> Option<String> {
    let text = fs::read_to_string(properties).ok()?;
    let value = |name| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
    };
    let target = value("gfx_target_version").filter(|version| *version != "0")?;
    Some(format!("gfx {target}, device {}", value("device_id")?))
}

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
            "the kernel's own amdgpu does not share memory by KFD's calls (ROCm/ROCR-Runtime#270): install ROCm's \
             driver (amdgpu-dkms), or a runtime that shares by dma-buf (7.0 and later), or prove descriptors \
             (`gpu-ipc doctor`)"
        }
        (false, false) => {
            "the driver does not export it: set HSA_ENABLE_IPC_MODE_LEGACY=1 in every process, as ROCm's driver has \
             KFD's calls"
        }
        (false, true) => {
            "the driver does not export it: see the kernel's log for amdgpu and amdkfd"
        }
    }
}
