//! Says what the HIP runtime of this machine is, what was reported of its version, and what it was seen to do.
//!
//! `prove` tries what disturbs nobody; `prove --read-only` also makes the GPU fault on purpose. One step on one device may
//! take a minute, or `--patience SECONDS`. The last line is what to set for programs that use this library.

use std::time::Duration;

use backend_hip::{HipBackend, PROOF, Step, probe};
use gpu_api::groups::*;
use gpu_api::{DeviceId, Result};

fn main() -> Result<()> {
    probe::run_if_asked();
    let found = HipBackend::inspect()?;
    println!("runtime: HIP {} ({})", found.version, found.version.0);
    println!("lacks: {}", if found.missing.is_empty() { "nothing".to_owned() } else { found.missing.join(" ") });
    for bug in found.version.known_bugs() {
        println!("reported: {}: {}; {}", bug.report, bug.what, bug.remedy);
    }
    let hip = HipBackend::load_with(None)?;
    for device in (0..hip.device_count()?).map(DeviceId) {
        let info = hip.device_info(device)?;
        println!("{device}: {}, {} MiB, {}", info.name, info.total_bytes >> 20, info.uuid);
    }
    drop(hip);
    let program = std::env::current_exe().map_err(|error| gpu_api::Error::system("current_exe", "see /proc", error))?;
    let arguments: Vec<String> = std::env::args().collect();
    let all = arguments.iter().any(|argument| argument == "--read-only");
    let seconds = arguments.iter().position(|argument| argument == "--patience").and_then(|at| arguments.get(at + 1));
    let patience = Duration::from_secs(seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(60));
    let steps: &[Step] = if all { &Step::ALL } else { &Step::HARMLESS };
    let findings = probe::prove(&program, steps, patience)?;
    for finding in &findings.all {
        match &finding.seen {
            Ok(()) => println!("{} on {}: seen to work", finding.step, finding.device),
            Err(why) => println!("{} on {}: not used, {why}", finding.step, finding.device),
        }
    }
    println!("{PROOF}='{}'", findings.proof);
    Ok(())
}
