//! This program in a process of its own: what it is told and what it answers are values of types
//! that both share.
//!
//! A value is a line of JSON, to standard input and from standard output; an answer is a `Result`,
//! whose error is the reason in words. Tests start their processes by the crate `harness`, where
//! whatever fails is a panic.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::marker::PhantomData;
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Outcome;
use crate::device::explain;

/// How long a process may take to end after it was killed. One that a driver keeps in the kernel
/// may take for ever.
const DYING: Duration = Duration::from_secs(10);

/// A process that is told values of `T`. Killed when dropped.
#[derive(Debug)]
pub struct Child<T = ()> {
    child: std::process::Child,
    to: Option<ChildStdin>,
    from: Receiver<String>,
    /// A child that is silent for longer counts as hung.
    patience: Duration,
    told: PhantomData<fn(T)>,
}

/// Why there was no line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Silence {
    /// The output ended.
    Ended,
    /// Nothing came in time.
    Hangs,
}

impl<T> Child<T> {
    /// Starts this program with arguments.
    pub fn start(
        args: impl IntoIterator<Item = impl AsRef<OsStr>>,
        patience: Duration,
    ) -> Result<Child<T>, String> {
        Child::start_into(args, patience, Stdio::inherit())
    }

    /// As [`start`](Child::start), with a standard error of its own.
    pub fn start_into(
        args: impl IntoIterator<Item = impl AsRef<OsStr>>,
        patience: Duration,
        stderr: Stdio,
    ) -> Result<Child<T>, String> {
        let program =
            std::env::current_exe().map_err(|e| format!("the program cannot find itself: {e}"))?;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(|e| format!("a process cannot be started: {e}"))?;
        let to = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().ok_or("the process has no output")?).lines();
        let (sender, from) = channel();
        let hand_on = move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        };
        thread::start("gpu-ipc-lines", hand_on).map_err(|e| explain(&e))?;
        Ok(Child {
            child,
            to,
            from,
            patience,
            told: PhantomData,
        })
    }

    /// Returns its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells it something; its answer is read by [`answer`](Child::answer).
    pub fn tell(&mut self, told: &T) -> Result<(), String>
    where
        T: Serialize,
    {
        let to = self.to.as_mut().ok_or("the process was let go")?;
        let line = encode(told)?;
        writeln!(to, "{line}")
            .map_err(|e| format!("process {} cannot be told anything: {e}", self.child.id()))
    }

    /// Waits for a line.
    pub fn line(&mut self) -> Result<String, Silence> {
        self.from
            .recv_timeout(self.patience)
            .map_err(|silence| match silence {
                RecvTimeoutError::Disconnected => Silence::Ended,
                RecvTimeoutError::Timeout => Silence::Hangs,
            })
    }

    /// Waits for an answer.
    pub fn answer<A: DeserializeOwned>(&mut self) -> Result<A, String> {
        match self.line() {
            Ok(line) => decode::<Result<A, String>>(&line)
                .map_err(|e| format!("process {} answered {line:?}: {e}", self.child.id()))?,
            Err(silence) => Err(format!(
                "process {} {}",
                self.child.id(),
                self.describe(silence)
            )),
        }
    }

    /// Tells it something and waits for its answer.
    pub fn ask<A: DeserializeOwned>(&mut self, told: &T) -> Result<A, String>
    where
        T: Serialize,
    {
        self.tell(told)?;
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
        self.child
            .kill()
            .map_err(|e| format!("process {} cannot be killed: {e}", self.child.id()))?;
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
        if status.success() {
            Ok(())
        } else {
            Err(format!("process {} ended with {status}", self.child.id()))
        }
    }

    fn reap(&mut self, limit: Duration) -> Result<ExitStatus, String> {
        let id = self.child.id();
        poll(limit, || self.child.try_wait())
            .map_err(|e| format!("process {id} cannot be waited for: {e}"))?
            .ok_or_else(|| format!("process {id} did not end within {} s", limit.as_secs()))
    }
}

impl<T> Drop for Child<T> {
    fn drop(&mut self) {
        self.close_input();
        // It may have ended already; then neither call has anything to do. One that cannot be
        // killed is left behind.
        let _ = self.kill();
    }
}

/// Asks again and again until there is an answer or the time is over.
pub fn poll<T>(
    limit: Duration,
    mut ask: impl FnMut() -> io::Result<Option<T>>,
) -> io::Result<Option<T>> {
    let start = Instant::now();
    loop {
        let answer = ask()?;
        if answer.is_some() || start.elapsed() > limit {
            return Ok(answer);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Waits for the next thing that this process is told; nothing once its parent has let it go.
pub fn next<T: DeserializeOwned>() -> Result<Option<T>, String> {
    let mut line = String::new();
    match io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(|e| e.to_string())?
    {
        0 => Ok(None),
        _ => decode(&line)
            .map(Some)
            .map_err(|e| format!("not understood: {}: {e}", line.trim_end())),
    }
}

/// Answers the parent.
pub fn reply<A: Serialize>(answer: &A) -> Result<(), String> {
    say(&Ok::<&A, ()>(answer))
}

/// Writes a value to the parent.
fn say(value: &impl Serialize) -> Result<(), String> {
    let (line, mut out) = (encode(value)?, io::stdout().lock());
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(|e| format!("the parent does not listen: {e}"))
}

fn encode(value: &impl Serialize) -> Result<String, String> {
    serde_json::to_string(value).map_err(|e| e.to_string())
}

/// Reads a value from a line.
pub fn decode<A: DeserializeOwned>(line: &str) -> Result<A, String> {
    serde_json::from_str(line).map_err(|e| e.to_string())
}

/// Lives as a child of this program: until its work is done or its parent dies, which it tells why
/// it cannot go on.
pub fn live<E: Into<String>>(work: impl FnOnce() -> Result<(), E>) -> Outcome {
    die_with_parent();
    match work() {
        Ok(()) => Outcome::Good,
        Err(why) => {
            let _ = say(&Err::<(), String>(why.into()));
            Outcome::Finding
        }
    }
}

/// Has the kernel kill this process when its parent dies, so that nobody is left over.
pub fn die_with_parent() {
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}
