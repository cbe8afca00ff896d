//! This program in another role, as the test that started it sees it.

use std::marker::PhantomData;
use std::process::{Command, ExitStatus};

use rustix::process::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::lines::Lines;
use crate::program::this_program;
use crate::role::{ROLE, TESTS, decode, encode};

/// A process that is told values of `T` and says values of `A`. Killed when dropped.
///
/// It hears nothing more, and ends if it only waits for commands, when the process of the tests
/// ends in any way.
#[derive(Debug)]
pub struct Child<T, A> {
    lines: Lines,
    speaks: PhantomData<fn(T) -> A>,
}

impl<T: Serialize, A: DeserializeOwned> Child<T, A> {
    /// Starts this program in a role.
    #[track_caller]
    pub fn start(role: &impl Serialize) -> Child<T, A> {
        Self::run(this_program(), role)
    }

    /// Starts a command that ends as this program, in a role. Its standard error can be a pipe:
    /// [`complaint`](Child::complaint).
    ///
    /// # Panics
    ///
    /// When it does not start.
    #[track_caller]
    pub fn run(mut command: Command, role: &impl Serialize) -> Child<T, A> {
        command
            .env(ROLE, encode(role))
            .env(TESTS, std::process::id().to_string());
        Child {
            lines: Lines::start(&mut command),
            speaks: PhantomData,
        }
    }

    /// Tells it something. One that has died hears nothing, which some tests want:
    /// [`answer`](Child::answer) says so.
    pub fn tell(&mut self, told: &T) {
        self.lines.tell(&encode(told));
    }

    /// Waits for what it says next; `None` when it died instead.
    ///
    /// # Panics
    ///
    /// When it does neither within the [`WATCHDOG`](crate::WATCHDOG), or says something that is
    /// unknown here.
    #[track_caller]
    pub fn answer(&mut self) -> Option<A> {
        let line = self.lines.line()?;
        Some(decode(&line).unwrap_or_else(|error| panic!("no answer to this program: {error}")))
    }

    /// Tells it something and waits for its answer.
    ///
    /// # Panics
    ///
    /// When it dies at that.
    #[track_caller]
    pub fn ask(&mut self, told: &T) -> A {
        self.tell(told);
        self.answer()
            .unwrap_or_else(|| panic!("process {} died at {}", self.pid(), encode(told)))
    }

    /// Returns its number.
    pub fn pid(&self) -> u32 {
        self.lines.pid()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.lines.signal(signal);
    }

    /// Stops it, and waits until all of its threads stand still; [`Signal::CONT`] lets it go on.
    #[track_caller]
    pub fn stop(&self) {
        self.lines.stop();
    }

    /// Kills it at once, and waits until it is gone.
    #[track_caller]
    pub fn kill(&mut self) {
        self.lines.kill();
    }

    /// Lets it go: it hears that nothing more comes. Returns how it ends.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        self.lines.end()
    }

    /// Waits until it is gone.
    ///
    /// # Panics
    ///
    /// When it does not go within the [`WATCHDOG`](crate::WATCHDOG).
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        self.lines.wait()
    }

    /// Returns what it wrote to its standard error, if that was a pipe, once it is gone.
    pub fn complaint(&mut self) -> String {
        self.lines.complaint()
    }
}
