//! Every thread of the library's crates is started in one place, `gpu_api::thread`, with signals
//! blocked on it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What starts a thread, in a source without white space.
const STARTS: &[&str] = &[
    "thread::spawn(",
    "thread::Builder",
    "scope.spawn(",
    ".spawn_scoped(",
    "pthread_create",
];

/// Crates of tests alone, which no program has.
const OF_TESTS: &[&str] = &["harness", "conformance", "hip-on-cuda"];

fn sources() -> Vec<PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![top.join("src"), top.join("crates/gateway/plan/src")];
    for entry in std::fs::read_dir(top.join("crates")).expect("a folder") {
        let path = entry.expect("an entry").path();
        if !OF_TESTS.iter().any(|of_tests| path.ends_with(of_tests)) {
            folders.push(path.join("src"));
        }
    }
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found
}

/// Leaves out comments and white space, and what stands behind `#[cfg(test)] mod name {`.
fn code_of(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let code: String = lines
        .flat_map(str::chars)
        .filter(|c| !c.is_whitespace())
        .collect();
    let tests = ["#[cfg(test)]mod", "#[cfg(all(test"]
        .iter()
        .filter_map(|head| {
            code.match_indices(head).map(|(at, _)| at).find(|&at| {
                let rest = &code[at..];
                rest.find('{').unwrap_or(usize::MAX) < rest.find(';').unwrap_or(usize::MAX)
            })
        })
        .min();
    code[..tests.unwrap_or(code.len())].to_owned()
}

/// Names the files of modules that only tests have.
fn modules_of_tests(path: &Path, text: &str) -> Vec<PathBuf> {
    let folder = match path.file_name().and_then(|name| name.to_str()) {
        Some("mod.rs" | "lib.rs" | "main.rs") => path.parent().expect("a folder").to_owned(),
        _ => path.with_extension(""),
    };
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let declared = lines
        .windows(2)
        .filter(|two| two[0].starts_with("#[cfg(") && two[0].contains("test"));
    declared
        .filter_map(|two| two[1].strip_prefix("mod ")?.strip_suffix(';'))
        .flat_map(|name| [folder.join(format!("{name}.rs")), folder.join(name)])
        .collect()
}

#[test]
fn threads_are_started_in_one_place() {
    let files: Vec<(PathBuf, String)> = sources()
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(&path).expect("text");
            (path, text)
        })
        .collect();
    assert!(files.len() > 400, "only {} files", files.len());
    let of_tests: BTreeSet<PathBuf> = files
        .iter()
        .flat_map(|(path, text)| modules_of_tests(path, text))
        .collect();
    let found: Vec<String> = files
        .iter()
        .filter(|(path, _)| !path.ends_with("gpu-api/src/thread.rs"))
        .filter(|(path, _)| !path.ancestors().any(|above| of_tests.contains(above)))
        .flat_map(|(path, text)| {
            let code = code_of(text);
            let starts: Vec<&&str> = STARTS
                .iter()
                .filter(|start| code.contains(**start))
                .collect();
            starts
                .into_iter()
                .map(|start| format!("{}: {start}", path.display()))
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(
        found.is_empty(),
        "call gpu_api::thread::start instead: {found:#?}"
    );
}

#[test]
fn a_thread_that_is_started_elsewhere_is_found() {
    let code = code_of(
        "fn f() {\n    std::thread::Builder::new()\n        .spawn(g);\n    // scope.spawn(\n}\n",
    );
    let found: Vec<&&str> = STARTS
        .iter()
        .filter(|start| code.contains(**start))
        .collect();
    assert_eq!(found, [&"thread::Builder"]);
    let tests = "#[cfg(test)]\nmod below;\nfn f() {}\n#[cfg(test)]\nmod tests {\n    std::thread::spawn(g);\n}";
    assert!(!code_of(tests).contains("spawn") && code_of(tests).contains("fnf()"));
    let below = modules_of_tests(Path::new("a/b.rs"), tests);
    assert_eq!(below, [Path::new("a/b/below.rs"), Path::new("a/b/below")]);
}
