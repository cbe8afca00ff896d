//! A process that dies at one of its steps: this test's own binary, started again.

use std::path::{Path, PathBuf};

use gpu_ipc::Session;
use harness::{Child, WATCHDOG};
use serde::{Deserialize, Serialize};

use crate::injector::{Action, Injector};
use crate::own_thread;
use crate::servers::{Brokered, Server, await_nobody};
use crate::steps::{come, open};

/// Which server an agent is, or connects to.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub enum Kind {
    Session,
    Broker,
}

/// What an agent does, in which directory, and at which step it dies.
#[derive(Serialize, Deserialize)]
pub enum Role {
    Newcomer { of: Kind, dir: PathBuf, step: u32 },
    Server { of: Kind, dir: PathBuf, step: u32 },
}

/// What a server says.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Said {
    Ready,
}

/// An agent, which is told nothing but to end. Killed when dropped.
pub type Agent = Child<(), Said>;

/// Lives as an agent, and ends well when it is let go, if it has not died.
pub fn run(role: Role) {
    own_thread(move || match role {
        Role::Newcomer { of, dir, step } => match of {
            Kind::Session => join::<Session>(&dir, step),
            Kind::Broker => join::<Brokered>(&dir, step),
        },
        Role::Server { of, dir, step } => match of {
            Kind::Session => serve::<Session>(&dir, step),
            Kind::Broker => serve::<Brokered>(&dir, step),
        },
    });
}

fn join<S: Server>(dir: &Path, step: u32) {
    let injector = Injector::new().expect("it was tried before");
    let (_, gpu) = open();
    injector.arm(S::NEWCOMER, step, Action::Die);
    let came = come::<S>(&gpu, dir, WATCHDOG)
        .join()
        .expect("nothing panics");
    S::leave(came.unwrap_or_else(|error| panic!("nothing fails: {error:?}")));
}

fn serve<S: Server>(dir: &Path, step: u32) {
    let injector = Injector::new().expect("it was tried before");
    let (_, gpu) = open();
    let _server = S::open(dir, &gpu);
    injector.arm(S::SERVER, step, Action::Die);
    harness::say(&Said::Ready);
    harness::next::<()>();
    await_nobody();
}
