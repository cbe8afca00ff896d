//! Processes that die at a step of connect, of welcome, or of the way out.

use std::os::unix::process::ExitStatusExt;

use gpu_ipc::Session;
use harness::WATCHDOG;

use crate::agent::{Agent, Kind, Role, Said};
use crate::servers::{Brokered, Failed, Server, threads_of_brokers};
use crate::steps::{Possessions, Stage, come, open};
use crate::{Case, wait_until};

pub const CASES: &[Case] = &[
    ("deaths::a_newcomer_that_dies_leaves_nothing", || {
        newcomer_dies::<Session>(Kind::Session);
        newcomer_dies::<Brokered>(Kind::Broker);
    }),
    ("deaths::a_server_that_dies_leaves_nothing", || {
        server_dies::<Session>(Kind::Session);
        server_dies::<Brokered>(Kind::Broker);
    }),
];

fn newcomer_dies<S: Server>(of: Kind) {
    let stage = Stage::<S>::new();
    let mut died = 0;
    for step in 1.. {
        let dir = stage.dir();
        let status = Agent::start(&Role::Newcomer { of, dir, step }).end();
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
    assert!(died >= S::LEAST.0, "only {died} died");
}

fn server_dies<S: Server>(of: Kind) {
    let others = threads_of_brokers();
    let dir = tempfile::tempdir().expect("a directory");
    let (host, gpu) = open();
    let mut rest: Option<Possessions> = None;
    let (mut died, mut told) = (0, 0);
    for step in 1.. {
        let dir = dir.path().to_owned();
        let mut agent = Agent::start(&Role::Server {
            of,
            dir: dir.clone(),
            step,
        });
        assert_eq!(agent.answer(), Some(Said::Ready));
        let came = come::<S>(&gpu, &dir, WATCHDOG)
            .join()
            .expect("nothing panics");
        told += u32::from(came.is_err());
        match came {
            Err(error) => assert!(matches!(error, Failed::Told(_)), "step {step}: {error:?}"),
            // It dies at a later step, or at none.
            Ok(newcomer) => S::leave(newcomer),
        }
        let status = agent.end();
        drop(agent);
        if let Some(rest) = &rest {
            rest.await_again(&host, &format!("the server's death at step {step}"));
        } else {
            wait_until("the first to go", || {
                let seen = Possessions::look(&host);
                if seen.nothing_of_the_library(&others) {
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
    println!("died at {died} steps, and {told} newcomers were told");
    assert!(
        died >= S::LEAST.2 && told >= 10,
        "only {died} died and {told} were told"
    );
}
