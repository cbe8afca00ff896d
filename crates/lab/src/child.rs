//! This program in a process of its own: lines to its standard input, lines from its standard output.
//!
//! An answer is `ok` and numbers, or a word, or `error` and the reason.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::Outcome;

/// How long a process may take to end after it was killed. One that a driver keeps in the kernel may take for ever.
const DYING: Duration = Duration::from_secs(10);

/// A process. Killed when dropped.
#[derive(Debug)]
pub struct Child {
    child: std::process::Child,
    to: Option<ChildStdin>,
    from: Receiver<String>,
    /// A child that is silent for longer counts as hung.
    patience: Duration,
}

/// Why there was no line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Silence {
    /// The output ended.
    Ended,
    /// Nothing came in time.
    Hangs,
}

impl Child {
    /// Starts this program with arguments.
    pub fn start(args: impl IntoIterator<Item = impl AsRef<OsStr>>, patience: Duration) -> Result<Child, String> {
        let program = std::env::current_exe().map_err(|e| format!("the program cannot find itself: {e}"))?;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("a process cannot be started: {e}"))?;
        let to = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().ok_or("the process has no output")?).lines();
        let (sender, from) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Child { child, to, from, patience })
    }

    /// Returns its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Gives a command; its answer is read by [`answer`](Child::answer).
    pub fn tell(&mut self, command: &str) -> Result<(), String> {
        let to = self.to.as_mut().ok_or("the process was let go")?;
        writeln!(to, "{command}").map_err(|e| format!("process {} cannot be told anything: {e}", self.child.id()))
    }

    /// Waits for a line.
    pub fn line(&mut self) -> Result<String, Silence> {
        self.from.recv_timeout(self.patience).map_err(|silence| match silence {
            RecvTimeoutError::Disconnected => Silence::Ended,
            RecvTimeoutError::Timeout => Silence::Hangs,
        })
    }

    /// Waits for an answer and returns its numbers.
    pub fn answer(&mut self) -> Result<Vec<u64>, String> {
        let line = match self.line() {
            Ok(line) => line,
            Err(silence) => return Err(format!("process {} {}", self.child.id(), self.describe(silence))),
        };
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("ok", numbers) => {
                let numbers: Result<Vec<u64>, _> = numbers.split_whitespace().map(str::parse).collect();
                numbers.map_err(|e| format!("process {} answered {line:?}: {e}", self.child.id()))
            }
            ("error", why) => Err(why.to_owned()),
            _ => Err(format!("process {} answered {line:?}", self.child.id())),
        }
    }

    /// Waits for an answer and returns its only word.
    pub fn word(&mut self) -> Result<String, String> {
        match self.line() {
            Ok(line) => match line.split_once(' ') {
                Some(("ok", word)) => Ok(word.to_owned()),
                Some(("error", why)) => Err(why.to_owned()),
                _ => Err(format!("process {} answered {line:?}", self.child.id())),
            },
            Err(silence) => Err(format!("process {} {}", self.child.id(), self.describe(silence))),
        }
    }

    /// Gives a command and waits for its answer.
    pub fn ask(&mut self, command: &str) -> Result<Vec<u64>, String> {
        self.tell(command)?;
        self.answer()
    }

    /// Says what a silence means: how the process ended, or that it hangs, and then it is killed.
    pub fn describe(&mut self, silence: Silence) -> String {
        let seconds = self.patience.as_secs();
        if silence == Silence::Hangs {
            return match self.kill() {
                Ok(()) => format!("was silent for {seconds} s and was killed"),
                Err(why) => format!("was silent for {seconds} s; {why}"),
            };
        }
        match self.reap(DYING) {
            Ok(status) => match (status.signal(), status.code()) {
                (Some(signal), _) => format!("was killed by signal {signal}"),
                (None, code) => format!("ended with status {}", code.unwrap_or(-1)),
            },
            Err(why) => why,
        }
    }

    /// Kills it, without letting its forked children go.
    pub fn kill(&mut self) -> Result<(), String> {
        self.child.kill().map_err(|e| format!("process {} cannot be killed: {e}", self.child.id()))?;
        self.reap(DYING).map(drop)
    }

    /// Closes its input: a child that it forked lives as long as that is open.
    pub fn close_input(&mut self) {
        self.to = None;
    }

    /// Waits until it has ended by itself.
    pub fn wait(&mut self) -> Result<(), String> {
        self.close_input();
        let status = self.reap(self.patience)?;
        if status.success() { Ok(()) } else { Err(format!("process {} ended with {status}", self.child.id())) }
    }

    fn reap(&mut self, limit: Duration) -> Result<ExitStatus, String> {
        let id = self.child.id();
        poll(limit, || self.child.try_wait())
            .map_err(|e| format!("process {id} cannot be waited for: {e}"))?
            .ok_or_else(|| format!("process {id} did not end within {} s", limit.as_secs()))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.close_input();
        // It may have ended already; then neither call has anything to do. One that cannot be killed is left behind.
        let _ = self.kill();
    }
}

/// Asks again and again until there is an answer or the time is over.
pub fn poll<T>(limit: Duration, mut ask: impl FnMut() -> io::Result<Option<T>>) -> io::Result<Option<T>> {
    let start = Instant::now();
    loop {
        let answer = ask()?;
        if answer.is_some() || start.elapsed() > limit {
            return Ok(answer);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Answers the parent with numbers.
pub fn reply(numbers: &[u64]) -> Result<(), String> {
    let words: String = numbers.iter().map(|number| format!(" {number}")).collect();
    line(&format!("ok{words}"))
}

/// Answers the parent with the reason why there is no answer: in one line, whatever a driver says.
fn refuse(why: &str) -> Result<(), String> {
    line(&format!("error {}", why.replace('\n', " ")))
}

/// Writes a line to the parent.
pub fn line(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|e| format!("the parent does not listen: {e}"))
}

/// Lives as a child of this program: until its work is done or its parent dies, which it tells why it cannot go on.
pub fn live(work: impl FnOnce() -> Result<(), String>) -> Outcome {
    die_with_parent();
    match work() {
        Ok(()) => Outcome::Good,
        Err(why) => {
            let _ = refuse(&why);
            Outcome::Finding
        }
    }
}

/// Has the kernel kill this process when its parent dies, so that nobody is left over.
pub fn die_with_parent() {
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}
