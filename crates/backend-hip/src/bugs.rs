//! Bugs of the runtime that others reported, by version: what a refusal or a leak may come from,
//! and what helps.
//!
//! None of them was seen by this project: each is what its report says.

use crate::kernel;
use crate::version::Version;

/// A bug that was reported to AMD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct KnownBug {
    /// The report: repository and number on GitHub.
    pub report: &'static str,
    /// What happens.
    pub what: &'static str,
    /// What this backend does about it, or what its user can do.
    pub remedy: &'static str,
    /// The first version that has it; `None`: the oldest there is.
    since: Option<(u32, u32)>,
    /// The first version that no longer has it, where one is known.
    until: Option<(u32, u32)>,
}

/// Lists bugs: the report, since and until which version, what happens; what helps.
macro_rules! bugs {
    ($($report:literal, $since:tt..$until:tt: $what:literal, $remedy:expr;)*) => {
        &[$(KnownBug {
            report: $report,
            what: $what,
            remedy: $remedy,
            since: bugs!(@ $since),
            until: bugs!(@ $until),
        }),*]
    };
    (@ _) => { None };
    (@ $version:tt) => { Some($version) };
}

const ALL: &[KnownBug] = bugs! {
    "ROCm/hip#3886", (7, 0)..(7, 14):
        "memory whose handle was exported stays allocated after it is freed, although nobody opened it",
        "keep regions for reuse instead of freeing them, or, with ROCm's own driver (amdgpu-dkms) only, set \
         HSA_ENABLE_IPC_MODE_LEGACY=1 in every process (it leaks pieces below 2 MiB: this backend allocates \
         none)";
    "ROCm/rocm-systems#9827", _.._:
        "opening the handle of memory that was freed, or whose process died or failed to export it meanwhile, does \
         not return",
        "open handles under a lease only, as this library's consumers do, or share by descriptor, which asks no \
         thread of the producer's runtime";
    "ROCm/rocm-systems#8517", (7, 2)..(7, 14):
        "the allocation after an export as a dma-buf crashes in libhsa-runtime64",
        "update to 7.14 or later; this backend exports so only where a probe proved it";
    "ROCm/rocm-systems#11892, #11462", (7, 2).._:
        "an export of memory that another process opens at that moment may map other memory there, with success",
        "export an allocation once, before anything opens it, as this backend does: let no other code of the \
         process export memory that was adopted; or, with ROCm's own driver only, set \
         HSA_ENABLE_IPC_MODE_LEGACY=1 in every process";
    "ROCm/hip#2880", _.._:
        "a handle is refused with 201 where the opening process has the process number of the exporting one, \
         also in another PID namespace",
        "give the containers one PID namespace, or start one process with another number";
    "ROCm/rocm-aic#88", _.._:
        "handles do not open between containers that have not the ipc, pid and net namespaces of one host",
        "run the containers with the host's (`--ipc=host --pid=host --network=host`)";
    // There was no 7.3; the runtime left its 32 shared signals with ROCm/rocm-systems#5575, opened in
    // April 2026, which 7.12 does not have.
    "ROCm/rocm-systems#1949, #11511, #11529", _..(7, 14):
        "a stream's wait for an interprocess event may end before the event, or block the calling thread",
        "this backend orders by words in shared memory; events are used only where a probe proved them";
    "ROCm/rocm-systems#7520", (7, 2)..(7, 14):
        "destroying a recorded interprocess event waits for all work of the device",
        "update to 7.14 or later; local events are not touched, and this library keeps them for reuse";
    "ROCm/clr#265", (7, 0).._:
        "exporting virtual memory by a 64-byte handle brings the kernel down and loses the memory",
        "this backend exports by handle only what came from hipMalloc, by itself or by the caller's word";
    "ROCm/rocm-systems#11185", (7, 15).._:
        "the host cannot reach imported virtual memory",
        "copy through a stream, as this library does";
    "ROCm/hip#1945", _..(6, 0):
        "opening a handle of more than 2 GiB may hang",
        "allocate regions of at most 2 GiB";
};

/// How pools come to be used, or what does instead.
pub(crate) const PROVE_POOLS: &str = "run the probe on an idle machine (`GPU_IPC_HIP_TRY=pools gpu-ipc doctor`, `prove \
                                      --pools` in the bundle) and pass its result on in GPU_IPC_HIP_PROOF, or choose \
                                      best fit (`Bfc`)";

/// Bugs of the runtime's stream-ordered pools (`hipMallocAsync`).
const OF_POOLS: &[KnownBug] = bugs! {
    "ROCm/rocm-systems#10943", (7, 2).._:
        "memory of a pool reads zero after what was written to it, where some was freed on another stream",
        PROVE_POOLS;
    "ROCm/rocm-systems#11642", (7, 2).._:
        "an allocation of a pool that fails keeps the rest of the device's memory, and the process crashes at \
         its end",
        PROVE_POOLS;
    "ROCm/rocm-systems#11690", (7, 2).._:
        "a pool's release threshold is ignored",
        PROVE_POOLS;
    "ROCm/legacy-rocm-build#6178", (7, 0).._:
        "a pool has no memory, or crashes, where hipMalloc has some",
        PROVE_POOLS;
    "ROCm/hip#3775", (6, 3)..(7, 0):
        "a pool runs out where hipMalloc does not",
        PROVE_POOLS;
};

/// Says what was reported of a version's pools.
pub(crate) fn of_pools(version: Version) -> String {
    let reported: Vec<String> = version
        .filter(OF_POOLS)
        .map(|bug| format!("{} ({})", bug.what, bug.report))
        .collect();
    if reported.is_empty() {
        return format!("nothing was reported of the pools of HIP {version}");
    }
    format!("reported of HIP {version}: {}", reported.join("; "))
}

impl Version {
    /// Lists the reported bugs that this version may have.
    ///
    /// # Examples
    ///
    /// ```
    /// use backend_hip::Version;
    ///
    /// let of_seven = Version(70_253_211).known_bugs();
    /// assert!(of_seven.iter().any(|bug| bug.report == "ROCm/hip#3886"));
    /// ```
    pub fn known_bugs(self) -> Vec<KnownBug> {
        self.filter(ALL)
            .chain(self.filter(OF_POOLS))
            .copied()
            .collect()
    }

    fn filter(self, bugs: &[KnownBug]) -> impl Iterator<Item = &KnownBug> {
        let since = move |bug: &KnownBug| {
            bug.since
                .is_none_or(|(major, minor)| self.at_least(major, minor))
        };
        let fixed = move |bug: &KnownBug| {
            bug.until
                .is_some_and(|(major, minor)| self.at_least(major, minor))
        };
        bugs.iter().filter(move |bug| since(bug) && !fixed(bug))
    }

    /// Says what may hold memory that nobody uses.
    pub(crate) fn out_of_memory_hint(self) -> &'static str {
        let leaks = self.at_least(7, 0) && !self.at_least(7, 14);
        if leaks && kernel::is_in_box() {
            "collect or drop blocks, trim, or see `rocm-smi --showpids`; this runtime may keep exported memory after \
             it was freed (ROCm/hip#3886): keep regions for reuse, or update it to 7.14"
        } else if leaks {
            "collect or drop blocks, trim, or see `rocm-smi --showpids`; this runtime may keep exported memory after \
             it was freed (ROCm/hip#3886): HSA_ENABLE_IPC_MODE_LEGACY=1 avoids that"
        } else {
            "collect or drop blocks, trim, or see `rocm-smi --showpids` for other processes on the device"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bug_is_told_of_the_versions_that_have_it_only() {
        let has = |version: u32, report: &str| {
            Version(version)
                .known_bugs()
                .iter()
                .any(|bug| bug.report == report)
        };
        assert!(
            !has(60_443_484, "ROCm/hip#3886")
                && has(70_000_000, "ROCm/hip#3886")
                && !has(71_400_000, "ROCm/hip#3886")
        );
        assert!(has(50_221_153, "ROCm/hip#1945") && !has(60_443_484, "ROCm/hip#1945"));
        assert!(
            has(71_200_000, "ROCm/rocm-systems#7520") && !has(71_400_000, "ROCm/rocm-systems#7520")
        );
        let events = "ROCm/rocm-systems#1949, #11511, #11529";
        assert!(has(71_300_000, events) && !has(71_400_000, events));
        // Open in ROCm 10, whatever number its runtime has.
        let mapped = "ROCm/rocm-systems#11892, #11462";
        assert!(has(71_500_000, mapped) && has(100_000_000, mapped) && !has(60_443_484, mapped));
        assert!(has(50_221_153, "ROCm/rocm-systems#9827"));
        assert!(has(60_343_482, "ROCm/hip#3775") && !has(70_000_000, "ROCm/hip#3775"));
    }

    #[test]
    fn what_was_reported_of_pools_is_told_of_the_versions_that_have_it_only() {
        let told = of_pools(Version(70_253_211));
        assert!(
            ["#10943", "#11642", "#11690", "#6178"]
                .iter()
                .all(|report| told.contains(report)),
            "{told}"
        );
        assert!(!told.contains("#3775") && of_pools(Version(60_443_484)).contains("#3775"));
        assert!(of_pools(Version(50_731_921)).contains("nothing was reported"));
    }
}
