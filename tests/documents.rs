//! What the documents say is so.

use std::collections::BTreeSet;
use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Every case that the death table names is in a list of `tests/processes`, and every case of a death is in the table.
#[test]
fn the_death_table_and_the_cases_name_each_other() {
    let table = read("docs/GUARANTEES.md");
    let modules = [
        "bad_input",
        "container",
        "crowd",
        "death",
        "fork",
        "forward",
        "gpu",
        "lifecycle",
        "notice",
        "order",
        "ticket",
    ];
    let quoted = |text: &str, mark: char| -> BTreeSet<String> { text.split(mark).map(str::to_owned).collect() };
    let is_case = |name: &str| modules.iter().any(|module| name.starts_with(&format!("{module}::")));
    let named: BTreeSet<String> = quoted(&table, '`').into_iter().filter(|name| is_case(name)).collect();
    let sources = modules.map(|module| read(&format!("tests/processes/{module}.rs"))).concat();
    let cases: BTreeSet<String> = quoted(&sources, '"').into_iter().filter(|case| is_case(case)).collect();
    assert!(named.len() >= 34, "the table names only {} cases", named.len());
    for name in &named {
        assert!(cases.contains(name), "the table names {name}, which is no case");
    }
    let of_a_death = |case: &&String| case.starts_with("death::") || case.contains("_die");
    for case in cases.iter().filter(of_a_death) {
        assert!(named.contains(case), "the table lacks {case}");
    }
}

#[test]
fn the_readme_names_the_features_and_the_toolchain() {
    let (readme, manifest) = (read("README.md"), read("Cargo.toml"));
    for feature in ["host", "cuda", "hip"] {
        assert!(manifest.contains(&format!("\n{feature} = [")), "no feature {feature}");
        assert!(readme.contains(&format!("| `{feature}`")), "the README lacks the feature {feature}");
    }
    let msrv = manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).expect("a version");
    assert!(readme.contains(msrv.trim_matches('"')), "the README names another toolchain than {msrv}");
    for document in [
        "ALLOCATORS", "DESIGN", "DOCTOR", "EMBEDDING", "FUZZING", "GUARANTEES", "HIP", "PYTORCH", "SPEED", "TESTED",
        "TOOLS", "TORTURE", "WIRE",
    ] {
        assert!(readme.contains(&format!("docs/{document}.md")), "the README lacks docs/{document}.md");
        assert!(!read(&format!("docs/{document}.md")).is_empty());
    }
}
