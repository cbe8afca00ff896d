//! A consumer process, as the demo has it: lines to its standard input, lines from its standard output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Whoever is silent for so long hangs.
pub const WATCHDOG: Duration = Duration::from_secs(120);

/// A consumer process. Killed when dropped.
#[derive(Debug)]
pub struct Consumer {
    child: Child,
    to: Option<ChildStdin>,
    from: Receiver<String>,
}

impl Consumer {
    /// Starts one.
    pub fn start(backend: &str, device: &str, socket: &std::path::Path) -> Result<Consumer, String> {
        let program = std::env::current_exe().map_err(|e| format!("the program cannot find itself: {e}"))?;
        let mut child = Command::new(program)
            .args(["demo-consumer", "--backend", backend, "--device", device, "--socket"])
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("a consumer cannot be started: {e}; raise RLIMIT_NPROC"))?;
        let to = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().ok_or("a consumer has no output")?).lines();
        let (sender, from) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Consumer { child, to, from })
    }

    /// Gives a command; its answer is read by [`answer`](Consumer::answer).
    pub fn tell(&mut self, command: &str) -> Result<(), String> {
        let to = self.to.as_mut().ok_or("the consumer was let go")?;
        writeln!(to, "{command}").map_err(|e| format!("consumer {} cannot be told anything: {e}", self.child.id()))
    }

    /// Waits for an answer and returns its numbers.
    pub fn answer(&mut self) -> Result<Vec<u64>, String> {
        let line = self.line()?;
        let numbers: Option<Vec<u64>> =
            line.strip_prefix("ok").map(|rest| rest.split_whitespace().map_while(|word| word.parse().ok()).collect());
        numbers.ok_or_else(|| format!("consumer {}: {line}", self.child.id()))
    }

    /// Waits for an answer and returns its text.
    pub fn text(&mut self) -> Result<String, String> {
        let line = self.line()?;
        let text = line.strip_prefix("ok ").map(str::to_owned);
        text.ok_or_else(|| format!("consumer {}: {line}", self.child.id()))
    }

    fn line(&mut self) -> Result<String, String> {
        let line = self.from.recv_timeout(WATCHDOG);
        line.map_err(|_| format!("consumer {} died, or did not answer in time", self.child.id()))
    }

    /// Gives a command and waits for its answer.
    pub fn ask(&mut self, command: &str) -> Result<Vec<u64>, String> {
        self.tell(command)?;
        self.answer()
    }

    /// Kills it, without letting its forked children go.
    pub fn kill(&mut self) -> Result<(), String> {
        self.child.kill().map_err(|e| format!("a consumer cannot be killed: {e}"))?;
        self.child.wait().map_err(|e| format!("a consumer cannot be waited for: {e}"))?;
        Ok(())
    }

    /// Ends a child that it forked: such a child lives as long as its input is open.
    pub fn let_children_go(&mut self) {
        self.to = None;
    }

    /// Waits until it has ended by itself.
    pub fn wait(&mut self) -> Result<(), String> {
        self.to = None;
        let status = self.child.wait().map_err(|e| format!("a consumer cannot be waited for: {e}"))?;
        if status.success() { Ok(()) } else { Err(format!("a consumer ended with {status}")) }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.to = None;
        // It may have ended already; then neither call has anything to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes bytes as hex.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Reads hex; `None` for what is none.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_is_read_as_it_was_written() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(unhex(&hex(&bytes)), Some(bytes));
        assert_eq!(unhex("0"), None);
        assert_eq!(unhex("zz"), None);
        assert_eq!(unhex("ää"), None);
    }
}
