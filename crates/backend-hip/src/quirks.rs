//! What AMD's runtime does otherwise than CUDA's driver, by version.

use driver::Quirks;

use crate::kernel::IpcMode;
use crate::seal;
use crate::version::Version;

/// One thing that a version began or ceased to do.
struct Row {
    /// The first version that does it so.
    since: (u32, u32),
    /// Where that stands.
    #[allow(dead_code, reason = "the table's reader wants it")]
    source: &'static str,
    /// What is so from that version on.
    set: fn(&mut Quirks),
}

/// The oldest runtime's.
const OLDEST: Quirks = Quirks {
    open_flags: 0,
    // `hipMemAllocationGranularityRecommended`.
    granularity_flag: 1,
    // Handles of some other sizes were refused (ROCm/hip#2257), and pieces below are leaked by the
    // runtime's older way of sharing (ROCm/rocm-systems#6407).
    least_granularity: driver::device::LARGE_PAGE,
    // Not every runtime keeps the memory for the mapping's sake alone.
    keeps_handles: true,
    imports_by_value: false,
    keeps_descriptors: false,
    tells_failed_mappings: false,
    maps_unchecked: true,
    // The header of `hipStreamDestroy`; `HostQueue::terminate`; ROCm/hip#3367.
    destroy_waits: true,
    tail: 0,
};

const TABLE: &[Row] = &[
    Row {
        since: (6, 0),
        source: "hip_runtime_api.h: `hipIpcMemLazyEnablePeerAccess` became 1",
        set: |quirks| quirks.open_flags = 1,
    },
    Row {
        since: (7, 0),
        source: "clr 6.2.2 `hip_vm.cpp`: `hipMemMap` succeeds where the mapping failed, and `hipMemUnmap` of it \
                 follows a null pointer",
        set: |quirks| quirks.tells_failed_mappings = true,
    },
    Row {
        since: (7, 1),
        source: "change log of 7.1: `hipMemImportFromShareableHandle` takes a descriptor's number as such",
        set: |quirks| quirks.imports_by_value = true,
    },
    Row {
        since: (7, 12),
        source: "ROCm/rocm-systems#8304, #8436 (around 7.14): the number of an imported descriptor is read at each \
                 `hipMemSetAccess`",
        set: |quirks| quirks.keeps_descriptors = true,
    },
];

impl Version {
    /// Returns what this version does otherwise.
    pub(crate) fn quirks(self, mode: IpcMode) -> Quirks {
        let mut quirks = OLDEST;
        // Before 7.2 it is not reported (ROCm/rocm-systems#11892, #11462), nor of KFD's calls.
        if mode == IpcMode::Server && self.at_least(7, 2) {
            quirks.tail = seal::TAIL;
        }
        for row in TABLE {
            if self.at_least(row.since.0, row.since.1) {
                (row.set)(&mut quirks);
            }
        }
        quirks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_the_quirks_that_began_before_it() {
        let of = |version: u32| Version(version).quirks(IpcMode::Server);
        assert_eq!([50_731_921, 60_000_000].map(|v| of(v).open_flags), [0, 1]);
        assert_eq!(
            [70_051_831, 70_100_000].map(|v| of(v).imports_by_value),
            [false, true]
        );
        assert_eq!(
            [60_443_484, 70_000_000].map(|v| of(v).tells_failed_mappings),
            [false, true]
        );
        assert_eq!(
            [71_100_000, 71_200_000].map(|v| of(v).keeps_descriptors),
            [false, true]
        );
        let tail = |version, mode| Version(version).quirks(mode).tail;
        assert!(tail(70_253_211, IpcMode::Server) > 0);
        assert_eq!(tail(70_253_211, IpcMode::KernelCalls), 0);
        assert_eq!(tail(60_443_484, IpcMode::Server), 0);
    }
}
