//! What a runtime's pools may do wrong, as AMD's reports and the rules of
//! [`GpuPools`](gpu_api::GpuPools) have it.

use std::fmt;

use crate::named::named;

named! {
    /// What the probe saw a runtime's pools do wrong ([`Step::Pools`](crate::Step::Pools)).
    PoolDefect[8];

    /// What was written to memory of a pool is not there any more.
    LosesBytes = "loses-bytes",
    /// Memory is handed to another stream while the first still works on it.
    TooEarly = "too-early",
    /// An allocation waits for another stream's work, or is given memory that must wait for it.
    Waits = "waits-for-others",
    /// There is no memory in a pool where `hipMalloc` has some.
    RunsOut = "runs-out",
    /// Memory goes back to the device although the pool was told to keep it.
    IgnoresThreshold = "ignores-threshold",
    /// Memory that nobody uses stays in the pool.
    GivesNothingBack = "gives-nothing-back",
    /// An allocation that failed keeps the rest of the device's memory.
    KeepsTheRest = "keeps-the-rest",
    /// The process does not survive its own end.
    CrashesAtTheEnd = "crashes-at-the-end",
}

impl PoolDefect {
    /// Returns the report of AMD's that describes it, where there is one.
    pub const fn report(self) -> Option<&'static str> {
        match self {
            PoolDefect::LosesBytes => Some("ROCm/rocm-systems#10943"),
            PoolDefect::TooEarly | PoolDefect::Waits | PoolDefect::GivesNothingBack => None,
            PoolDefect::RunsOut => Some("ROCm/hip#3775, ROCm/legacy-rocm-build#6178"),
            PoolDefect::IgnoresThreshold => Some("ROCm/rocm-systems#11690"),
            PoolDefect::KeepsTheRest | PoolDefect::CrashesAtTheEnd => {
                Some("ROCm/rocm-systems#11642")
            }
        }
    }

    const fn what(self) -> &'static str {
        match self {
            PoolDefect::LosesBytes => "what is written to memory of a pool does not stay there",
            PoolDefect::TooEarly => {
                "a pool gives memory to a stream while another one still works on it"
            }
            PoolDefect::Waits => "an allocation of a pool waits for another stream's work",
            PoolDefect::RunsOut => "a pool has no memory where hipMalloc has some",
            PoolDefect::IgnoresThreshold => "a pool gives memory back that it was told to keep",
            PoolDefect::GivesNothingBack => "a pool keeps memory that nobody uses",
            PoolDefect::KeepsTheRest => {
                "an allocation of a pool that fails keeps the rest of the device's memory"
            }
            PoolDefect::CrashesAtTheEnd => "a process that used a pool crashes at its end",
        }
    }

    /// Finds the defect that a finding tells of.
    pub fn told_in(text: &str) -> Option<PoolDefect> {
        text.split([' ', ':']).find_map(PoolDefect::from_name)
    }
}

/// Shows the name, and what happens, with the report.
impl fmt::Display for PoolDefect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name(), self.what())?;
        match self.report() {
            Some(report) => write!(f, " ({report})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_names_its_defect() {
        for defect in PoolDefect::ALL {
            assert_eq!(PoolDefect::from_name(defect.name()), Some(defect));
            let finding = format!("the exporter ended with exit status: 1: {defect}; round 7");
            assert_eq!(PoolDefect::told_in(&finding), Some(defect), "{finding}");
        }
        assert_eq!(
            PoolDefect::told_in("the importer did not come back within 25 s"),
            None
        );
    }
}
