//! AMD's own runtime, whichever is here or none: what it says of itself without a device.
//!
//! `ci/test/rocm-runtimes` runs this one program over several of them. With `GPU_IPC_EXPECT_HIP` set, to
//! `none` or to the beginning of a version, anything else that is found fails; without it, the case
//! is named after what is found.

use backend_hip::{Hip, HipBackend, Inspection};
use gpu_api::Error;
use gpu_api::groups::*;
use libtest_mimic::{Arguments, Failed, Trial};

/// Functions that are in every runtime from the version on; what is in none of the rows is in all.
const SINCE: &[(u32, u32, &str)] = &[
    (5, 3, "hipStreamGetDevice"),
    (5, 7, "hipLaunchHostFunc"),
    (7, 0, "hipMemGetHandleForAddressRange"),
    (7, 1, "hipStreamGetId"),
];

fn main() {
    let expected = std::env::var("GPU_IPC_EXPECT_HIP").ok();
    let found = Hip::inspect();
    let name = match &found {
        Ok(found) => found.version.to_string(),
        Err(_) => "none".to_owned(),
    };
    if let Ok(found) = &found {
        eprintln!("HIP {}: lacks {:?}", found.version, found.missing);
    }
    let case = Trial::test(format!("runtime_{name}"), move || {
        match expected.as_deref() {
            Some(expected) if !name.starts_with(expected) => {
                return Err(format!("expected {expected}, found {name}: {found:?}").into());
            }
            _ => {}
        }
        match found {
            Ok(found) => present(&found),
            Err(error) => absent(&error),
        }
    });
    libtest_mimic::run(&Arguments::from_args(), vec![case]).exit();
}

fn present(found: &Inspection) -> Result<(), Failed> {
    let version = found.version;
    let may_lack: Vec<&str> = SINCE
        .iter()
        .filter(|(major, minor, _)| !version.at_least(*major, *minor))
        .map(|(.., name)| *name)
        .collect();
    let lacking: Vec<&&str> = found
        .missing
        .iter()
        .filter(|name| !may_lack.contains(name))
        .collect();
    if !lacking.is_empty() {
        return Err(format!("{version} lacks {lacking:?}").into());
    }
    match HipBackend::load() {
        // A machine with a GPU.
        Ok(hip) if hip.device_count()? > 0 => Ok(()),
        Err(Error::Unavailable { why, remedy, .. }) => {
            eprintln!("{why}; {remedy}");
            let told = why.contains(&version.to_string())
                && (why.contains("gave 100 (") || why.contains("gave 101 ("));
            if told && remedy.contains("/dev/kfd") {
                Ok(())
            } else {
                Err(format!("{why}; {remedy}").into())
            }
        }
        other => Err(format!("{other:?}").into()),
    }
}

fn absent(error: &Error) -> Result<(), Failed> {
    eprintln!("{error}");
    match error {
        Error::Unavailable { why, .. } if why.contains("libamdhip64") => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}
