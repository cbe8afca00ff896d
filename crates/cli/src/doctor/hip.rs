//! AMD's runtime: its version and what was reported of it, what it is seen to do in child processes, and the proof of
//! that for other processes to take in.

use std::env;
use std::time::Duration;

use gpu_ipc::hip::probe::prove;
use gpu_ipc::hip::{HipBackend, PROOF, Proof, Step};

use super::check::Check;

/// What one step on one device may take: on eight devices less than the silence after which this process is given up.
const PATIENCE: Duration = Duration::from_secs(12);

/// Looks at the runtime. `tell` is called before each step, and ends the looking by an error.
pub fn checks(mut tell: impl FnMut(&str) -> Result<(), String>) -> Result<Vec<Check>, String> {
    let mut checks = Vec::new();
    let (inspection, program) = match (HipBackend::inspect(), env::current_exe()) {
        (Ok(inspection), Ok(program)) => (inspection, program),
        // The backend itself says why.
        (Err(_), _) | (_, Err(_)) => return Ok(checks),
    };
    let version = inspection.version;
    let bugs = version.known_bugs();
    let found = format!("HIP {version}, {} functions missing", inspection.missing.len());
    checks.push(if bugs.is_empty() {
        Check::ok("runtime", found)
    } else {
        let reported: Vec<String> = bugs.iter().map(|bug| format!("{}: {}", bug.report, bug.what)).collect();
        Check::ok("runtime", found)
            .why(format!("reported of this version: {}", reported.join("; ")))
            .remedy("docs/HIP.md says what gpu-ipc does about each")
    });
    let mut worked = Vec::new();
    for step in Step::HARMLESS {
        let name = format!("probe {step}");
        tell(&name)?;
        let findings = prove(&program, &[step], PATIENCE).map_err(|error| error.to_string())?;
        let refusals: Vec<String> = findings
            .all
            .iter()
            .filter_map(|finding| Some(format!("{}: {}", finding.device, finding.seen.as_ref().err()?)))
            .collect();
        checks.push(if refusals.is_empty() {
            worked.push(step);
            Check::ok(&name, "seen to work between two child processes")
        } else {
            Check::absent(&name, "not seen to work, so not used").why(refusals.join("; ")).remedy(
                "nothing: gpu-ipc does without it; a later ROCm may do better (what was reported of this one is above)",
            )
        });
    }
    checks.push(proof(&Proof::new(version, worked)));
    Ok(checks)
}

/// Says what to set, unless it is set.
fn proof(seen: &Proof) -> Check {
    let set = env::var(PROOF).ok().and_then(|text| text.parse::<Proof>().ok());
    let all_set = set.is_some_and(|set| seen.steps().iter().all(|step| set.has(*step)));
    let found = format!("{PROOF}='{seen}'");
    if seen.steps().is_empty() || all_set {
        Check::ok("proof", found)
    } else {
        Check::warning("proof", found)
            .why("what was seen to work is used only by processes that are told of it")
            .remedy("set this variable for every producer and consumer, and ask again after an update")
    }
}
