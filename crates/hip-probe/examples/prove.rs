//! Says what the HIP runtime of this machine is, what was reported of its version, and what it was
//! seen to do.
//!
//! `prove` tries what harms nobody. `prove --waits` also tries the steps that leave a wave spinning
//! where they fail, `prove --read-only` makes the GPU fault on purpose, and `prove --pools` takes
//! most of its memory for a moment. One step may take a minute, or `--patience SECONDS`; all
//! devices are tried at once, and each finding is printed as it comes. The last line is what to set
//! for programs that use this library. `prove --only STEP...` tries these; `prove --as STEP...`
//! tries nothing and prints that line for these steps.

use std::time::Duration;

use backend_hip::{Hip, PROOF, Proof, Step};
use gpu_api::groups::*;
use gpu_api::{DeviceId, Result};

fn main() -> Result<()> {
    hip_probe::run_if_asked();
    let found = Hip::inspect()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    if has("--as") {
        let steps = arguments.iter().filter_map(|name| Step::from_name(name));
        println!("{PROOF}='{}'", Proof::new(found.version, steps));
        return Ok(());
    }
    println!("runtime: HIP {} ({})", found.version, found.version.0);
    println!(
        "lacks: {}",
        if found.missing.is_empty() {
            "nothing".to_owned()
        } else {
            found.missing.join(" ")
        }
    );
    for bug in found.version.known_bugs() {
        println!("reported: {}: {}; {}", bug.report, bug.what, bug.remedy);
    }
    let hip = Hip::load_with(None)?;
    for device in (0..hip.device_count()?).map(DeviceId) {
        match hip.device_info(device) {
            // Not its identity, which is nobody else's business.
            Ok(info) => println!("{device}: {}, {} MiB", info.name, info.total_bytes >> 20),
            Err(error) => println!("{device}: {error}"),
        }
    }
    drop(hip);
    let program = std::env::current_exe()
        .map_err(|error| gpu_api::Error::system("current_exe", "see /proc", error))?;
    let seconds = arguments
        .iter()
        .rposition(|argument| argument == "--patience")
        .and_then(|at| arguments.get(at + 1));
    let patience = Duration::from_secs(
        seconds
            .and_then(|seconds| seconds.parse().ok())
            .unwrap_or(60),
    );
    let named = |step: &Step| has(step.name());
    let wanted = |step: &Step| match step {
        _ if has("--only") => named(step),
        Step::ReadOnly => has("--read-only"),
        Step::Waits | Step::Events => has("--waits"),
        Step::Pools => has("--pools"),
        _ => true,
    };
    let steps: Vec<Step> = Step::ALL.into_iter().filter(wanted).collect();
    let findings =
        hip_probe::prove_and_tell(&program, &steps, patience, |finding| match &finding.seen {
            Ok(()) => println!("{} on {}: seen to work", finding.step, finding.device),
            Err(why) => println!("{} on {}: not used, {why}", finding.step, finding.device),
        })?;
    println!("{PROOF}='{}'", findings.proof);
    Ok(())
}
