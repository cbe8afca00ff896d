//! What holds for every source file: it leads to its tests, tests start processes through one
//! library, and what differs by vendor stands in one table.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Lists the Rust files below a folder, by their paths from the top.
fn files(folder: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![top().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path: PathBuf = entry.expect("an entry").path();
            if path.is_dir() {
                if path.file_name().is_none_or(|name| name != "target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let path = path.strip_prefix(top()).expect("below it");
                found.push(path.to_str().expect("a plain name").to_owned());
            }
        }
    }
    found.sort();
    found
}

fn text(file: &str) -> String {
    std::fs::read_to_string(top().join(file)).expect("text")
}

/// Returns the paths that the line `Tests:` in a file's head names.
fn named(text: &str) -> Option<Vec<&str>> {
    let start = text.find("\n// Tests: ")? + 1;
    let comment = text[start..]
        .lines()
        .take_while(|line| line.starts_with("//"));
    let end = comment.map(|line| line.len() + 1).sum::<usize>();
    Some(
        text[start..start + end]
            .split('`')
            .skip(1)
            .step_by(2)
            .collect(),
    )
}

/// Says whether a file has tests of its own, in it or beside it, or a line of its head, or of that
/// of a folder above it, names them.
fn leads_to_tests(file: &str, tests: &BTreeSet<String>) -> bool {
    let own = text(file);
    if own.contains("#[cfg(test)]") || own.contains("#[cfg(all(test") || named(&own).is_some() {
        return true;
    }
    let path = Path::new(file);
    let stem = match path.file_stem().and_then(|stem| stem.to_str()) {
        Some("mod") => path.parent().and_then(Path::file_name),
        _ => path.file_stem(),
    };
    let stem = stem.and_then(|stem| stem.to_str()).expect("a plain name");
    let same = [format!("/{stem}.rs"), format!("/{stem}/main.rs")];
    if tests
        .iter()
        .any(|test| same.iter().any(|name| test.ends_with(name.as_str())))
    {
        return true;
    }
    path.ancestors().skip(1).any(|folder| {
        ["mod.rs", "lib.rs"].iter().any(|name| {
            let front = folder.join(name);
            let front = front.to_str().expect("a plain name");
            top().join(front).exists() && named(&text(front)).is_some()
        })
    })
}

fn crates() -> Vec<String> {
    let mut found = vec![String::new(), "crates/gateway/plan/".to_owned()];
    for entry in std::fs::read_dir(top().join("crates")).expect("the crates") {
        let name = entry.expect("a folder").file_name();
        found.push(format!("crates/{}/", name.to_str().expect("a plain name")));
    }
    found
}

#[test]
fn every_file_leads_to_its_tests() {
    let (mut seen, mut lost) = (0, Vec::new());
    for package in crates() {
        let tests = files(&format!("{package}tests")).into_iter().collect();
        for file in files(&format!("{package}src")) {
            seen += 1;
            if !leads_to_tests(&file, &tests) {
                lost.push(file);
            }
        }
    }
    assert!(seen > 400, "only {seen} files were read");
    assert!(
        lost.is_empty(),
        "no test is named in the heads of these or of their folders: {lost:#?}"
    );
}

#[test]
fn every_test_that_a_head_names_exists() {
    let mut seen = 0;
    for file in crates()
        .iter()
        .flat_map(|package| files(&format!("{package}src")))
    {
        let text = text(&file);
        for path in named(&text).into_iter().flatten() {
            seen += 1;
            assert!(
                top().join(path).exists(),
                "{file} names {path}, which is not there"
            );
        }
    }
    assert!(seen > 100, "only {seen} paths were read");
}

/// Files that start a process without the harness, and why.
const WITHOUT_THE_HARNESS: [(&str, &str); 9] = [
    (
        "crates/backend-hip/src/exporter.rs",
        "takes over a child that has ended",
    ),
    ("benches/instructions/stepper.rs", "traces the process"),
    (
        "crates/capi/tests/c_programs.rs",
        "asks compilers and programs in C",
    ),
    (
        "crates/gateway/benches/nixl_reads.rs",
        "reads bytes from the process, not lines",
    ),
    (
        "testing/torch/producer.rs",
        "waits for its Python at a socket",
    ),
    ("tests/arrows.rs", "asks Cargo"),
    (
        "crates/transport/src/os/process/descendants.rs",
        "what is tested is which descriptors a child inherits",
    ),
    (
        "crates/transport/src/os/process/forked.rs",
        "children that stand still with a descriptor",
    ),
    ("tests/sources.rs", "names the calls"),
];

#[test]
fn tests_start_processes_through_the_harness() {
    let starts = [
        ".spawn()",
        ".output()",
        ".status()",
        "libc::fork()",
        "wait_with_output",
    ];
    let mut all = files("testing");
    all.retain(|file| !file.starts_with("testing/harness"));
    for folder in ["tests", "examples", "benches"] {
        let of = crates();
        all.extend(
            of.iter()
                .flat_map(|package| files(&format!("{package}{folder}"))),
        );
    }
    for file in crates()
        .iter()
        .flat_map(|package| files(&format!("{package}src")))
    {
        if text(&file).contains("#[cfg(test)]") || file.contains("/os/process/") {
            all.push(file);
        }
    }
    assert!(all.len() > 400, "only {} files were read", all.len());
    let mut used = BTreeSet::new();
    for file in all {
        let text = text(&file);
        // What is shipped may start processes: the tests are below it.
        let tests = match text.find("#[cfg(test)]") {
            Some(at) if file.contains("/src/") && !file.starts_with("testing") => &text[at..],
            _ => &text[..],
        };
        let code = tests
            .lines()
            .map(|line| line.split("//").next().unwrap_or(line));
        // A type may have a method of such a name: these are those of `Command`.
        let found = code.filter(|line| starts.iter().any(|start| line.contains(start)));
        let found: Vec<&str> = found
            .filter(|line| !line.contains("self.status()") && !line.contains("].status()"))
            .collect();
        if found.is_empty() {
            continue;
        }
        let known = WITHOUT_THE_HARNESS.iter().find(|(known, _)| *known == file);
        let (known, _) =
            known.unwrap_or_else(|| panic!("{file} starts a process by itself: {found:?}"));
        used.insert(*known);
    }
    let unused: Vec<_> = WITHOUT_THE_HARNESS
        .iter()
        .filter(|(known, _)| !used.contains(known))
        .collect();
    assert!(unused.is_empty(), "these need no exception: {unused:?}");
}

/// Where a vendor may be told from another: the backends, the choice among them, the table of
/// vendors, and the benchmark of a driver's own calls.
const KNOW_VENDORS: [&str; 9] = [
    "crates/backend-cuda/",
    "crates/backend-hip/",
    "crates/backend-host/",
    "crates/cli/src/bench/floor/",
    "crates/driver/",
    "crates/gpu-api/src/device.rs",
    "crates/hip-probe/",
    "src/detect.rs",
    "testing/conformance/",
];

/// Returns the lines that do one thing for a vendor and another for the rest: a comparison, an arm
/// of a match, or a `matches!`.
fn matched_vendors(source: &str) -> Vec<&str> {
    const NAME: &str = "BackendKind::";
    let is_matched = |line: &&str| {
        line.match_indices(NAME).any(|(at, _)| {
            let before = line[..at].trim_end_matches("gpu_ipc::").trim_end();
            let behind = &line[at + NAME.len()..];
            let after = behind
                .trim_start_matches(char::is_alphanumeric)
                .trim_start();
            let is_variant = ["Cuda", "Hip", "Host"]
                .iter()
                .any(|name| behind.starts_with(name));
            let compares = |text: &str| ["==", "!="].iter().any(|sign| text.starts_with(sign));
            let is_compared = before.ends_with("==") || before.ends_with("!=") || compares(after);
            let is_arm = ["=>", "|", "if "].iter().any(|arm| after.starts_with(arm))
                || after.contains("=>") && before.ends_with(['(', '|']);
            is_variant && (is_compared || is_arm || before.contains("matches!("))
        })
    };
    source.lines().filter(is_matched).collect()
}

#[test]
fn what_differs_by_vendor_stands_in_the_table_of_vendors() {
    let folders = ["src", "crates", "testing"];
    for file in folders.into_iter().flat_map(files) {
        let is_product = file.contains("/src/") || file.starts_with("src/");
        if !is_product || KNOW_VENDORS.iter().any(|known| file.starts_with(known)) {
            continue;
        }
        // Tests of a file name vendors as they like.
        let whole = text(&file);
        let code = whole.split("#[cfg(test)]").next().unwrap_or_default();
        let found = matched_vendors(code);
        assert!(
            found.is_empty(),
            "{file} asks which vendor it is; put what differs into `BackendKind`'s table or `Caps`: {found:?}"
        );
    }
}

#[test]
fn a_vendor_that_is_asked_for_is_found_in_every_form() {
    for line in [
        "if gpu.kind() == BackendKind::Host {",
        "if kind != gpu_ipc::BackendKind::Hip {",
        "if BackendKind::Cuda == kind {",
        "        BackendKind::Cuda => one(),",
        "        BackendKind::Cuda | BackendKind::Hip => one(),",
        "        (BackendKind::Cuda, Some(1)) => one(),",
        "        BackendKind::Cuda if can => one(),",
        "matches!(kind, BackendKind::Cuda)",
    ] {
        assert_eq!(matched_vendors(line), [line]);
    }
    for line in [
        "detect_only(BackendKind::Host)?.first(BackendKind::Host)?",
        "for kind in BackendKind::ALL {",
        "backend: BackendKind::Host,",
        "BackendKind::from_byte(byte) == Some(kind)",
        "let why = Error::NotCompiled { backend: BackendKind::Hip };",
    ] {
        assert!(matched_vendors(line).is_empty(), "{line}");
    }
}

#[test]
fn an_example_has_30_to_120_lines_of_code() {
    let mut seen = 0;
    for file in files("examples") {
        if file.contains("/shared/") {
            continue;
        }
        seen += 1;
        let text = text(&file);
        let lines = text.lines().map(str::trim);
        let code = lines
            .filter(|line| !line.is_empty() && !line.starts_with("//"))
            .count();
        assert!((30..=120).contains(&code), "{file} has {code} lines");
    }
    assert!(seen >= 10, "only {seen} examples were read");
}
