//! Processes that die at a step of connect, of welcome, or of the way out.

use std::os::unix::process::ExitStatusExt;

use gpu_ipc::Error;
use harness::WATCHDOG;

use crate::agent::{Agent, Role, Said};
use crate::steps::{Possessions, Stage, come, open};
use crate::{Case, wait_until};

pub const CASES: &[Case] = &[
    ("deaths::a_newcomer_that_dies_leaves_nothing", newcomer_dies),
    ("deaths::a_session_that_dies_leaves_nothing", session_dies),
];

fn newcomer_dies() {
    let stage = Stage::new();
    let socket = stage.session.socket_path().to_path_buf();
    let mut died = 0;
    for step in 1.. {
        let status = Agent::start(&Role::Newcomer {
            socket: socket.clone(),
            step,
        })
        .end();
        stage.await_rest(&format!("a death at step {step}"));
        stage.check();
        if status.success() {
            break;
        }
        assert_eq!(
            status.signal(),
            Some(libc::SIGKILL),
            "it did not die as it was meant to: {status}"
        );
        died += 1;
    }
    stage.serve_the_next();
    println!("died at {died} steps");
    assert!(died >= 20, "only {died} died");
}

fn session_dies() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (host, gpu) = open();
    let mut rest: Option<Possessions> = None;
    let (mut died, mut refused) = (0, 0);
    for step in 1.. {
        let mut agent = Agent::start(&Role::Session {
            socket: path.clone(),
            step,
        });
        assert_eq!(agent.answer(), Some(Said::Ready));
        let came = come(&gpu, &path, WATCHDOG).join().expect("nothing panics");
        refused += u32::from(came.is_err());
        match came {
            Err(error) => {
                let is_lawful = matches!(error, Error::Refused { .. } | Error::Connect { .. });
                assert!(is_lawful, "step {step}: {error}");
            }
            Ok(newcomer) => {
                // It dies at a later step, or at none.
                let _ = newcomer.close(Some(WATCHDOG));
            }
        }
        let status = agent.end();
        drop(agent);
        if let Some(rest) = &rest {
            rest.await_again(&host, &format!("the session's death at step {step}"));
        } else {
            wait_until("the first to go", || {
                let seen = Possessions::look(&host);
                if seen.nothing_of_the_library() {
                    Ok(())
                } else {
                    Err(format!("{seen:?}"))
                }
            });
            rest = Some(Possessions::look(&host));
        }
        if status.success() {
            break;
        }
        assert_eq!(
            status.signal(),
            Some(libc::SIGKILL),
            "it did not die as it was meant to: {status}"
        );
        died += 1;
    }
    println!("died at {died} steps, and {refused} newcomers were told");
    assert!(
        died >= 15 && refused >= 10,
        "only {died} died and {refused} were told"
    );
}
