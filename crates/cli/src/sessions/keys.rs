//! The keys of `top`, read from the terminal as bytes.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A key that `top` knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Key {
    /// The arrow, or k.
    Up,
    /// The arrow, or j.
    Down,
    /// p, or the space bar.
    Pause,
    /// q, the escape key, or an interrupt.
    Quit,
}

/// The keyboard: standard input, or the terminal itself where that is something else.
#[derive(Debug)]
pub struct Keyboard(OwnedFd);

impl Keyboard {
    /// Finds it.
    ///
    /// # Errors
    ///
    /// When the process has no terminal.
    pub fn open() -> io::Result<Keyboard> {
        let stdin = io::stdin();
        let fd = if stdin.is_terminal() {
            stdin.as_fd().try_clone_to_owned()?
        } else {
            File::open("/dev/tty")?.into()
        };
        Ok(Keyboard(fd))
    }

    /// Waits for keys, at most for a time; returns those that are known.
    ///
    /// # Errors
    ///
    /// When the terminal is gone.
    pub fn wait(&self, time: Duration) -> io::Result<Vec<Key>> {
        let time = Timespec {
            tv_sec: time.as_secs().cast_signed(),
            tv_nsec: time.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&time)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let mut bytes = [0; 64];
        match rustix::io::read(&self.0, &mut bytes)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => Ok(keys(&bytes[..read])),
        }
    }
}

/// Reads keys from what a terminal sent at once. An escape sequence begins as the escape key does,
/// but goes on.
fn keys(mut bytes: &[u8]) -> Vec<Key> {
    let mut found = Vec::new();
    while let Some((&first, rest)) = bytes.split_first() {
        bytes = rest;
        found.extend(match first {
            b'q' | 0x03 => Some(Key::Quit),
            b'k' => Some(Key::Up),
            b'j' => Some(Key::Down),
            b'p' | b' ' => Some(Key::Pause),
            0x1b if !matches!(rest.first(), Some(b'[' | b'O')) => Some(Key::Quit),
            0x1b => {
                // Parameters, and then the letter that ends the sequence.
                let end = rest[1..]
                    .iter()
                    .position(|byte| (0x40..=0x7e).contains(byte));
                let end = end.map_or(rest.len(), |at| at + 2);
                bytes = &rest[end..];
                match rest[end - 1] {
                    b'A' => Some(Key::Up),
                    b'B' => Some(Key::Down),
                    _ => None,
                }
            }
            _ => None,
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_and_the_escape_key_are_told_apart() {
        for (bytes, expected) in [
            (&b"\x1b[A\x1b[B"[..], &[Key::Up, Key::Down][..]),
            (b"\x1bOA", &[Key::Up]),
            (b"\x1b", &[Key::Quit]),
            (b"\x1b[1;5C\x1b[5~p", &[Key::Pause]),
            (b"\x1b[", &[]),
            (b"jk \x03x", &[Key::Down, Key::Up, Key::Pause, Key::Quit]),
        ] {
            assert_eq!(keys(bytes), expected, "{bytes:?}");
        }
    }
}
