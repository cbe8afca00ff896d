//! `gpu-ipc gateway`, `gpu-ipc pull` and `gpu-ipc objects --all-hosts`: other hosts.
//!
//! They are commands of `gpu-ipc-gateway`, a program of its own in a workspace of its own, because
//! its network brings about 300 packages that nothing else here needs. This program becomes that
//! one, which then has its place, its terminal and its signals.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args as Arguments;

use crate::{Outcome, output};

/// The program's name.
const PROGRAM: &str = "gpu-ipc-gateway";

/// What is handed to the gateway's program as it is.
#[derive(Arguments, Debug)]
pub struct HandedOn {
    /// Arguments of `gpu-ipc-gateway`
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    pub arguments: Vec<OsString>,
}

/// Runs a gateway, or with `--status` says what those of this host do.
pub fn run(options: &HandedOn) -> Outcome {
    let (status, others): (Vec<_>, Vec<_>) = options
        .arguments
        .iter()
        .cloned()
        .partition(|one| one == "--status");
    become_it(if status.is_empty() { "run" } else { "status" }, &others)
}

/// Gets an object from another host.
pub fn pull(options: &HandedOn) -> Outcome {
    become_it("pull", &options.arguments)
}

/// Lists the objects of all hosts.
pub fn all_hosts(dir: Option<&Path>, json: bool) -> Outcome {
    let mut arguments: Vec<OsString> = vec!["--all-hosts".into()];
    if let Some(dir) = dir {
        arguments.extend(["--broker".into(), dir.into()]);
    }
    if json {
        arguments.push("--json".into());
    }
    become_it("objects", &arguments)
}

/// Returns only if it cannot be started.
fn become_it(command: &str, arguments: &[OsString]) -> Outcome {
    let beside = std::env::current_exe()
        .ok()
        .and_then(|own| Some(own.parent()?.join(PROGRAM)));
    let program = beside
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from(PROGRAM));
    let error = Command::new(&program).arg(command).args(arguments).exec();
    let why = if error.kind() == ErrorKind::NotFound {
        format!(
            "{PROGRAM} is neither beside this program nor on the path: it is built by itself, in the sources of \
             gpu-ipc, with `cargo install --path crates/gateway` (docs/HOSTS.md)"
        )
    } else {
        format!("{} cannot be started: {error}", program.display())
    };
    output::fail(&why, false, Outcome::Unavailable)
}
