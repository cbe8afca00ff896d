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

fn sources() -> Vec<PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![top.join("src"), top.join("crates/gateway/plan/src")];
    for entry in std::fs::read_dir(top.join("crates")).expect("a folder") {
        folders.push(entry.expect("an entry").path().join("src"));
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

/// What a file has for programs: its code without comments and white space up to the module of its
/// tests, and the paths of modules that only tests have.
fn parse(path: &Path, text: &str) -> (String, Vec<PathBuf>) {
    let folder = path.parent().expect("a folder");
    let below = match path.file_name().and_then(|name| name.to_str()) {
        Some("mod.rs" | "lib.rs" | "main.rs") => folder.to_owned(),
        _ => path.with_extension(""),
    };
    let mut of_tests = Vec::new();
    let mut code = String::new();
    let mut lines = text.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("#[cfg(") && line.contains("test") && !line.contains("not(test") {
            let mut named = None;
            while let Some(attribute) = lines.next_if(|next| next.starts_with("#[")) {
                let quoted = attribute.strip_prefix("#[path = \"");
                named = named.or(quoted.and_then(|rest| rest.strip_suffix("\"]")));
            }
            let module = lines.peek().and_then(|next| next.strip_prefix("mod "));
            match (module.and_then(|module| module.strip_suffix(';')), named) {
                (Some(_), Some(named)) => of_tests.push(folder.join(named)),
                (Some(name), None) => of_tests.push(below.join(format!("{name}.rs"))),
                // The tests are the last of a file.
                (None, _) if module.is_some() => break,
                (None, _) => {}
            }
        }
        let line = line.split("//").next().unwrap_or_default();
        code.extend(line.chars().filter(|c| !c.is_whitespace()));
    }
    // A module has its own folder too.
    let folders = of_tests.iter().map(|file| match file.ends_with("mod.rs") {
        true => file.parent().expect("a folder").to_owned(),
        false => file.with_extension(""),
    });
    let folders: Vec<PathBuf> = folders.collect();
    of_tests.extend(folders);
    (code, of_tests)
}

fn starts(code: &str) -> Vec<&'static str> {
    let found = STARTS.iter().filter(|start| code.contains(**start));
    found.copied().collect()
}

#[test]
fn threads_are_started_in_one_place() {
    let files: Vec<(PathBuf, (String, Vec<PathBuf>))> = sources()
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(&path).expect("text");
            let parsed = parse(&path, &text);
            (path, parsed)
        })
        .collect();
    assert!(files.len() > 400, "only {} files", files.len());
    let of_tests: BTreeSet<&PathBuf> = files
        .iter()
        .flat_map(|(_, (_, of_tests))| of_tests)
        .collect();
    let is_of_tests = |path: &Path| {
        path.ancestors()
            .any(|above| of_tests.contains(&above.to_owned()))
    };
    let found: Vec<String> = files
        .iter()
        .filter(|(path, _)| !path.ends_with("gpu-api/src/thread.rs") && !is_of_tests(path))
        .flat_map(|(path, (code, _))| {
            starts(code)
                .into_iter()
                .map(move |start| format!("{}: {start}", path.display()))
        })
        .collect();
    assert!(
        found.is_empty(),
        "call gpu_api::thread::start instead: {found:#?}"
    );
}

#[test]
fn a_thread_that_is_started_elsewhere_is_found() {
    let text =
        "fn f() {\n    std::thread::Builder::new()\n        .spawn(g);\n    // scope.spawn(\n}\n";
    assert_eq!(
        starts(&parse(Path::new("a/b.rs"), text).0),
        ["thread::Builder"]
    );
    let tests = "#[cfg(test)]\n#[path = \"c/mod.rs\"]\nmod c;\n#[cfg(test)]\nmod d;\nfn f() {}\n\
                 #[cfg(test)]\n#[cfg(not(loom))]\nmod tests {\n    std::thread::spawn(g);\n}";
    let (code, of_tests) = parse(Path::new("a/b.rs"), tests);
    assert!(starts(&code).is_empty() && code.contains("fnf()"));
    let paths = ["a/c/mod.rs", "a/b/d.rs", "a/c", "a/b/d"];
    assert_eq!(of_tests, paths.map(PathBuf::from));
}
