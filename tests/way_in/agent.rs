//! A process that dies at one of its steps: this test's own binary, started again.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use gpu_ipc::Session;

use crate::injector::{Action, Injector};
use crate::own_thread;
use crate::steps::{NEWCOMER, SESSION, come, open};
use crate::{WATCHDOG, wait_until};

/// Names what an agent does, and at which step it dies.
pub const ROLE: &str = "GPU_IPC_TEST_WAY_IN";

/// An agent. Killed when dropped.
pub struct Agent {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Agent {
    /// Starts one: `newcomer PATH STEP` or `session PATH STEP`.
    pub fn start(role: &str) -> Agent {
        let mut command = Command::new(std::env::current_exe().expect("a test binary has a path"));
        let command = command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process can be started");
        let to = child.stdin.take();
        let from = BufReader::new(child.stdout.take().expect("piped"));
        Agent { child, to, from }
    }

    /// Hears the next line; `None` once it is gone.
    pub fn hear(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.from.read_line(&mut line).expect("a pipe");
        (read != 0).then(|| line.trim_end().to_owned())
    }

    /// Tells it to end, and waits until it has.
    pub fn end(mut self) -> ExitStatus {
        self.to = None;
        self.child.wait().expect("it is a child of ours")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lives as an agent: says `ready`, and ends well when its input ends, if it has not died.
pub fn run(role: &str) {
    let words: Vec<String> = role.split(' ').map(str::to_owned).collect();
    own_thread(move || {
        let [role, path, step] = &words[..] else { panic!("{words:?} is no role") };
        let step: u32 = step.parse().expect("a number");
        let injector = Injector::new().expect("it was tried before");
        let (_, gpu) = open();
        if role == "newcomer" {
            injector.arm(NEWCOMER, step, Action::Die);
            let came = come(&gpu, path.as_ref(), WATCHDOG).join().expect("nothing panics");
            let participant = came.expect("nothing fails");
            participant.close(Some(WATCHDOG)).expect("its goodbye is heard");
            return;
        }
        let builder = Session::builder(gpu).socket(path).quarantine(Duration::ZERO);
        let session = builder.open().expect("a session");
        injector.arm(SESSION, step, Action::Die);
        println!("ready");
        std::io::stdout().flush().expect("a pipe");
        let _ = std::io::stdin().read_line(&mut String::new());
        wait_until("who came to go", || {
            if session.participants().is_empty() { Ok(()) } else { Err("it is there".to_owned()) }
        });
    });
}
