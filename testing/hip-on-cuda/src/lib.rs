//! For tests: a library with the functions of AMD's HIP runtime that the HIP backend calls, without
//! AMD's GPU.
//!
//! It does its work on NVIDIA's driver, loaded at run time, or with `GPU_IPC_SHIM=host` on shared
//! memory, and keeps AMD's rules where they differ from CUDA's: numbers, layouts, what is refused
//! and what blocks. What it shows is that the backend's calls are right by those rules on real
//! memory between real processes. It shows nothing of AMD's driver.
//!
//! A program takes it in place of the runtime where `GPU_IPC_HIP_LIBRARY` names it. Set before the
//! program starts:
//!
//! | variable | meaning |
//! |---|---|
//! | `GPU_IPC_SHIM` | `cuda` (as without it), `host` |
//! | `GPU_IPC_SHIM_VERSION` | the runtime's version and so its rules, `70253211` without it |
//! | `GPU_IPC_SHIM_INJECT` | names of [`Fault`]s, separated by commas |
//! | `GPU_IPC_SHIM_KFD` | a folder in place of `/sys/class/kfd/kfd/proc`; one of its own without it, none if it is empty |
//! | `GPU_IPC_SHIM_NUMA_NODE` | the host's NUMA node that the devices are closest to; none without it |
//! | `GPU_IPC_SHIM_TOPOLOGY` | a folder in place of `/sys/class/kfd/kfd/topology/nodes` |
//! | `GPU_IPC_SHIM_PATIENCE_MS` | for how long an open and an export wait for a server, AMD's 10 s without it |
//! | `HSA_ENABLE_IPC_MODE_LEGACY` | as of AMD's: whether KFD's calls hand memory out, or a thread of the exporter |
//! | `GPU_MAX_HW_QUEUES` | as of AMD's: over how many hardware queues the streams of a device are spread, 4 |
//!
//! Which rules begin or end with which version stands where they are kept. Over CUDA streams have
//! queues of their own: that a stream's wait occupies one of a few is a rule of `host` alone.
//!
//! Read in this order: `settings`; `machine` (what is needed of the device below); `cuda` over
//! `cuda_functions`, and `host` over `memory_files` and `turns` (two of those); `below` (which of
//! them it is); `export` (how a function comes to be one of C's); `device`, `memory`, `pool`,
//! `physical`, `server`, `sharing`, `queue` (HIP's functions, by subject).

mod below;
mod cuda;
mod cuda_functions;
mod device;
mod export;
mod host;
mod machine;
mod memory;
mod memory_files;
mod physical;
mod pool;
mod queue;
mod server;
mod settings;
mod sharing;
mod turns;

pub use settings::Fault;
