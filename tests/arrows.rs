//! The arrows between the crates, and between the files of each, point one way: `docs/DESIGN.md`
//! says which.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each of our packages, and which of ours it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("gpu-ipc-gpu-api", &[]),
    ("gpu-ipc-backend-host", &["gpu-ipc-gpu-api"]),
    ("gpu-ipc-driver", &["gpu-ipc-gpu-api"]),
    (
        "gpu-ipc-backend-cuda",
        &["gpu-ipc-gpu-api", "gpu-ipc-driver"],
    ),
    (
        "gpu-ipc-backend-hip",
        &["gpu-ipc-gpu-api", "gpu-ipc-driver"],
    ),
    (
        "gpu-ipc-hip-probe",
        &["gpu-ipc-gpu-api", "gpu-ipc-driver", "gpu-ipc-backend-hip"],
    ),
    (
        "gpu-ipc-hip-on-cuda",
        &["gpu-ipc-gpu-api", "gpu-ipc-driver", "gpu-ipc-backend-host"],
    ),
    ("gpu-ipc-transport", &["gpu-ipc-gpu-api"]),
    (
        "gpu-ipc-ipc-rc",
        &["gpu-ipc-gpu-api", "gpu-ipc-transport", "gpu-ipc-allocators"],
    ),
    // On `ipc-rc` for streams alone.
    (
        "gpu-ipc-broker",
        &["gpu-ipc-gpu-api", "gpu-ipc-transport", "gpu-ipc-ipc-rc"],
    ),
    ("gpu-ipc-allocators", &["gpu-ipc-gpu-api"]),
    // On `ipc-rc` for blocks and streams: what it sends to PyTorch is a block of a session.
    ("gpu-ipc-torch", &["gpu-ipc-gpu-api", "gpu-ipc-ipc-rc"]),
    (
        "gpu-ipc",
        &[
            "gpu-ipc-gpu-api",
            "gpu-ipc-backend-host",
            "gpu-ipc-backend-cuda",
            "gpu-ipc-backend-hip",
            "gpu-ipc-hip-probe",
            "gpu-ipc-ipc-rc",
            "gpu-ipc-allocators",
            "gpu-ipc-broker",
            "gpu-ipc-torch",
        ],
    ),
    // Of tests alone: it knows of no GPU.
    ("gpu-ipc-harness", &[]),
    ("gpu-ipc-conformance", &["gpu-ipc"]),
    ("gpu-ipc-cli", &["gpu-ipc"]),
    (
        "gpu-ipc-torture",
        &[
            "gpu-ipc",
            "gpu-ipc-backend-host",
            "gpu-ipc-cli",
            "gpu-ipc-harness",
        ],
    ),
    (
        "gpu-ipc-steady",
        &["gpu-ipc", "gpu-ipc-cli", "gpu-ipc-harness"],
    ),
    ("gpu-ipc-python", &["gpu-ipc"]),
    ("gpu-ipc-capi", &["gpu-ipc"]),
    // The gateway's workspace.
    ("gpu-ipc-gateway-plan", &[]),
    ("gpu-ipc-gateway", &["gpu-ipc", "gpu-ipc-gateway-plan"]),
    // On the gateway for its messages and what answers them.
    (
        "gpu-ipc-gateway-simulation",
        &["gpu-ipc", "gpu-ipc-gateway", "gpu-ipc-gateway-plan"],
    ),
    (
        "gpu-ipc-gateway-hosts",
        &["gpu-ipc", "gpu-ipc-gateway", "gpu-ipc-harness"],
    ),
];

/// Lists the packages of a workspace.
fn packages(workspace: &str) -> Vec<serde_json::Value> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
        ])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(workspace))
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
    metadata["packages"].as_array().expect("a list").clone()
}

#[test]
fn every_crate_depends_only_on_those_below_it() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let packages = [packages("."), packages("crates/gateway")].concat();
    assert_eq!(
        packages.len(),
        ALLOWED.len(),
        "a crate came or went: say here what it may depend on"
    );
    for package in &packages {
        let name = package["name"].as_str().expect("a name");
        let below = allowed
            .get(name)
            .unwrap_or_else(|| panic!("{name}: say here what it may depend on"));
        for dependency in package["dependencies"].as_array().expect("a list") {
            let on = dependency["name"].as_str().expect("a name");
            // Tests may look anywhere: `kind` is null for an ordinary dependency.
            if dependency["kind"].is_null() && on.starts_with("gpu-ipc") {
                assert!(below.contains(&on), "{name} must not depend on {on}");
            }
        }
    }
}

#[test]
fn files_import_in_one_direction() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let mut seen = 0;
    for source in sources(top) {
        let files = Files::read(&source);
        seen += files.0.len();
        let name = source.strip_prefix(top).expect("below it").to_owned();
        found.extend(
            files
                .circles()
                .into_iter()
                .map(|circle| (name.clone(), circle)),
        );
    }
    // Those of the gateway's workspace too.
    assert!(seen > 500, "only {seen} files");
    assert!(found.is_empty(), "circles of files: {found:#?}");
}

/// Circles of folders that exist. They may shrink, and none may be added.
const KNOWN: &[(&str, &[&str])] = &[
    ("crates/allocators/src", &["bfc", "snapshot"]),
    ("crates/broker/src", &["keeper", "server"]),
    (
        "crates/ipc-rc/src",
        &[
            "consumer::connection",
            "consumer::leases",
            "consumer::mappings",
        ],
    ),
    ("crates/transport/src", &["os", "shared", "wire"]),
];

#[test]
fn folders_import_in_one_direction() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    for source in sources(top) {
        let name = source.strip_prefix(top).expect("below it");
        let circles = Files::read(&source).circles_of_folders();
        let with_name = |circle| (name.to_string_lossy().into_owned(), circle);
        found.extend(circles.into_iter().map(with_name));
    }
    let covers = |(name, folders): &(&str, &[&str]), (source, circle): &(String, Vec<String>)| {
        name == source
            && circle
                .iter()
                .all(|folder| folders.contains(&folder.as_str()))
    };
    for circle in &found {
        let is_known = KNOWN.iter().any(|known| covers(known, circle));
        assert!(is_known, "a circle of folders: {circle:?}");
    }
    for known in KNOWN {
        let exists = found.iter().any(|circle| covers(known, circle));
        assert!(exists, "this circle is gone, strike it: {known:?}");
    }
}

/// Lists the folders of source files below one: those of crates, and those of tests, examples and
/// benches that have several.
fn sources(top: &Path) -> Vec<PathBuf> {
    let mut sources = Vec::new();
    let mut folders = vec![top.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries: Vec<PathBuf> = std::fs::read_dir(&folder)
            .expect("a folder")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        if ["main.rs", "lib.rs"]
            .iter()
            .any(|root| folder.join(root).is_file())
        {
            sources.push(folder);
        } else {
            let hidden = |path: &Path| {
                path.file_name()
                    .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
            };
            folders.extend(
                entries
                    .into_iter()
                    .filter(|path| path.is_dir() && !path.ends_with("target") && !hidden(path)),
            );
        }
    }
    sources
}

#[test]
fn a_circle_of_files_is_found() {
    let files = |texts: &[(&str, &str)]| {
        let files = texts
            .iter()
            .map(|(path, text)| (module_of(path), File::parse(text, &module_of(path))));
        Files(files.collect())
    };
    let three = [
        (
            "lib.rs",
            "mod a; mod b; mod c; mod d; mod f; pub use a::Outer;",
        ),
        (
            "a.rs",
            "use crate::b::{self, B}; /* crate::d */ pub struct Outer(B);",
        ),
        (
            "b/mod.rs",
            "mod e; pub fn f() { super::c::g(\"crate::d\"); e::h(); other::e::i() }",
        ),
        ("b/e.rs", "use crate::f::F;"),
        (
            "c.rs",
            "use crate::Outer; #[cfg(test)] mod tests { use crate::d::D; }",
        ),
        ("d.rs", "use crate::{a, b::B as _, c};"),
        ("f.rs", "use crate::c::g;"),
    ];
    assert_eq!(files(&three).circles(), [["a", "b", "b::e", "c", "f"]]);
    assert!(
        files(&three[1..]).circles().is_empty(),
        "without its re-export"
    );
}

#[test]
fn a_circle_of_folders_is_found() {
    let files = |texts: &[(&str, &str)]| {
        let files = texts
            .iter()
            .map(|(path, text)| (module_of(path), File::parse(text, &module_of(path))));
        Files(files.collect())
    };
    let mut ring = [
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a/mod.rs", "mod one; mod two;"),
        ("a/one.rs", "use crate::b::three::B;"),
        ("a/two.rs", ""),
        ("b/mod.rs", "mod three; mod four;"),
        ("b/three.rs", "pub struct B;"),
        ("b/four.rs", "use crate::a::two::f; use crate::c::G;"),
        ("c.rs", "use crate::a::one;"),
    ];
    assert!(files(&ring).circles().is_empty());
    assert_eq!(files(&ring).circles_of_folders(), [["a", "b"]]);
    ring[6].1 = "use crate::c::G;";
    assert!(files(&ring).circles_of_folders().is_empty());
}

/// A file's module, from the crate's root.
type Module = Vec<String>;

fn module_of(path: &str) -> Module {
    let mut module: Module = path
        .trim_end_matches(".rs")
        .split('/')
        .map(str::to_owned)
        .collect();
    if matches!(
        module.last().map(String::as_str),
        Some("mod" | "lib" | "main")
    ) {
        module.pop();
    }
    module
}

/// What a file imports.
#[derive(Debug, Default)]
struct File {
    /// The paths that it names, from the crate's root where they say so.
    paths: Vec<Module>,
    /// What it hands on under a name of its own.
    exports: BTreeMap<String, Module>,
    /// Modules that only tests have.
    tests: Vec<String>,
}

impl File {
    fn parse(text: &str, module: &Module) -> File {
        let tokens = tokens(text);
        // Modules of this file's own: paths into them need neither `self` nor `use`.
        let below = tokens
            .windows(3)
            .filter(|three| three[0] == "mod" && three[2] == ";")
            .map(|three| &three[1]);
        let below: BTreeSet<&String> = below.collect();
        let (mut file, mut at) = (File::default(), 0);
        while at < tokens.len() {
            let rest = &tokens[at..];
            let is = |expected: &[&str]| {
                rest.iter()
                    .map(String::as_str)
                    .take(expected.len())
                    .eq(expected.iter().copied())
            };
            if is(&["#", "[", "cfg", "("]) {
                let end = end_of(&tokens, at + 1);
                let predicate = &tokens[at..end];
                at = end;
                if predicate.iter().any(|token| token == "test")
                    && !predicate.iter().any(|token| token == "not")
                {
                    let item = at;
                    while at < tokens.len() && tokens[at] != ";" && tokens[at] != "}" {
                        at = if tokens[at] == "{" {
                            end_of(&tokens, at) - 1
                        } else {
                            at + 1
                        };
                    }
                    if let Some(name) = tokens[item..at].iter().position(|token| token == "mod") {
                        file.tests.extend(tokens.get(item + name + 1).cloned());
                    }
                    at += 1;
                }
            } else if is(&["use"]) {
                let end = at
                    + rest
                        .iter()
                        .position(|token| token == ";")
                        .expect("`use` ends");
                let mut named = Vec::new();
                expand(&tokens[at + 1..end], &mut Vec::new(), &mut named);
                let is_public = at > 0 && (tokens[at - 1] == "pub" || tokens[at - 1] == ")");
                for (path, name) in named {
                    let Some(path) = absolute(&path, module) else {
                        continue;
                    };
                    if is_public {
                        file.exports.insert(name, path);
                    } else {
                        file.paths.push(path);
                    }
                }
                at = end + 1;
            } else if rest.get(1).is_some_and(|next| next == "::")
                && (["crate", "self", "super"].contains(&rest[0].as_str())
                    || below.contains(&rest[0]) && (at == 0 || tokens[at - 1] != "::"))
            {
                let mut path = vec![tokens[at].clone()];
                while tokens.get(at + 1).is_some_and(|token| token == "::") && tokens.len() > at + 2
                {
                    at += 2;
                    path.push(tokens[at].clone());
                }
                file.paths.extend(absolute(&path, module));
                at += 1;
            } else {
                at += 1;
            }
        }
        file
    }
}

/// Cuts a program into words, `::` and single signs, without comments and the contents of strings.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let after = |end: &str| {
            rest[1..]
                .find(end)
                .map_or(rest.len(), |at| at + 1 + end.len())
        };
        let raw = rest
            .strip_prefix('b')
            .unwrap_or(rest)
            .strip_prefix('r')
            .map(|raw| raw.trim_start_matches('#'));
        let len = if rest.starts_with("//") {
            after("\n")
        } else if rest.starts_with("/*") {
            after("*/")
        } else if raw.is_some_and(|raw| raw.starts_with('"')) {
            let fence = rest.split('"').next().unwrap_or("").matches('#').count();
            let start = rest.find('"').unwrap_or(0) + 1;
            let end = format!("\"{}", "#".repeat(fence));
            rest[start..]
                .find(&end)
                .map_or(rest.len(), |at| start + at + end.len())
        } else if first == '"' {
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            end.map_or(rest.len(), |at| at + 2)
        } else if first == '\'' {
            // A character, or else a lifetime.
            let mut chars = rest.char_indices().skip(1);
            match (chars.next(), chars.next()) {
                (Some((_, '\\')), Some((at, c))) => {
                    at + c.len_utf8()
                        + rest[at + c.len_utf8()..]
                            .find('\'')
                            .map_or(0, |end| end + 1)
                }
                (_, Some((at, '\''))) => at + 1,
                _ => 1,
            }
        } else if first.is_alphanumeric() || first == '_' {
            let len = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            tokens.push(rest[..len].to_owned());
            len
        } else if rest.starts_with("::") {
            tokens.push("::".to_owned());
            2
        } else {
            if !first.is_whitespace() {
                tokens.push(first.to_string());
            }
            first.len_utf8()
        };
        rest = &rest[len..];
    }
    tokens
}

/// Finds the token behind the one that closes the bracket at `at`.
fn end_of(tokens: &[String], at: usize) -> usize {
    let mut depth = 0;
    for (n, token) in tokens.iter().enumerate().skip(at) {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return n + 1;
        }
    }
    tokens.len()
}

/// Lists the paths of a `use`, and the name under which it is known from there on.
fn expand(tree: &[String], before: &mut Module, named: &mut Vec<(Module, String)>) {
    let depth = before.len();
    let mut at = 0;
    while at < tree.len() {
        match tree[at].as_str() {
            "{" => {
                let end = end_of(tree, at);
                expand(&tree[at + 1..end - 1], before, named);
                before.truncate(depth);
                at = end + 1;
                continue;
            }
            "::" => {}
            word => before.push(word.to_owned()),
        }
        at += 1;
        let is_last = tree.get(at).is_none_or(|next| next == "," || next == "as");
        if is_last && (before.len() > depth || tree[at - 1] == "self") {
            let end = at
                + tree[at..]
                    .iter()
                    .position(|token| token == ",")
                    .unwrap_or(tree.len() - at);
            let name = tree[end - 1].clone();
            if before.len() > 1 && before.last().is_some_and(|last| last == "self") {
                before.pop();
            }
            named.push((before.clone(), name));
            before.truncate(depth);
            at = end + 1;
        }
    }
}

/// Makes a path one from the crate's root; `None` for one into another crate.
fn absolute(path: &[String], module: &Module) -> Option<Module> {
    let mut from = module.clone();
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => from.clear(),
        "self" => {}
        "super" => {
            while rest.first().is_some_and(|word| word == "super") {
                from.pop();
                rest = &rest[1..];
            }
            return Some([from, rest.to_vec()].concat());
        }
        // A module below this one, or another crate: such a file is looked for.
        _ => return Some([from, path.to_vec()].concat()),
    }
    Some([from, rest[1..].to_vec()].concat())
}

/// The files of a crate.
#[derive(Debug)]
struct Files(BTreeMap<Module, File>);

impl Files {
    fn read(source: &Path) -> Files {
        let mut files = BTreeMap::new();
        let mut folders = vec![source.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = std::fs::read_to_string(&path).expect("text");
                    let module = module_of(
                        &path
                            .strip_prefix(source)
                            .expect("below it")
                            .to_string_lossy(),
                    );
                    files.insert(module.clone(), File::parse(&text, &module));
                }
            }
        }
        let tests: Vec<Module> = files
            .iter()
            .flat_map(|(module, file): (&Module, &File)| {
                file.tests
                    .iter()
                    .map(|test| [&module[..], std::slice::from_ref(test)].concat())
            })
            .collect();
        files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        Files(files)
    }

    /// Finds the file that a path leads to, by what other files hand on.
    fn find(&self, path: &[String], turns: u32) -> Option<&Module> {
        let (module, file) = (0..=path.len())
            .rev()
            .find_map(|n| self.0.get_key_value(&path[..n]))?;
        let handed_on = path
            .get(module.len())
            .and_then(|name| file.exports.get(name));
        match handed_on {
            Some(to) if turns > 0 => {
                self.find(&[&to[..], &path[module.len() + 1..]].concat(), turns - 1)
            }
            _ => Some(module),
        }
    }

    /// Lists the files that each file imports.
    fn imports(&self) -> impl Iterator<Item = (&Module, &Module)> {
        self.0.iter().flat_map(move |(module, file)| {
            // The root hands on what it has, and a path into another crate leads to it, or to the
            // file itself.
            file.paths
                .iter()
                .filter_map(|path| self.find(path, 8))
                .filter(move |to| *to != module && !to.is_empty())
                .map(move |to| (module, to))
        })
    }

    /// Lists the circles of more than two files.
    fn circles(&self) -> Vec<Vec<String>> {
        let mut circles = circles_of(self.imports().map(|(from, to)| (&from[..], &to[..])));
        circles.retain(|circle| circle.len() > 2);
        circles
    }

    /// Lists the circles of folders that lie beside each other: what lies in one imports what lies
    /// in the next. A folder's own `mod.rs` is a part of it.
    fn circles_of_folders(&self) -> Vec<Vec<String>> {
        let folders: BTreeSet<&[String]> = self
            .0
            .keys()
            .flat_map(|module| (1..module.len()).map(move |n| &module[..n]))
            .collect();
        let between = self.imports().filter_map(|(from, to)| {
            let common = from.iter().zip(to).take_while(|(a, b)| a == b).count();
            let (from, to) = (from.get(..=common)?, to.get(..=common)?);
            (folders.contains(from) && folders.contains(to)).then_some((from, to))
        });
        circles_of(between)
    }
}

/// Lists the circles that arrows make: each place from which a way leads back to it, with those
/// that lie on such ways.
fn circles_of<'a>(arrows: impl Iterator<Item = (&'a [String], &'a [String])>) -> Vec<Vec<String>> {
    let arrows: Vec<_> = arrows.collect();
    let names: BTreeSet<&[String]> = arrows.iter().flat_map(|(a, b)| [*a, *b]).collect();
    let names: Vec<&[String]> = names.into_iter().collect();
    let number = |name: &[String]| names.binary_search(&name).expect("it is there");
    let mut reaches = vec![vec![false; names.len()]; names.len()];
    for (from, to) in arrows {
        reaches[number(from)][number(to)] = true;
    }
    for by in 0..names.len() {
        for from in 0..names.len() {
            if reaches[from][by] {
                let further = reaches[by].clone();
                reaches[from]
                    .iter_mut()
                    .zip(further)
                    .for_each(|(reached, more)| *reached |= more);
            }
        }
    }
    let mut circles = Vec::new();
    for (one, row) in reaches.iter().enumerate() {
        let circle: Vec<usize> = (0..names.len())
            .filter(|&other| row[other] && reaches[other][one])
            .collect();
        if circle.len() > 1 && circle[0] == one {
            let names = circle.into_iter().map(|other| names[other].join("::"));
            circles.push(names.collect());
        }
    }
    circles
}
