//! What the environment asks for.

use std::env;
use std::num::NonZero;
use std::sync::OnceLock;
use std::time::Duration;

/// Declares the faults, each with the name that the environment has for it.
macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident = $name:literal,)*) => {
        /// A behaviour of some runtime of AMD's, or of every one, that is made to happen.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Fault {
            $($(#[$doc])* $fault,)*
        }

        const NAMES: &[(&str, Fault)] = &[$(($name, Fault::$fault)),*];
    };
}

faults! {
    /// Every process has one process number, as in containers of their own: handles are refused
    /// with 201.
    EqualPid = "equal-pid",
    /// No handle can be attached: 17.
    AttachFails = "attach-fails",
    /// A wait for an event of another process blocks the caller until the event is complete.
    EventBlocks = "event-blocks",
    /// A wait for an event of another process does not wait.
    EventLies = "event-lies",
    /// After 32 waits for events of other processes the next do not wait.
    EventLapses = "event-lapses",
    /// Once an event of another process was destroyed here, no wait for one waits any more.
    EventForgets = "event-forgets",
    /// Streams write and wait for no words.
    NoWords = "no-words",
    /// A stream's write of a word does not wait for the work before it.
    EarlyWords = "early-words",
    /// Virtual memory cannot be exported.
    NoExport = "no-export",
    /// Imported virtual memory is gone when its exporter frees it.
    ExportDies = "export-dies",
    /// A read-only mapping can be written.
    WritableReads = "writable-reads",
    /// Importing a descriptor brings the process down.
    ImportAborts = "import-aborts",
    /// Importing a descriptor does not return.
    ImportHangs = "import-hangs",
    /// Devices have no identity.
    NoUuid = "no-uuid",
    /// Every device says that it is "XX", as GPUs without a number of their own do.
    SameUuid = "same-uuid",
    /// Every stream has a hardware queue of its own, as with no runtime of AMD's: for what is to be
    /// tested with waits.
    FreeQueues = "free-queues",
    /// Memory that was exported stays allocated when it is freed (ROCm/hip#3886 and #3781).
    ExportLeaks = "export-leaks",
    /// The last device answers nothing about itself.
    SickDevice = "sick-device",
    /// The kernel exports no memory by handle: the call says so with 1, or by a handle that nobody
    /// can attach (5.7 to 6.1).
    NoKernelIpc = "no-kernel-ipc",
    /// The runtime closes the descriptor of external memory when that goes; those that were read
    /// leave it to the caller.
    ImportTakes = "import-takes",
    /// Some memory of a pool reads zero after what was written to it, once other memory went back
    /// on another stream than it came from (ROCm/rocm-systems#10943).
    PoolLoses = "pool-loses",
    /// A pool gives memory to a stream while another one still works on it.
    PoolEarly = "pool-early",
    /// An allocation of a pool waits for the stream on which memory went back last.
    PoolWaits = "pool-waits",
    /// A pool has given all that it ever will once it gave as much as the device has
    /// (ROCm/hip#3775).
    PoolRunsOut = "pool-runs-out",
    /// A pool has no memory at all (ROCm/legacy-rocm-build#6178).
    PoolFails = "pool-fails",
    /// A pool that has no room calls it a success and gives null (ROCm/hip#3223).
    PoolGivesNull = "pool-gives-null",
    /// A pool ignores what it is told to keep, and keeps nothing (ROCm/rocm-systems#11690).
    PoolDrops = "pool-drops",
    /// A pool gives nothing back to the device.
    PoolKeeps = "pool-keeps",
    /// An allocation of a pool that fails keeps the rest of the device's memory
    /// (ROCm/rocm-systems#11642).
    PoolHoards = "pool-hoards",
    /// A process one of whose allocations of a pool failed crashes at its end
    /// (ROCm/rocm-systems#11642).
    PoolCrashes = "pool-crashes",
    /// Memory does not go back to a pool: 719.
    PoolFreeFails = "pool-free-fails",
    /// Every stream is being captured.
    Captures = "captures",
    /// The thread that hands memory out ends with its first client, as when that one is killed.
    ServerDies = "server-dies",
    /// The thread that hands memory out answers nothing, as when a client is stopped before it
    /// confirms.
    ServerStalls = "server-stalls",
    /// An open that gets no answer never returns (ROCm/rocm-systems#9827); else it fails with 17.
    OpenSpins = "open-spins",
    /// The name of the socket is taken by a process of another PID namespace: an export fails with 1.
    ExportCollides = "export-collides",
    /// The allocation after an export as a dma-buf crashes (ROCm/rocm-systems#8517).
    AllocAfterExportCrashes = "alloc-after-export-crashes",
    /// All devices have one identity and one place, as the partitions of a GPU had before ROCm
    /// 7.0.1.
    SamePartitionUuid = "same-partition-uuid",
    /// The last device's streams write and wait for no words, as a processor's own GPU beside a card.
    PoorDevice = "poor-device",
    /// Destroying an event waits for all work of the device (ROCm/rocm-systems#7520).
    DestroyEventWaits = "destroy-event-waits",
    /// An export hands out other memory, with success (ROCm/rocm-systems#11892).
    OpensOthers = "opens-others",
}

/// Finds a fault. A test that asks for one that is not there must not pass.
fn named(name: &str) -> Fault {
    let found = NAMES.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no such fault: {name}")).1
}

/// What the environment asked for when it was first looked at.
pub(crate) struct Settings {
    pub(crate) host: bool,
    pub(crate) version: u32,
    /// The hardware queues of a device.
    pub(crate) queues: usize,
    /// The host's NUMA node that every device is closest to; -1 for none.
    pub(crate) numa_node: i32,
    /// How long an open and an export wait for a server.
    pub(crate) patience: Duration,
    /// The value of AMD's variable that chooses how memory is handed out.
    legacy: String,
    faults: Vec<Fault>,
}

impl Settings {
    /// Reads the environment, once.
    pub(crate) fn get() -> &'static Settings {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(|| {
            let text = |name| env::var(name).unwrap_or_default();
            let faults = text("GPU_IPC_SHIM_INJECT");
            let faults = faults.split(',').map(str::trim);
            Settings {
                host: text("GPU_IPC_SHIM") == "host",
                version: text("GPU_IPC_SHIM_VERSION").parse().unwrap_or(70_253_211),
                queues: text("GPU_MAX_HW_QUEUES").parse().map_or(4, NonZero::get),
                numa_node: text("GPU_IPC_SHIM_NUMA_NODE").parse().unwrap_or(-1),
                patience: Duration::from_millis(
                    text("GPU_IPC_SHIM_PATIENCE_MS").parse().unwrap_or(10_000),
                ),
                legacy: text("HSA_ENABLE_IPC_MODE_LEGACY"),
                faults: faults.filter(|name| !name.is_empty()).map(named).collect(),
            }
        })
    }

    /// Says whether a thread of the exporter hands memory out; else KFD's calls do (ROCr,
    /// `core/util/flag.h`; which of them 7.1 has is not certain).
    pub(crate) fn has_server(&self) -> bool {
        if self.at_least(7, 2) {
            self.legacy != "1"
        } else {
            self.at_least(6, 3) && self.legacy == "0"
        }
    }

    pub(crate) fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }

    /// Says whether the rules are those of this version or a later one.
    pub(crate) fn at_least(&self, major: u32, minor: u32) -> bool {
        self.version >= major * 10_000_000 + minor * 100_000
    }

    /// Says whether the rules are those of the first version, or of a later one before the second.
    pub(crate) fn within(&self, from: (u32, u32), to: (u32, u32)) -> bool {
        self.at_least(from.0, from.1) && !self.at_least(to.0, to.1)
    }
}
