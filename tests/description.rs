//! Every file and test that `docs/DESCRIPTION.md` names is there.

use std::path::Path;

const FOLDERS: [(&str, &str); 5] = [
    ("al/", "crates/allocators/"),
    ("rc/", "crates/ipc-rc/"),
    ("tr/", "crates/transport/"),
    ("to/", "crates/torch/"),
    ("ga/", "crates/gpu-api/"),
];

fn full(path: &str) -> String {
    let long = FOLDERS
        .iter()
        .find_map(|(short, long)| Some(format!("{long}{}", path.strip_prefix(short)?)));
    long.unwrap_or_else(|| path.to_owned())
}

#[test]
fn every_file_and_test_of_the_description_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("docs/DESCRIPTION.md")).expect("the document");
    let (mut files, mut tests, mut missing) = (0, 0, Vec::new());
    for line in text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| behaviour"))
    {
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        assert_eq!(cells.len(), 3, "{line}");
        assert!(cells[2].contains('`'), "a row names what shows it: {line}");
        for word in line.split('`').skip(1).step_by(2) {
            let (path, test) = match word.split_once(".rs::") {
                Some((path, test)) => (format!("{path}.rs"), Some(test)),
                None => (word.to_owned(), None),
            };
            let is_path = path.contains('/') && !path.contains(' ');
            if !is_path {
                continue;
            }
            let path = full(&path);
            files += 1;
            let Ok(is_file) = root.join(&path).metadata().map(|found| found.is_file()) else {
                missing.push(path);
                continue;
            };
            if let Some(test) = test {
                assert!(is_file, "{path} is a folder");
                tests += 1;
                let source = std::fs::read_to_string(root.join(&path)).expect("it is there");
                if !source.contains(&format!("fn {test}(")) {
                    missing.push(format!("{path}::{test}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "not there: {missing:#?}");
    assert!(
        files > 90 && tests > 60,
        "{files} files and {tests} tests were looked for"
    );
}
