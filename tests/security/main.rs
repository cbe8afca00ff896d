//! Who means harm: participants that say and name what is not theirs, or ask for everything; users
//! that are not allowed; and links and files in the way of a session's socket.
//!
//! What they say here they say in bytes, by the tables of `docs/WIRE.md`, since nothing in the API
//! lets them.

mod connections;
mod directory;
mod forged;
mod quotas;
mod read_only;
mod servers;
mod stranger;
mod users;

use std::time::Duration;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::session::SessionBuilder;
use gpu_ipc::{After, Descriptor, Gpu, Participant, ReceivedBlock, SentBlock, Session, To, Wait};
use harness::WATCHDOG;
use harness::surroundings::has_users;
use libtest_mimic::{Arguments, Failed, Trial};

/// A case: its name and what it does.
type Case = (&'static str, fn());

fn main() {
    if let Some(role) = harness::role() {
        return users::run(role);
    }
    let mut arguments = Arguments::from_args();
    // Some cases count this process' descriptors.
    arguments.test_threads = Some(1);
    let other_users = has_users();
    if !other_users {
        println!(
            "not root, or other users may not run this binary: the cases of other users are ignored"
        );
    }
    let mut trials = trials(
        &[
            forged::CASES,
            quotas::CASES,
            read_only::CASES,
            directory::CASES,
            connections::CASES,
            servers::CASES,
        ]
        .concat(),
        true,
    );
    trials.extend(self::trials(
        &[users::CASES, directory::USERS, servers::USERS].concat(),
        other_users,
    ));
    libtest_mimic::run(&arguments, trials).exit();
}

fn trials(cases: &[Case], possible: bool) -> Vec<Trial> {
    let trial = |&(name, run): &Case| {
        let trial = Trial::test(name, move || {
            run();
            Ok::<(), Failed>(())
        });
        trial.with_ignored_flag(!possible)
    };
    cases.iter().map(trial).collect()
}

fn open_gpu() -> Gpu {
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    Gpu::new(backend, DeviceId(0)).expect("there is a device")
}

/// A session, and an honest participant that holds a block of it.
struct Stage {
    dir: tempfile::TempDir,
    gpu: Gpu,
    session: Session,
    honest: Participant,
    held: ReceivedBlock,
    /// What the honest one claimed.
    theirs: Descriptor,
}

impl Stage {
    fn new() -> Stage {
        Stage::with(|builder| builder)
    }

    fn with(choose: impl FnOnce(SessionBuilder) -> SessionBuilder) -> Stage {
        let (dir, gpu) = (tempfile::tempdir().expect("a directory"), open_gpu());
        let builder = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .quarantine(Duration::ZERO);
        let session = choose(builder).open().expect("a session");
        let honest = Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected");
        let block = session.alloc(4096).expect("there is room");
        let theirs = block
            .share(To::Participant(honest.id()), After::Done)
            .expect("shared");
        let held = honest
            .claim(theirs.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("claimed");
        Stage {
            dir,
            gpu,
            session,
            honest,
            held,
            theirs,
        }
    }

    fn block(&self) -> SentBlock {
        self.session.alloc(4096).expect("there is room")
    }

    /// Looks whether the honest one still has what it had and gets what it is given.
    #[track_caller]
    fn check(&self) {
        self.session.collect();
        let stats = self.session.stats();
        assert!(
            stats.live_blocks >= 1 && stats.held >= 1,
            "an honest lease was ended: {stats:?}"
        );
        assert_eq!(self.held.len(), 4096);
        let descriptor = self
            .block()
            .share(To::Participant(self.honest.id()), After::Done)
            .expect("shared");
        self.honest
            .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("the honest one is not served");
    }

    /// Ends it, and looks that nothing is left once the honest one is done.
    fn end(self) {
        self.check();
        let Stage {
            session,
            honest,
            held,
            ..
        } = self;
        drop((held, honest));
        let report = session.shutdown(WATCHDOG);
        assert!(report.clean, "{report:?}");
    }
}
