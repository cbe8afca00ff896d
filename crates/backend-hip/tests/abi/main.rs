//! The backend's structures and constants against AMD's headers, by a C program that the machine's
//! compiler builds.
//!
//! The headers are those under `/usr` and `/opt/rocm`, and in the include directories that
//! `GPU_IPC_HIP_HEADERS` lists, separated by colons. Where there are none, or no C compiler, the
//! case is ignored and says so.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use backend_hip::Version;
use backend_hip::oracle::{layout, memory_type, room};
use harness::program::{ends_well, output, passes};
use libtest_mimic::{Arguments, Failed, Trial};

const HEADER: &str = "hip/hip_runtime_api.h";

fn main() {
    let named = env::var("GPU_IPC_HIP_HEADERS").unwrap_or_default();
    let named = named
        .split(':')
        .filter(|directory| !directory.is_empty())
        .map(PathBuf::from);
    let usual = ["/usr/include", "/opt/rocm/include"].map(PathBuf::from);
    let usual = usual
        .into_iter()
        .filter(|directory| directory.join(HEADER).exists());
    let places: Vec<PathBuf> = named.chain(usual).collect();
    let compiler = ends_well(Command::new("cc").arg("--version"));
    let mut trials = Vec::new();
    for place in &places {
        let place = place.clone();
        let name = format!("headers_in_{}", place.display());
        trials.push(Trial::test(name, move || compare(&place)).with_ignored_flag(!compiler));
    }
    if trials.is_empty() {
        eprintln!(
            "ignored: no {HEADER}: install libamdhip64-dev, or name include directories in GPU_IPC_HIP_HEADERS"
        );
        trials.push(
            Trial::test("headers", || Err(Failed::from("there are none"))).with_ignored_flag(true),
        );
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Builds the C program over headers and reads what it prints.
fn print(place: &Path) -> Result<BTreeMap<String, u64>, Failed> {
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("layout");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/abi/layout.c");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-D__HIP_PLATFORM_AMD__", "-w", "-isystem"])
        .arg(place)
        .arg("-o")
        .arg(&program)
        .arg(source)
        // The functions are looked at, never called.
        .arg("-Wl,--unresolved-symbols=ignore-all");
    passes(&mut cc)?;
    let output = output(&mut Command::new(program));
    let text = String::from_utf8(output.stdout)?;
    let lines = text.lines().map(|line| {
        let (name, number) = line.split_once('\t').ok_or("a name and a number")?;
        Ok((name.to_owned(), number.parse()?))
    });
    lines.collect()
}

fn compare(place: &Path) -> Result<(), Failed> {
    let theirs = print(place)?;
    let version = Version(
        *theirs
            .get("HIP_VERSION")
            .ok_or("the headers have no version")? as u32,
    );
    let mut wrong = Vec::new();
    let ours = layout(version);
    for (name, ours) in &ours {
        if theirs.get(*name) != Some(ours) {
            wrong.push(format!("{name} is {:?}, here {ours}", theirs.get(*name)));
        }
    }
    for (name, ours) in room() {
        if theirs.get(name).is_none_or(|theirs| *theirs > ours) {
            wrong.push(format!(
                "{name} is {:?}, here is room for {ours}",
                theirs.get(name)
            ));
        }
    }
    for (name, number) in theirs
        .iter()
        .filter_map(|(name, number)| Some((name.strip_prefix("kind hipMemoryType")?, number)))
    {
        let ours = memory_type(version, *number as u32);
        if ours != name {
            wrong.push(format!(
                "hipMemoryType{name} is {number}, here taken for {ours}"
            ));
        }
    }
    eprintln!(
        "{}: HIP {version}, {} numbers compared",
        place.display(),
        theirs.len()
    );
    // What the program prints and nobody compares would be forgotten.
    let compared = ours.len()
        + room().len()
        + theirs
            .keys()
            .filter(|name| name.starts_with("kind "))
            .count()
        + 1;
    if compared != theirs.len() {
        wrong.push(format!(
            "{} numbers are printed, {compared} compared",
            theirs.len()
        ));
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(wrong.join("\n").into())
    }
}
