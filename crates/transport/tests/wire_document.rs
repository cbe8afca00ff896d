//! `docs/WIRE.md` is true: its tables are those of the modules that encode, which their own tests
//! compare with bytes, and its numbers of the counter file are the file's.

use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The rows of a module header's tables.
fn rows(module: &str) -> Vec<String> {
    read(module)
        .lines()
        .filter_map(|line| line.strip_prefix("//! |"))
        .map(|row| format!("|{row}"))
        .collect()
}

#[test]
fn every_row_of_the_modules_is_a_row_of_the_document() {
    let document = read("../../docs/WIRE.md");
    let lines: Vec<&str> = document.lines().collect();
    for (module, least) in [("src/wire/descriptor.rs", 22), ("src/wire/message.rs", 18)] {
        let rows = rows(module);
        assert!(rows.len() >= least, "{module} has only {} rows", rows.len());
        for row in rows {
            assert!(
                lines.contains(&row.as_str()),
                "docs/WIRE.md lacks a row of {module}: {row}"
            );
        }
    }
}

#[test]
fn the_document_has_no_row_of_a_message_or_field_that_is_not_there() {
    let known: Vec<String> = [rows("src/wire/descriptor.rs"), rows("src/wire/message.rs")].concat();
    let document = read("../../docs/WIRE.md");
    let section = |from: &str, to: &str| {
        let start = document
            .find(from)
            .unwrap_or_else(|| panic!("no section {from}"));
        let rest = &document[start..];
        rest[..rest.find(to).unwrap_or(rest.len())].to_owned()
    };
    for (from, to) in [
        ("## The descriptor", "## The keyed checksum"),
        ("## Control messages", "```mermaid"),
    ] {
        for row in section(from, to)
            .lines()
            .filter(|line| line.starts_with('|'))
        {
            assert!(
                known.iter().any(|known| known == row),
                "docs/WIRE.md has a row that the code does not: {row}"
            );
        }
    }
}

#[test]
fn the_numbers_of_the_counter_file_are_the_codes() {
    let (document, code) = (
        read("../../docs/WIRE.md"),
        read("src/shared/counter_file.rs"),
    );
    for (constant, text) in [
        ("pub const GROUP: u32 = 64;", "each group of 64 slots"),
        ("pub const TIMELINES: u32 = 512;", "512 timeline words"),
        (
            "pub const FIRST_SLOTS: u32 = 8_192;",
            "The first has 8,192 slots",
        ),
        ("pub const MOST_SLOTS: u32 = 65_536;", "up to 65,536"),
        ("b\"GIPCcnt1\"", "`GIPCcnt1`"),
    ] {
        assert!(code.contains(constant), "counter_file.rs lacks {constant}");
        assert!(document.contains(text), "docs/WIRE.md lacks {text}");
    }
}
