//! What was seen to work on this machine, and so may be used.
//!
//! A HIP runtime says of several things that it can do them and then cannot, or brings the process
//! down, by version and by driver. So nothing beyond plain memory with 64-byte handles is used on
//! its word: a probe (the crate `gpu-ipc-hip-probe`) tries each [`Step`] in child processes, and what
//! it saw is a [`Proof`] that later processes take in.

use std::env;
use std::fmt;
use std::str::FromStr;

use gpu_api::{Error, Result};

use crate::kernel;
use crate::named::named;
use crate::pool_defect::PoolDefect;
use crate::version::Version;

/// Holds the proof that [`HipBackend::load`](crate::HipBackend::load) takes in, as [`Proof`] is
/// displayed.
pub const PROOF: &str = "GPU_IPC_HIP_PROOF";

named! {
    /// One thing that a runtime may or may not be able to do.
    Step[8];

    /// The 64-byte handle of plain memory (`hipMalloc`) opens in another process. Used without a
    /// proof too: what is found is told, for some runtimes give handles that nobody can open.
    Handles = "handles",
    /// Virtual memory (`hipMemCreate`) is exported as a file descriptor, imported, and outlives its
    /// exporter; mapping it waits for no stream.
    Vmm = "vmm",
    /// An imported mapping can be read and not written. Trying it makes the GPU fault on purpose.
    ReadOnly = "read-only",
    /// Plain memory (`hipMalloc`) is exported as a dma-buf, imported, and outlives its exporter.
    DmaBuf = "dma-buf",
    /// Streams write words in registered shared memory, after the work before the write.
    Words = "words",
    /// Streams wait for such words: one more than the device has hardware queues, while others
    /// work. A process that is killed at it leaves a wave that spins, and removing its queue may
    /// reset the GPU.
    Waits = "waits",
    /// Streams wait for interprocess events, and not for nothing. Such a wait spins as
    /// [`Step::Waits`] does.
    Events = "events",
    /// The runtime's stream-ordered pools keep what is written to them, wait for nobody, run out
    /// where the device does, and give back or keep what they were told. Trying it takes most of a
    /// device's memory for a moment.
    Pools = "pools",
}

impl Step {
    /// The steps that harm nobody: all but those that make a GPU fault ([`Step::ReadOnly`]) or spin
    /// ([`Step::Waits`], [`Step::Events`]), which may reset it, and the one that leaves others no
    /// memory ([`Step::Pools`]).
    pub const HARMLESS: [Step; 4] = [Step::Handles, Step::Vmm, Step::DmaBuf, Step::Words];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which steps were seen to work, and with which runtime and kernel.
///
/// As text: the runtime's version, the kernel's release, a key of what else changes the answer, the
/// steps, those that failed on a device with a `-` before and its place behind them
/// (`-words@0000:03:00.0`), and with a `!` before them the names of what pools were seen to do wrong. The key is left
/// out on a machine that has none of that: variables of AMD's (`GPU_MAX_HW_QUEUES`,
/// `GPU_STREAMOPS_CP_WAIT`, `HSA_ENABLE_IPC_MODE_LEGACY`), a version of the amdgpu module, ROCm's
/// own version file, GPUs that KFD lists. A proof of another machine is no proof: the backend then
/// does what it does without one.
///
/// # Examples
///
/// ```
/// use backend_hip::{Proof, Step};
///
/// let proof: Proof = "60443484 6.8.0-45-generic vmm words".parse()?;
/// assert!(proof.has(Step::Vmm) && !proof.has(Step::Events));
/// assert_eq!(proof.to_string(), "60443484 6.8.0-45-generic vmm words");
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proof {
    version: Version,
    kernel: String,
    /// Empty, or `k=` and a number.
    key: String,
    steps: Vec<Step>,
    /// Steps that worked on other devices than the one at this place of the PCI bus.
    failed: Vec<(Step, String)>,
    pool_defects: Vec<PoolDefect>,
}

impl Proof {
    /// Notes what was seen with a runtime, on the kernel that runs.
    pub fn new(version: Version, steps: impl IntoIterator<Item = Step>) -> Proof {
        let mut steps: Vec<Step> = steps.into_iter().collect();
        steps.sort_unstable();
        steps.dedup();
        Proof {
            version,
            kernel: kernel(),
            key: key(),
            steps,
            failed: Vec::new(),
            pool_defects: Vec::new(),
        }
    }

    /// Notes beside it where steps failed that worked elsewhere: the places of devices on the PCI
    /// bus, which are the same in every process, whatever devices that sees.
    #[must_use]
    pub fn with_failures(mut self, failed: impl IntoIterator<Item = (Step, String)>) -> Proof {
        self.failed.extend(failed);
        self.failed.sort_unstable();
        self.failed.dedup();
        self
    }

    /// Notes beside it what pools were seen to do wrong. They are not used then.
    #[must_use]
    pub fn with_pool_defects(mut self, defects: impl IntoIterator<Item = PoolDefect>) -> Proof {
        self.pool_defects.extend(defects);
        self.pool_defects.sort_unstable();
        self.pool_defects.dedup();
        if !self.pool_defects.is_empty() {
            self.steps.retain(|step| *step != Step::Pools);
        }
        self
    }

    /// Reads the proof in [`PROOF`].
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a text that is no proof.
    pub fn from_env() -> Result<Option<Proof>> {
        match env::var(PROOF) {
            Ok(text) if !text.trim().is_empty() => text.parse().map(Some),
            _ => Ok(None),
        }
    }

    /// Says whether a step was seen to work, on some device at least.
    pub fn has(&self, step: Step) -> bool {
        self.steps.contains(&step)
    }

    /// Says whether a step was seen to work on the device at this place of the PCI bus. One whose
    /// place is not known has what all have.
    pub fn holds(&self, step: Step, place: Option<&str>) -> bool {
        let fails = |of: &str| place.is_none_or(|place| place == of);
        let failed = self
            .failed
            .iter()
            .any(|(failed, of)| *failed == step && fails(of));
        self.has(step) && !failed
    }

    /// Lists the steps that failed on a device and worked on others, with its place.
    pub fn failures(&self) -> &[(Step, String)] {
        &self.failed
    }

    /// Lists what pools were seen to do wrong.
    pub fn pool_defects(&self) -> &[PoolDefect] {
        &self.pool_defects
    }

    /// Lists what was seen to work.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Says whether it is of this runtime, on the kernel that runs.
    pub fn is_of(&self, version: Version) -> bool {
        self.version == version && self.kernel == kernel() && self.key == key()
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.version.0, self.kernel)?;
        if !self.key.is_empty() {
            write!(f, " {}", self.key)?;
        }
        self.steps
            .iter()
            .try_for_each(|step| write!(f, " {step}"))?;
        self.failed
            .iter()
            .try_for_each(|(step, place)| write!(f, " -{step}@{place}"))?;
        self.pool_defects
            .iter()
            .try_for_each(|defect| write!(f, " !{}", defect.name()))
    }
}

impl FromStr for Proof {
    type Err = Error;

    fn from_str(text: &str) -> Result<Proof> {
        let invalid = || {
            Error::invalid(
                "the proof of what HIP can do",
                format!("{text:?}"),
                "what `gpu-ipc doctor` printed: the runtime's version, the kernel's release, a key, names of steps",
            )
        };
        let mut words = text.split_whitespace();
        let version = words
            .next()
            .and_then(|word| word.parse().ok())
            .map(Version)
            .ok_or_else(invalid)?;
        let kernel = words.next().ok_or_else(invalid)?.to_owned();
        let mut words = words.peekable();
        let key = words
            .next_if(|word| word.starts_with(KEY))
            .unwrap_or_default()
            .to_owned();
        let (mut steps, mut failed, mut defects) = (Vec::new(), Vec::new(), Vec::new());
        let step = |name| Step::from_name(name).ok_or_else(invalid);
        for word in words {
            if let Some(name) = word.strip_prefix('!') {
                defects.push(PoolDefect::from_name(name).ok_or_else(invalid)?);
            } else if let Some(failure) = word.strip_prefix('-') {
                let (name, place) = failure.split_once('@').ok_or_else(invalid)?;
                failed.push((step(name)?, place.to_owned()));
            } else {
                steps.push(step(word)?);
            }
        }
        Ok(Proof {
            version,
            kernel,
            key,
            steps,
            failed: Vec::new(),
            pool_defects: Vec::new(),
        }
        .with_failures(failed)
        .with_pool_defects(defects))
    }
}

/// Variables of AMD's that change what is seen to work.
const VARIABLES: [&str; 3] = [
    "GPU_MAX_HW_QUEUES",
    "GPU_STREAMOPS_CP_WAIT",
    "HSA_ENABLE_IPC_MODE_LEGACY",
];

/// What a key begins with.
const KEY: &str = "k=";

/// Makes the key of what changes the answer, beside runtime and kernel.
fn key() -> String {
    let variables = VARIABLES
        .iter()
        .filter_map(|name| Some(format!("{name}={}", env::var(name).ok()?)));
    let told: Vec<String> = variables.chain(kernel::circumstances()).collect();
    if told.is_empty() {
        String::new()
    } else {
        key_of(&told)
    }
}

/// Names texts by a number that every build gives them: FNV-1a.
fn key_of(told: &[String]) -> String {
    let bytes = told.iter().flat_map(|text| text.bytes().chain([b'\n']));
    let number = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{KEY}{number:016x}")
}

fn kernel() -> String {
    rustix::system::uname()
        .release()
        .to_string_lossy()
        .replace(char::is_whitespace, "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_survives_its_text() {
        let proof = Proof::new(Version(70_253_211), [Step::Words, Step::Vmm, Step::Words]);
        assert_eq!(proof.steps(), [Step::Vmm, Step::Words]);
        assert_eq!(proof.to_string().parse::<Proof>().ok(), Some(proof));
    }

    #[test]
    fn what_pools_do_wrong_survives_in_a_proof_and_denies_them() {
        let version = Version(70_253_211);
        let proof = Proof::new(version, [Step::Words, Step::Pools])
            .with_pool_defects([PoolDefect::LosesBytes]);
        assert_eq!(
            (proof.steps(), proof.pool_defects()),
            (&[Step::Words][..], &[PoolDefect::LosesBytes][..])
        );
        assert!(
            proof.to_string().ends_with(" words !loses-bytes"),
            "{proof}"
        );
        assert_eq!(proof.to_string().parse::<Proof>().ok(), Some(proof));
        let both: Proof = "7 6.8 pools !runs-out".parse().expect("it is one");
        assert!(!both.has(Step::Pools), "a finding outweighs a step");
    }

    #[test]
    fn what_one_device_fails_is_not_taken_from_the_others() {
        let (here, there) = (Some("0000:03:00.0"), Some("0000:83:00.0"));
        let proof = Proof::new(Version(70_253_211), [Step::Handles, Step::Words])
            .with_failures([(Step::Words, "0000:83:00.0".to_owned())]);
        assert!(proof.holds(Step::Words, here) && !proof.holds(Step::Words, there));
        assert!(proof.holds(Step::Handles, there));
        // It might be the one that failed.
        assert!(!proof.holds(Step::Words, None) && proof.holds(Step::Handles, None));
        assert!(
            proof.to_string().ends_with(" words -words@0000:83:00.0"),
            "{proof}"
        );
        assert_eq!(proof.to_string().parse::<Proof>().ok(), Some(proof));
    }

    #[test]
    fn a_proof_of_another_runtime_or_kernel_is_none() {
        let version = Version(70_253_211);
        assert!(Proof::new(version, Step::ALL).is_of(version));
        assert!(!Proof::new(version, Step::ALL).is_of(Version(60_443_484)));
        let elsewhere: Proof = "70253211 0.0.1-none vmm".parse().expect("it is one");
        assert!(!elsewhere.is_of(version));
        let otherwise: Proof = format!("70253211 {} k=0123456789abcdef vmm", kernel())
            .parse()
            .expect("it is one");
        assert!(
            otherwise.has(Step::Vmm) && !otherwise.is_of(version),
            "of a machine that is set up otherwise"
        );
    }

    #[test]
    fn whatever_changes_the_answer_changes_the_key() {
        let of = |told: &[&str]| {
            key_of(
                &told
                    .iter()
                    .map(|text| (*text).to_owned())
                    .collect::<Vec<_>>(),
            )
        };
        let keys = [
            of(&["a=1"]),
            of(&["a=2"]),
            of(&["a=1", "b"]),
            of(&["a=", "1"]),
        ];
        assert!(
            keys.iter()
                .all(|key| key.starts_with(KEY) && key.len() == 18),
            "{keys:?}"
        );
        assert!(
            (1..keys.len()).all(|n| !keys[..n].contains(&keys[n])),
            "{keys:?}"
        );
    }

    #[test]
    fn what_is_no_proof_is_refused() {
        for text in [
            "",
            "7",
            "x 6.8",
            "7 6.8 telepathy",
            "7 6.8 words !telepathy",
            "7 6.8 words -words",
            "7 6.8 words -telepathy@0000:83:00.0",
            "7 6.8 !",
        ] {
            assert!(
                matches!(text.parse::<Proof>(), Err(Error::Invalid { .. })),
                "{text:?}"
            );
        }
    }
}
