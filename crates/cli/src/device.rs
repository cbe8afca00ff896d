//! The device that a command works on.

use gpu_ipc::backend::detect_only;
pub use gpu_ipc::backend::explain;
use gpu_ipc::{BackendKind, Error, Gpu};

use crate::choice::BackendChoice;

/// Takes the first device of the backends to try; no driver is opened that was not asked for.
///
/// # Errors
///
/// Why each of them has none, a line each.
pub fn choose(choice: BackendChoice) -> Result<Gpu, String> {
    let mut why = Vec::new();
    for kind in choice.kinds() {
        match detect_only(kind).and_then(|found| found.first(kind)) {
            Ok(gpu) => return Ok(gpu),
            Err(error) => why.push(explain(&error)),
        }
    }
    Err(why.join("\n"))
}

/// Finds a device by its identity, as another process named it.
pub fn find(kind: BackendKind, uuid: &str) -> Result<Gpu, String> {
    let found = detect_only(kind).map_err(|error| explain(&error))?;
    let gpu = found
        .gpus()
        .iter()
        .find(|gpu| gpu.uuid().to_string() == uuid);
    gpu.cloned().ok_or_else(|| match found.missing().first() {
        Some((_, error)) => explain(error),
        None => {
            let remedy = kind.no_device_remedy();
            format!("the parent's {kind} device is not visible in a child process; {remedy}")
        }
    })
}

/// Takes an error apart: what is wrong, and what to do about it where it says.
pub fn remedy_of(error: &Error) -> (String, Option<String>) {
    if let Error::Unavailable { why, remedy, .. } | Error::Unsupported { why, remedy, .. } = error {
        return (why.clone(), Some((*remedy).to_owned()));
    }
    let text = error.to_string();
    let (what, remedy) = match text.rsplit_once("; ") {
        Some((what, remedy)) => (what.to_owned(), Some(remedy.to_owned())),
        None => (text, None),
    };
    match std::error::Error::source(error) {
        Some(cause) => (format!("{what}: {}", explain(cause)), remedy),
        None => (what, remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_taken_apart_with_its_cause() {
        let unavailable = Error::Unavailable {
            backend: BackendKind::Hip,
            why: "a; b".into(),
            remedy: "c",
        };
        assert_eq!(remedy_of(&unavailable), ("a; b".into(), Some("c".into())));
        let system = Error::system("open", "close files", std::io::Error::from_raw_os_error(24));
        let (what, remedy) = remedy_of(&system);
        assert!(
            what.starts_with("open failed: ") && what.contains("os error 24"),
            "{what}"
        );
        assert_eq!(remedy.as_deref(), Some("close files"));
        assert_eq!(
            remedy_of(&Error::forked("x")).1.as_deref(),
            Some("open a new one in the child")
        );
        assert_eq!(
            explain(&system),
            "open failed; close files: Too many open files (os error 24)"
        );
    }
}
