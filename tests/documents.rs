//! Compares the documents with the tree.

use std::collections::BTreeSet;
use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The folders of cases, and their files.
const CASES: [(&str, &[&str]); 3] = [
    (
        "processes",
        &[
            "bad_input",
            "container",
            "crowd",
            "death",
            "fork",
            "forward",
            "gpu",
            "growth",
            "lifecycle",
            "notice",
            "order",
            "read_only",
            "ticket",
        ],
    ),
    ("faults", &["backend", "hostile", "limits"]),
    (
        "security",
        &["directory", "forged", "quotas", "read_only", "users"],
    ),
];

fn between(text: &str, mark: char) -> BTreeSet<String> {
    text.split(mark).map(str::to_owned).collect()
}

/// Says whether a word is the name of a case of one of these folders.
fn is_case(folders: &[&str], word: &str) -> bool {
    let files = CASES
        .iter()
        .filter(|(folder, _)| folders.contains(folder))
        .flat_map(|(_, files)| files.iter());
    files
        .map(|file| word.strip_prefix(file))
        .any(|rest| rest.is_some_and(|rest| rest.starts_with("::")))
}

/// Finds the cases in the lists of these folders.
fn cases(folders: &[&str]) -> BTreeSet<String> {
    let files = CASES.iter().filter(|(folder, _)| folders.contains(folder));
    let paths = files.flat_map(|(folder, files)| {
        files
            .iter()
            .map(move |file| format!("tests/{folder}/{file}.rs"))
    });
    let sources: String = paths.map(|path| read(&path)).collect();
    between(&sources, '"')
        .into_iter()
        .filter(|word| is_case(folders, word))
        .collect()
}

/// Says whether the words name a file of the tree and a test that is in it.
fn names_a_test_of_a_file(words: &BTreeSet<String>) -> bool {
    let files: Vec<String> = words
        .iter()
        .filter(|word| word.ends_with(".rs"))
        .map(|path| read(path))
        .collect();
    let is_there = |name: &String| {
        files
            .iter()
            .any(|file| file.contains(&format!("fn {name}()")))
    };
    words.iter().any(|word| !word.is_empty() && is_there(word))
}

/// Every step of a block's life, of an object's and of a pull's, names files that are there, with one change of
/// folder at most.
#[test]
fn each_life_leads_from_file_to_file() {
    for title in ["One block's life", "One object's life", "One pull's life"] {
        a_life_leads_from_file_to_file(title);
    }
}

fn a_life_leads_from_file_to_file(title: &str) {
    let text = read("docs/DESIGN.md");
    let life = text
        .split("\n## ")
        .find(|part| part.starts_with(title))
        .expect("the section");
    let rows: Vec<&str> = life
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(1)
        .collect();
    assert!(rows.len() > 10, "{rows:?}");
    for row in rows {
        let places = row.rsplit('|').nth(1).expect("a column");
        let folders: Vec<&str> = places.split(" to ").collect();
        assert!(folders.len() <= 2, "more than one change of folder: {row}");
        for place in folders {
            let (folder, files) = place.split_once(':').unwrap_or(("", place));
            let folder = folder.trim().trim_matches('`');
            let files: Vec<&str> = files.split('`').skip(1).step_by(2).collect();
            assert!(!files.is_empty(), "no file: {row}");
            for file in files {
                let path = format!("{folder}{file}");
                let (first, rest) = path.split_once('/').expect("a folder");
                let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
                let there = [
                    top.join("ipc-rc/src").join(&path),
                    top.join(first).join("src").join(rest),
                ];
                assert!(
                    there.iter().any(|path| path.is_file()),
                    "{path} is not there: {row}"
                );
            }
        }
    }
}

/// Every row of the death table names its cases, every case that it names is in a list of its
/// folder, and every case of a death is in the table.
#[test]
fn the_death_table_and_the_cases_name_each_other() {
    let folders = ["processes", "faults", "security"];
    let guarantees = read("docs/GUARANTEES.md");
    let (_, table) = guarantees
        .split_once("## The death table")
        .expect("there is one");
    let table = table.split("\n## ").next().expect("a section");
    let cases = cases(&folders);
    let mut named = BTreeSet::new();
    for row in table.lines().filter(|line| line.starts_with("| ")).skip(1) {
        let names = row
            .trim_end_matches('|')
            .rsplit('|')
            .next()
            .expect("a row has columns");
        let quoted = between(names, '`');
        let names: Vec<String> = quoted
            .iter()
            .filter(|word| is_case(&folders, word))
            .cloned()
            .collect();
        assert!(
            !names.is_empty() || names_a_test_of_a_file(&quoted),
            "a row names no case: {row}"
        );
        for name in &names {
            assert!(
                cases.contains(name),
                "the table names {name}, which is no case"
            );
        }
        named.extend(names);
    }
    assert!(
        named.len() >= 45,
        "the table names only {} cases",
        named.len()
    );
    let of_a_death = |case: &&String| case.starts_with("death::") || case.contains("_die");
    for case in cases.iter().filter(of_a_death) {
        assert!(named.contains(case), "the table lacks {case}");
    }
}

/// Reads every Rust source below a folder, except what Cargo built there.
fn sources(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let texts = paths.map(|path| match path.extension() {
        _ if path.is_dir() && !path.ends_with("target") => sources(&path),
        Some(kind) if kind == "rs" => std::fs::read_to_string(&path).expect("text"),
        _ => String::new(),
    });
    texts.collect()
}

/// Every mutant says what it breaks, and names tests that exist.
#[test]
fn the_mutants_name_tests_that_exist() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["tests", "crates", "testing"];
    let sources: String = folders.map(|name| sources(&top.join(name))).concat();
    let words: BTreeSet<&str> = sources
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .collect();
    let mut mutants = 0;
    for entry in std::fs::read_dir(top.join("ci/mutants.d")).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy();
        let patch = std::fs::read_to_string(&path).expect("text");
        let (head, _) = patch
            .split_once("\n\n")
            .unwrap_or_else(|| panic!("{name} has no head"));
        let (sentence, checks) = head
            .split_once('\n')
            .unwrap_or_else(|| panic!("{name} names no check"));
        assert!(sentence.contains(' '), "{name} does not say what is broken");
        for check in checks.lines() {
            let check = check
                .strip_prefix("found by: ")
                .unwrap_or_else(|| panic!("{name}: {check}"));
            let (how, what) = check
                .split_once(" => ")
                .unwrap_or_else(|| panic!("{name}: {check}"));
            let kind = how.split(' ').next().expect("a kind");
            // The other kinds run the program, and say what it prints.
            let finder = if ["test", "loom"].contains(&kind) {
                what
            } else {
                kind
            };
            let last = finder.rsplit("::").next().expect("a name");
            assert!(
                words.contains(last),
                "{name} is found by {last}, which is nowhere"
            );
        }
        mutants += 1;
    }
    assert!(mutants >= 20, "only {mutants} mutants");
}

/// Every case of `tests/security` is in SECURITY.md, and every case that it names is one.
#[test]
fn the_attacks_and_the_cases_name_each_other() {
    let folders = ["security", "faults"];
    let cases = cases(&folders);
    let named: BTreeSet<String> = between(&read("SECURITY.md"), '`')
        .into_iter()
        .filter(|word| is_case(&folders, word))
        .collect();
    for name in &named {
        assert!(
            cases.contains(name),
            "SECURITY.md names {name}, which is no case"
        );
    }
    for case in cases.iter().filter(|case| is_case(&["security"], case)) {
        assert!(named.contains(case), "SECURITY.md lacks {case}");
    }
    assert!(
        named.len() >= 25,
        "SECURITY.md names only {} cases",
        named.len()
    );
}

/// Every word of docs/CONCEPTS.md stands there once, and names types that programs can use.
#[test]
fn the_concepts_name_public_types() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let maps: String = ["src/lib.rs", "crates/broker/src/lib.rs"]
        .map(|map| std::fs::read_to_string(top.join(map)).expect("text"))
        .concat();
    let public: BTreeSet<&str> = maps
        .split("pub use ")
        .skip(1)
        .filter_map(|rest| rest.split(';').next())
        .flat_map(|names| names.split(|c: char| !c.is_alphanumeric() && c != '_'))
        .collect();
    let concepts = read("docs/CONCEPTS.md");
    let rows = concepts
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| word |"));
    let (mut words, mut types) = (BTreeSet::new(), BTreeSet::new());
    for row in rows {
        let columns: Vec<&str> = row.trim_matches('|').split('|').collect();
        assert_eq!(columns.len(), 4, "{row}");
        for word in columns[0].split(',').map(str::trim) {
            assert!(words.insert(word), "{word} has two meanings");
        }
        for name in columns[3].split('`').skip(1).step_by(2) {
            assert!(public.contains(name), "{name} is not public");
            types.insert(name);
        }
    }
    assert!(
        words.len() >= 30 && types.len() >= 20,
        "{words:?} {types:?}"
    );
}

/// Every cell of the comparison says something, and what it says of this project names tests that
/// exist wherever there is something to test.
#[test]
fn the_comparison_names_tests_that_exist() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["tests", "crates"];
    let sources: String = folders.map(|name| sources(&top.join(name))).concat();
    let comparison = read("docs/COMPARE.md");
    let (_, table) = comparison.split_once("\n| event |").expect("the table");
    let (head, table) = table.split_once('\n').expect("rows");
    let columns = head.trim_end_matches('|').split('|').count() + 1;
    assert_eq!(columns, 8, "{head}");
    let rows: Vec<&str> = table
        .lines()
        .take_while(|line| line.starts_with('|'))
        .skip(1)
        .collect();
    assert_eq!(rows.len(), 12, "events");
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), columns, "{row}");
        for cell in &cells[1..] {
            let is_based = [
                "`",
                "#",
                "(read",
                "; read",
                "not looked at",
                "There is none.",
            ]
            .iter()
            .any(|basis| cell.contains(basis));
            let has_none = ["has no", "Not possible", "see there", "see *the"]
                .iter()
                .any(|nothing| cell.contains(nothing));
            assert!(is_based || has_none, "without a source: {cell}");
        }
        let ours = cells.last().expect("a column");
        let named: Vec<&str> = ours.split('`').skip(1).step_by(2).collect();
        let tests: Vec<&str> = named
            .into_iter()
            .filter(|name| !name.contains('/'))
            .collect();
        assert!(!tests.is_empty(), "no test: {row}");
        for name in tests {
            // Of a list of cases, or a function.
            let is_there = [format!("\"{name}\""), format!("fn {name}()")]
                .iter()
                .any(|test| sources.contains(test));
            assert!(is_there, "{name} is no test");
        }
    }
}

#[test]
fn the_readme_names_the_features_and_the_toolchain() {
    let (readme, manifest) = (read("README.md"), read("Cargo.toml"));
    for feature in ["host", "cuda", "hip"] {
        assert!(
            manifest.contains(&format!("\n{feature} = [")),
            "no feature {feature}"
        );
        assert!(
            readme.contains(&format!("| `{feature}`")),
            "the README lacks the feature {feature}"
        );
    }
    let msrv = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "))
        .expect("a version");
    assert!(
        readme.contains(msrv.trim_matches('"')),
        "the README names another toolchain than {msrv}"
    );
    for document in [
        "ALLOCATORS",
        "C",
        "COMPARE",
        "CONCEPTS",
        "DESIGN",
        "EMBEDDING",
        "GUARANTEES",
        "HIP",
        "HOSTS",
        "OBJECTS",
        "PYTHON",
        "PYTORCH",
        "SPEED",
        "TESTING",
        "TOOLS",
        "WIRE",
    ] {
        assert!(
            readme.contains(&format!("docs/{document}.md")),
            "the README lacks docs/{document}.md"
        );
        assert!(!read(&format!("docs/{document}.md")).is_empty());
    }
}

/// The facade's version is that of every manifest which does not inherit it, of the C library and of the documents.
#[test]
fn there_is_one_version() {
    let manifest = read("Cargo.toml");
    let version = manifest
        .lines()
        .find_map(|line| line.strip_prefix("version = "))
        .expect("a version")
        .trim_matches('"');
    let line = format!("version = \"{version}\"");
    for manifest in [
        "crates/gateway/Cargo.toml",
        "crates/gateway/plan/Cargo.toml",
        "crates/python/entry-points/gpu-ipc-vllm/pyproject.toml",
        "testing/hosts/Cargo.toml",
    ] {
        let text = read(manifest);
        assert!(
            text.lines().any(|one| one == line),
            "{manifest} has another version than {version}"
        );
    }
    for lock in ["Cargo.lock", "crates/gateway/Cargo.lock", "fuzz/Cargo.lock"] {
        let locked = format!("name = \"gpu-ipc-gpu-api\"\n{line}\n");
        assert!(read(lock).contains(&locked), "{lock} locks another version");
    }
    let interface = version.rsplit_once('.').expect("three numbers").0;
    for (document, names) in [
        ("CHANGELOG.md", format!("# Changelog\n\n## {version}, ")),
        ("docs/C.md", format!("libgpu_ipc.so.{interface}")),
        ("CONTRIBUTING.md", format!("git tag -a v{version} ")),
    ] {
        assert!(
            read(document).contains(&names),
            "{document} does not say {names:?}"
        );
    }
    let interface: Vec<&str> = interface.split('.').collect();
    for (name, number) in ["MAJOR", "MINOR"].into_iter().zip(interface) {
        let defined = format!("#define GPU_IPC_VERSION_{name} {number}\n");
        assert!(
            read("crates/capi/include/gpu_ipc.h").contains(&defined),
            "the C header lacks {defined:?}"
        );
    }
}

/// The map of a block's life names files that are there, and no step leads through more than two
/// folders.
#[test]
fn the_map_of_a_blocks_life_is_the_trees() {
    let design = read("docs/DESIGN.md");
    let map = design
        .split("## ")
        .find(|section| section.starts_with("One block's life"))
        .expect("the map");
    let rows: Vec<&str> = map.lines().filter(|line| line.ends_with("` |")).collect();
    assert!(rows.len() >= 12, "{} steps", rows.len());
    for row in rows {
        let place = row
            .trim_end_matches(" |")
            .rsplit("| ")
            .next()
            .expect("a last column");
        let mut folders = BTreeSet::new();
        let mut folder = "";
        for path in place.split('`').skip(1).step_by(2) {
            let name = match path.rsplit_once('/') {
                Some((named, name)) => {
                    folder = named;
                    name
                }
                None => path,
            };
            folders.insert(folder);
            let (first, rest) = folder.split_once('/').unwrap_or((folder, ""));
            let source = match first {
                "producer" | "consumer" => format!("crates/ipc-rc/src/{folder}"),
                _ => format!("crates/{first}/src/{rest}"),
            };
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join(source)
                .join(name);
            assert!(path.exists(), "{} is not there: {row}", path.display());
        }
        assert!((1..=2).contains(&folders.len()), "{folders:?}: {row}");
    }
}
