//! A process that is told lines and says lines.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use rustix::process::Signal;

use crate::WATCHDOG;
use crate::process::Process;
use crate::program::Text;

/// A program that reads lines and writes lines, in whatever language they are: a Python, or an
/// example. Killed when dropped; [`Child`](crate::Child) is this program in another role.
#[derive(Debug)]
pub struct Lines {
    process: Process,
    to: Option<ChildStdin>,
    from: Receiver<String>,
    complaint: Option<Text>,
}

impl Lines {
    /// Starts a command. Its standard error can be a pipe: [`complaint`](Lines::complaint).
    ///
    /// # Panics
    ///
    /// When it does not start.
    #[track_caller]
    pub fn start(command: &mut Command) -> Lines {
        let mut process = Process::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let to = process.0.stdin.take();
        let lines = BufReader::new(process.0.stdout.take().expect("piped")).lines();
        let (sender, from) = channel();
        std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        let complaint = process.0.stderr.take().map(Text::of);
        Lines {
            process,
            to,
            from,
            complaint,
        }
    }

    /// Writes a line to its standard input. A process that has died reads nothing, which some tests
    /// want: [`line`](Lines::line) returns `None` then.
    pub fn tell(&mut self, line: &str) {
        if let Some(to) = &mut self.to {
            let _ = writeln!(to, "{line}");
        }
    }

    /// Waits for the next line of its standard output; `None` when that has ended.
    ///
    /// # Panics
    ///
    /// When neither comes within the [`WATCHDOG`].
    #[track_caller]
    pub fn line(&mut self) -> Option<String> {
        match self.from.recv_timeout(WATCHDOG) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!("process {} neither answers nor dies", self.pid())
            }
        }
    }

    /// Returns its number.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Stops it, and waits until all of its threads stand still; [`Signal::CONT`] lets it go on.
    #[track_caller]
    pub fn stop(&self) {
        self.process.stop();
    }

    /// Kills it at once, and waits until it is gone.
    #[track_caller]
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Closes its standard input, and waits until it is gone.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        self.to = None;
        self.wait()
    }

    /// Waits until it is gone.
    ///
    /// # Panics
    ///
    /// When it does not go within the [`WATCHDOG`].
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        self.process.wait(WATCHDOG)
    }

    /// Returns what it wrote to its standard error, if that was a pipe, once it is gone.
    pub fn complaint(&mut self) -> String {
        let text = self.complaint.take().map(|text| text.end(WATCHDOG));
        String::from_utf8_lossy(&text.unwrap_or_default()).into_owned()
    }
}
