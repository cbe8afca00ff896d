//! The header is what the source says, and says everything.

use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn header() -> PathBuf {
    root().join("include/gpu_ipc.h")
}

fn written() -> String {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("a good configuration");
    let mut text = Vec::new();
    cbindgen::generate_with_config(root(), config).expect("the source can be read").write(&mut text);
    // Rust's heading of what a caller promises, as a line of the comment.
    String::from_utf8(text).expect("text").replace("// # Safety\n//\n// ", "// Caller: ")
}

/// `GPU_IPC_WRITE_HEADER=1` writes it anew.
#[test]
fn the_header_is_the_one_that_is_checked_in() {
    let written = written();
    if std::env::var_os("GPU_IPC_WRITE_HEADER").is_some() {
        std::fs::write(header(), &written).expect("the header can be written");
    }
    let checked_in = std::fs::read_to_string(header()).expect("a header");
    let differs = written.lines().zip(checked_in.lines()).find(|(written, there)| written != there);
    assert!(
        written == checked_in,
        "the header differs from the source, first at {differs:?}; run this test with GPU_IPC_WRITE_HEADER=1"
    );
}

/// Finds the declarations of functions, each with the comment above.
fn functions(header: &str) -> Vec<(String, String)> {
    let paragraphs =
        header.split("\n\n").filter(|paragraph| paragraph.contains(");") && !paragraph.contains("typedef"));
    let split = |paragraph: &str| {
        let (comment, code): (Vec<&str>, Vec<&str>) = paragraph.lines().partition(|line| line.starts_with("//"));
        (code.join(" "), comment.join("\n"))
    };
    paragraphs.map(split).collect()
}

#[test]
fn every_function_says_what_it_keeps_where_it_may_be_called_whether_it_blocks_and_its_errors() {
    let header = std::fs::read_to_string(header()).expect("a header");
    let functions = functions(&header);
    assert!(functions.len() > 80, "only {} functions were found", functions.len());
    for (code, comment) in &functions {
        for word in ["Keeps: ", "Thread: ", "Blocks: ", "Errors: "] {
            assert!(comment.replace('\n', " ").contains(word), "{code}: nothing on {word}");
        }
    }
}
