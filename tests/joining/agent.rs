//! A process that dies at one of its steps: this test's own binary, started again.

use std::path::PathBuf;
use std::time::Duration;

use gpu_ipc::Session;
use harness::{Child, WATCHDOG};
use serde::{Deserialize, Serialize};

use crate::injector::{Action, Injector};
use crate::steps::{NEWCOMER, SESSION, come, open};
use crate::{own_thread, wait_until};

/// What an agent does, at which socket, and at which step it dies.
#[derive(Serialize, Deserialize)]
pub enum Role {
    Newcomer { socket: PathBuf, step: u32 },
    Session { socket: PathBuf, step: u32 },
}

/// What a session says.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Said {
    Ready,
}

/// An agent, which is told nothing but to end. Killed when dropped.
pub type Agent = Child<(), Said>;

/// Lives as an agent, and ends well when it is let go, if it has not died.
pub fn run(role: Role) {
    own_thread(move || {
        let injector = Injector::new().expect("it was tried before");
        let (_, gpu) = open();
        match role {
            Role::Newcomer { socket, step } => {
                injector.arm(NEWCOMER, step, Action::Die);
                let came = come(&gpu, &socket, WATCHDOG)
                    .join()
                    .expect("nothing panics");
                let participant = came.expect("nothing fails");
                participant
                    .close(Some(WATCHDOG))
                    .expect("its goodbye is heard");
            }
            Role::Session { socket, step } => {
                let builder = Session::builder(gpu)
                    .socket(socket)
                    .quarantine(Duration::ZERO);
                let session = builder.open().expect("a session");
                injector.arm(SESSION, step, Action::Die);
                harness::say(&Said::Ready);
                harness::next::<()>();
                wait_until("who came to go", || {
                    if session.participants().is_empty() {
                        Ok(())
                    } else {
                        Err("it is there".to_owned())
                    }
                });
            }
        }
    });
}
