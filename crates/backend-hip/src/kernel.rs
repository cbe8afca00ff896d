//! What the kernel has of AMD's driver.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use gpu_api::DeviceUuid;

use crate::version::Version;

/// Where KFD shows whose queues there are: a file of the name of each process' pid, until after its
/// queues are gone (`kfd_process_remove_sysfs`).
pub(crate) const PROCESSES: &str = "/sys/class/kfd/kfd/proc";

/// Where KFD lists the processors and GPUs of the machine.
pub(crate) const NODES: &str = "/sys/class/kfd/kfd/topology/nodes";

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
    let nodes = fs::read_dir(NODES).into_iter().flatten().flatten();
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

/// A GPU, or a partition of one, as KFD lists it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Node {
    number: u32,
    unique: u64,
}

impl Node {
    /// Says whether the runtime's identity of a device is this one's: its unique number in
    /// hexadecimal.
    pub(crate) fn is(self, identity: DeviceUuid) -> bool {
        identity.0 == *format!("{:016x}", self.unique).as_bytes()
    }

    /// Returns what tells it from others with its unique number, in every process until the next
    /// start of the machine.
    pub(crate) fn identity(self, shared: DeviceUuid) -> DeviceUuid {
        let mut bytes = shared.0;
        bytes[..8].copy_from_slice(format!("kfd-{:04x}", self.number).as_bytes());
        DeviceUuid(bytes)
    }
}

/// Lists the GPUs in the order of the runtime's numbers: those that KFD lets this process see, as
/// the variables leave them. `None` where that is not certain.
pub(crate) fn visible_gpus(folder: &Path) -> Option<Vec<Node>> {
    let text = |name| env::var(name).ok();
    let hip = text("HIP_VISIBLE_DEVICES").or_else(|| text("CUDA_VISIBLE_DEVICES"));
    chosen(
        &chosen(&gpus(folder), text("ROCR_VISIBLE_DEVICES").as_deref())?,
        hip.as_deref(),
    )
}

/// Lists the GPUs in the order of their nodes.
fn gpus(folder: &Path) -> Vec<Node> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut nodes: Vec<Node> = entries
        .filter_map(|node| {
            // One that this process may not use cannot be read.
            let properties = node.path().join("properties");
            model(&properties)?;
            let text = fs::read_to_string(properties).ok()?;
            let unique = text
                .lines()
                .find_map(|line| line.strip_prefix("unique_id "))?;
            let number = node.file_name().to_str()?.parse().ok()?;
            (number <= 0xffff).then_some(Node {
                number,
                unique: unique.trim().parse().ok()?,
            })
        })
        .collect();
    nodes.sort_unstable_by_key(|node| node.number);
    nodes
}

/// Leaves the GPUs that a variable names by their numbers, in its order, up to the first that is
/// none; `None` for one that names them otherwise.
fn chosen(all: &[Node], variable: Option<&str>) -> Option<Vec<Node>> {
    let Some(variable) = variable else {
        return Some(all.to_vec());
    };
    let mut left = Vec::new();
    for word in variable.split(',').map(str::trim) {
        match word.parse::<usize>() {
            Ok(number) if number < all.len() => left.push(all[number]),
            Ok(_) => break,
            Err(_) if word == "-1" => break,
            Err(_) => return None,
        }
    }
    Some(left)
}

/// The variable that chooses how the runtime shares plain memory between processes.
const LEGACY: &str = "HSA_ENABLE_IPC_MODE_LEGACY";

/// How the runtime shares plain memory between processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IpcMode {
    /// By KFD's own calls, which only ROCm's driver (DKMS) has.
    KernelCalls,
    /// By dma-bufs, which a thread of the exporter hands out on the abstract socket `hsa<pid>`.
    Server,
}

impl IpcMode {
    /// Says which mode this process has.
    pub(crate) fn here(version: Version) -> IpcMode {
        IpcMode::of(version, env::var(LEGACY).ok().as_deref())
    }

    /// Says which mode a version has under a value of [`LEGACY`] (ROCr's `core/util/flag.h`: 6.2.4
    /// line 233, 6.3 line 237, 7.0 line 245, and after ROCm/rocm-systems#2676). Which one 7.1 has
    /// is not certain (#354, #1744, #1751): it counts as 7.0.
    fn of(version: Version, variable: Option<&str>) -> IpcMode {
        let server = if version.at_least(7, 2) {
            variable != Some("1")
        } else {
            version.at_least(6, 3) && variable == Some("0")
        };
        if server {
            IpcMode::Server
        } else {
            IpcMode::KernelCalls
        }
    }
}

/// Says whether the driver is the kernel's own. ROCm's (DKMS) gives its module a version.
///
/// The kernel's own has not KFD's calls for memory between processes (ROCm/ROCR-Runtime#270).
pub(crate) fn is_in_box() -> bool {
    !Path::new("/sys/module/amdgpu/version").exists()
}

/// Says whether the thread of this process' runtime that hands memory out is there; so it says where
/// the kernel does not tell.
pub(crate) fn has_server() -> bool {
    let sockets = fs::read_to_string("/proc/net/unix");
    sockets.map_or(true, |sockets| server_of(&sockets, process::id()).is_some())
}

/// Says why a handle of plain memory may be refused on this machine, and what to change.
pub(crate) fn no_handle(version: Version) -> &'static str {
    let variable = env::var(LEGACY).ok();
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let taken = server_of(&sockets, process::id()).is_some_and(|inode| !is_own_socket(&inode));
    why_no_handle(version, variable.as_deref(), is_in_box(), taken)
}

/// Says why a handle may be refused: `taken` where another process of the network namespace has the
/// name of this one's server.
fn why_no_handle(
    version: Version,
    variable: Option<&str>,
    in_box: bool,
    taken: bool,
) -> &'static str {
    match (IpcMode::of(version, variable), in_box) {
        (IpcMode::Server, _) if taken => {
            "another process of this network namespace, in another PID namespace, has this one's number, and with it \
             the name of the socket that the runtime hands memory out on (rocr, `IPCCreate`: `bind`): give the \
             containers one PID namespace (`--pid=host`)"
        }
        (IpcMode::KernelCalls, true) if version.at_least(7, 2) => {
            "the kernel's own amdgpu does not share memory by KFD's calls, which HSA_ENABLE_IPC_MODE_LEGACY=1 asks for \
             (ROCm/rocm-systems#2209): unset it in every process"
        }
        (IpcMode::KernelCalls, true) if version.at_least(6, 3) => {
            "the kernel's own amdgpu does not share memory by KFD's calls (ROCm/ROCR-Runtime#270), which runtimes from \
             6.3 to 7.1 ask for by default: set HSA_ENABLE_IPC_MODE_LEGACY=0 in every process"
        }
        (IpcMode::KernelCalls, true) => {
            "the kernel's own amdgpu does not share memory by KFD's calls (ROCm/ROCR-Runtime#270), and runtimes before \
             6.3 have no other way: install ROCm's driver (amdgpu-dkms), or ROCm 7.2 or later"
        }
        (IpcMode::Server, false) => {
            "the driver does not export it: set HSA_ENABLE_IPC_MODE_LEGACY=1 in every process, as ROCm's driver has \
             KFD's calls, or see the kernel's log for amdgpu and amdkfd"
        }
        (IpcMode::Server, true) | (IpcMode::KernelCalls, false) => {
            "the driver does not export it: see the kernel's log for amdgpu and amdkfd"
        }
    }
}

/// Finds the socket on which a process hands memory out, in the text of `/proc/net/unix`; returns
/// its inode.
fn server_of(sockets: &str, pid: u32) -> Option<String> {
    let name = format!("@hsa{pid}");
    sockets.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(6);
        let (inode, path) = (fields.next()?, fields.next()?);
        (path == name).then(|| inode.to_owned())
    })
}

/// Says whether this process has the socket.
fn is_own_socket(inode: &str) -> bool {
    let link = PathBuf::from(format!("socket:[{inode}]"));
    let open = fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .flatten();
    open.filter_map(|fd| fs::read_link(fd.path()).ok())
        .any(|file| file == link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_those_that_the_variables_leave_in_their_order() {
        let node = |number| Node { number, unique: 7 };
        let all = [2, 3, 5].map(node);
        let left = |variable| {
            let left = chosen(&all, variable)?;
            Some(left.iter().map(|node| node.number).collect::<Vec<_>>())
        };
        assert_eq!(left(None), Some(vec![2, 3, 5]));
        assert_eq!(left(Some("2, 0")), Some(vec![5, 2]));
        assert_eq!(left(Some("1,9,0")), Some(vec![3]));
        assert_eq!(left(Some("-1")), Some(vec![]));
        // By unique number, which partitions have in common.
        assert_eq!(left(Some("GPU-0000000000000007")), None);
    }

    const OF_6_2: Version = Version(60_240_000);
    const OF_6_3: Version = Version(60_342_131);
    const OF_7_0: Version = Version(70_051_831);
    const OF_7_2: Version = Version(70_253_211);

    #[test]
    fn the_mode_follows_the_version_and_the_variable() {
        use IpcMode::{KernelCalls, Server};
        for (version, unset, zero, one) in [
            (OF_6_2, KernelCalls, KernelCalls, KernelCalls),
            (OF_6_3, KernelCalls, Server, KernelCalls),
            (OF_7_0, KernelCalls, Server, KernelCalls),
            (OF_7_2, Server, Server, KernelCalls),
        ] {
            let modes = [None, Some("0"), Some("1")].map(|value| IpcMode::of(version, value));
            assert_eq!(modes, [unset, zero, one], "{version}");
        }
    }

    #[test]
    fn the_remedy_is_one_that_works_with_the_version_and_the_driver() {
        let why = |version, variable, in_box| why_no_handle(version, variable, in_box, false);
        for version in [OF_6_3, OF_7_0] {
            let text = why(version, None, true);
            assert!(text.contains("set HSA_ENABLE_IPC_MODE_LEGACY=0"), "{text}");
        }
        assert!(why(OF_6_2, None, true).contains("amdgpu-dkms"));
        assert!(why(OF_7_2, Some("1"), true).contains("unset it"));
        assert!(why(OF_7_2, None, false).contains("set HSA_ENABLE_IPC_MODE_LEGACY=1"));
        // Where the mode is that of KFD's calls already, asking for it changes nothing.
        assert!(!why(OF_7_0, None, false).contains("HSA_ENABLE"));
    }

    #[test]
    fn another_process_with_this_ones_number_is_named() {
        let sockets = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                       0000000000000000: 00000002 00000000 00010000 0001 01 36128 @hsa71\n\
                       0000000000000000: 00000002 00000000 00010000 0001 01 36129 @hsa7\n\
                       0000000000000000: 00000003 00000000 00000000 0001 03 36130\n";
        assert_eq!(server_of(sockets, 7).as_deref(), Some("36129"));
        assert_eq!(server_of(sockets, 8), None);
        assert!(!is_own_socket("36129"));
        assert!(why_no_handle(OF_7_2, None, true, true).contains("--pid=host"));
        // By KFD's calls no socket has a part in it.
        assert!(!why_no_handle(OF_7_0, None, false, true).contains("--pid=host"));
    }
}
