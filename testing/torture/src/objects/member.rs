//! A process of a run, as the one that torments it sees it.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use gpu_ipc::Gpu;
use rustix::process::{Pid, Signal, kill_process};

use super::seat::Role;
use crate::options::Control;
use harness::program::start_unwatched;

/// A process that writes or reads.
pub struct Member {
    pub child: Child,
    pub role: Role,
    pub serial: u64,
    pub slot: usize,
    /// When it goes on.
    pub stopped: Option<Instant>,
    /// It was killed by us.
    pub killed: bool,
    /// The last beat that was seen, and when.
    pub seen: (u64, Instant),
}

impl Member {
    /// Starts one, with its place among the others and the beats that its place has counted.
    pub fn start(
        (gpu, dir, control): (&Gpu, &Path, Option<Control>),
        role: Role,
        (serial, seed, slot): (u64, u64, usize),
        beats: u64,
    ) -> Result<Member, String> {
        let program =
            std::env::current_exe().map_err(|e| format!("the program cannot find itself: {e}"))?;
        let mut command = Command::new(program);
        let (role_name, device) = (format!("{role:?}").to_lowercase(), gpu.uuid().to_string());
        command.args(["object", "--role", &role_name, "--device", &device]);
        command.args(["--backend", gpu.kind().name()]);
        for (name, number) in [("serial", serial), ("seed", seed), ("slot", slot as u64)] {
            command.args([&format!("--{name}"), &number.to_string()]);
        }
        if control == Some(Control::EarlySeal) {
            command.args(["--control", "early-seal"]);
        }
        command.arg("--dir").arg(dir);
        let child = start_unwatched(command.stdin(Stdio::null()).stdout(Stdio::null()))?;
        Ok(Member {
            child,
            role,
            serial,
            slot,
            stopped: None,
            killed: false,
            seen: (beats, Instant::now()),
        })
    }

    /// Sends it a signal; one that has just ended needs none.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }
}
