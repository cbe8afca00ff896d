//! AMD's runtime: its version and what was reported of it, what it is seen to do in child
//! processes, and the proof of that for other processes to take in.

use std::env;
use std::time::Duration;

use gpu_ipc::hip::probe::prove;
use gpu_ipc::hip::{Hip, PROOF, Proof, Step};

use super::check::Check;

/// What one step may take, on all devices at once: less than the silence after which this process
/// is given up.
const PATIENCE: Duration = Duration::from_secs(25);

/// Names the steps that are tried only when asked for, because they may do harm.
const TRY: &str = "GPU_IPC_HIP_TRY";

/// What a step is for, and what is done without it.
fn purpose(step: Step) -> (&'static str, &'static str) {
    match step {
        Step::Handles => (
            "memory is shared by 64-byte handles",
            "memory is shared by descriptor, where that is proved",
        ),
        Step::Vmm | Step::DmaBuf => (
            "memory is shared by file descriptor",
            "memory is shared by 64-byte handles",
        ),
        Step::Words => (
            "streams write words: shares and releases are marked in the order of the stream, without a host function",
            "host functions mark them, some tens of microseconds later",
        ),
        Step::Waits => (
            "streams wait for words: a claim that waits on a stream returns at once",
            "such a claim waits on its thread instead",
        ),
        Step::Events => (
            "streams wait for events of other processes",
            "words or the host do instead",
        ),
        Step::Pools => (
            "the runtime's own pools are right: `DriverPool` uses them",
            "`DriverPool` is refused",
        ),
        _ => (
            "mappings to read only",
            "mappings are for reading and writing",
        ),
    }
}

/// Says what trying a step may do.
fn harm(step: Step) -> &'static str {
    match step {
        Step::Pools => {
            "it takes most of a GPU's memory for a moment, and a pool that is wrong may make it fault"
        }
        _ => "where it fails it leaves a GPU spinning or faulting, which may reset it",
    }
}

/// Looks at the runtime. `tell` is called before each step, and ends the looking by an error.
pub fn checks(mut tell: impl FnMut(&str) -> Result<(), String>) -> Result<Vec<Check>, String> {
    let mut checks = Vec::new();
    let (inspection, program) = match (Hip::inspect(), env::current_exe()) {
        (Ok(inspection), Ok(program)) => (inspection, program),
        // The backend itself says why.
        (Err(_), _) | (_, Err(_)) => return Ok(checks),
    };
    let version = inspection.version;
    let bugs = version.known_bugs();
    let found = format!(
        "HIP {version}, {} functions missing",
        inspection.missing.len()
    );
    checks.push(if bugs.is_empty() {
        Check::ok("runtime", found)
    } else {
        let reported: Vec<String> = bugs
            .iter()
            .map(|bug| format!("{}: {}", bug.report, bug.what))
            .collect();
        Check::ok("runtime", found)
            .why(format!("reported of this version: {}", reported.join("; ")))
            .remedy("docs/HIP.md says what gpu-ipc does about each")
    });
    let (mut worked, mut failed) = (Vec::new(), Vec::new());
    let mut pool_defects = Vec::new();
    let asked = env::var(TRY).unwrap_or_default();
    let asked = |step: &Step| asked.split([' ', ',']).any(|name| name == step.name());
    for step in Step::ALL {
        let name = format!("probe {step}");
        let (with, without) = purpose(step);
        if !Step::HARMLESS.contains(&step) && !asked(&step) {
            let not_tried = Check::absent(&name, format!("not tried: {without}"));
            checks.push(
                not_tried
                    .why(harm(step))
                    .remedy(format!("{TRY}={step} gpu-ipc doctor, on an idle machine")),
            );
            continue;
        }
        tell(&name)?;
        let findings = prove(&program, &[step], PATIENCE).map_err(|error| error.to_string())?;
        pool_defects.extend_from_slice(findings.proof.pool_defects());
        failed.extend_from_slice(findings.proof.failures());
        worked.extend_from_slice(findings.proof.steps());
        let refusals: Vec<String> = findings
            .all
            .iter()
            .filter_map(|finding| {
                Some(format!(
                    "{}: {}",
                    finding.device,
                    finding.seen.as_ref().err()?
                ))
            })
            .collect();
        checks.push(if refusals.is_empty() {
            Check::ok(&name, format!("seen to work between two child processes: {with}"))
        } else if findings.proof.has(step) {
            let found = format!("seen to work between two child processes on other devices: {with}");
            Check::warning(&name, found).why(refusals.join("; ")).remedy("the proof leaves it out there alone")
        } else {
            Check::absent(&name, format!("not seen to work: {without}")).why(refusals.join("; ")).remedy(
                "nothing: gpu-ipc does without it; a later ROCm may do better (what was reported of this one is above)",
            )
        });
    }
    checks.push(proof(
        &Proof::new(version, worked)
            .with_failures(failed)
            .with_pool_defects(pool_defects),
    ));
    Ok(checks)
}

/// Says what to set, unless it is set.
fn proof(seen: &Proof) -> Check {
    let set = env::var(PROOF)
        .ok()
        .and_then(|text| text.parse::<Proof>().ok());
    let all_set = set.is_some_and(|set| {
        seen.steps().iter().all(|step| set.has(*step)) && set.failures() == seen.failures()
    });
    let found = format!("{PROOF}='{seen}'");
    if seen.steps().is_empty() || all_set {
        Check::ok("proof", found)
    } else {
        Check::warning("proof", found)
            .why("a process uses these features only if the variable names them")
            .remedy(
                "set this variable for every producer and consumer, and ask again after an update",
            )
    }
}
