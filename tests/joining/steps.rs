//! Steps that fail, and steps that stand still while everybody else goes on.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Error, Gpu, Participant, ReceivedBlock, Result, Session, To, Wait};
use harness::WATCHDOG;

use crate::injector::{Action, Injector};
use crate::{Case, wait_until};

pub const CASES: &[Case] = &[
    ("steps::a_newcomers_step_that_fails_leaves_nothing", || {
        fails(NEWCOMER, 20)
    }),
    ("steps::a_sessions_step_that_fails_leaves_nothing", || {
        fails(SESSION, 15)
    }),
    (
        "steps::a_step_of_the_way_out_that_fails_leaves_nothing",
        leaving,
    ),
    (
        "steps::a_newcomer_that_stands_still_keeps_nobody",
        newcomer_stalls,
    ),
    (
        "steps::who_does_not_wait_for_a_session_that_stands_still_leaves_nothing",
        session_stalls,
    ),
];

/// Threads of who connects, by their names as the kernel cuts them.
pub const NEWCOMER: &[&str] = &["newcomer", "gpu-ipc-partici"];
pub const SESSION: &[&str] = &["gpu-ipc-session"];

/// No step count of a side is above this: a loop that goes on beyond it never gets on.
const MOST_STEPS: u32 = 300;

/// What this process has open, and runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Possessions {
    descriptors: usize,
    mapped: usize,
    registered: usize,
    threads: Vec<String>,
}

impl Possessions {
    pub fn look(host: &HostBackend) -> Possessions {
        let mut threads = own_threads();
        // A closer ends by itself when nothing came for it for a while.
        threads.retain(|name| name != CLOSER);
        Possessions {
            descriptors: fs::read_dir("/proc/self/fd")
                .expect("proc is mounted")
                .count(),
            mapped: fs::read_to_string("/proc/self/maps")
                .expect("proc is mounted")
                .matches("/memfd:")
                .count(),
            registered: host.registered_words(),
            threads,
        }
    }

    /// Says whether these are those of a session and one participant, and nothing is being closed.
    fn is_rest(&self) -> bool {
        // A counter file has two mappings and two registrations, one at each side, and the region
        // has one.
        (self.mapped, self.registered) == (3, 2)
            && self.threads == ["gpu-ipc-blockin", "gpu-ipc-partici", "gpu-ipc-session"]
            && !own_threads().iter().any(|name| name == CLOSER)
    }

    /// Says whether no thread and no file of the library's is left.
    pub fn nothing_of_the_library(&self) -> bool {
        self.threads.is_empty() && self.registered == 0 && self.mapped == 0
    }

    /// Waits until this process has that again.
    #[track_caller]
    pub fn await_again(&self, host: &HostBackend, after: &str) {
        wait_until(&format!("what is left after {after} to go"), || {
            // The cheapest look first: what is counted below takes the kernel longer.
            if host.registered_words() != self.registered {
                return Err(format!(
                    "{} files are registered, not {}",
                    host.registered_words(),
                    self.registered
                ));
            }
            let seen = Possessions::look(host);
            // What closes on a thread of its own may have been there when this was looked at.
            if seen
                == (Possessions {
                    descriptors: seen.descriptors.min(self.descriptors),
                    ..self.clone()
                })
            {
                Ok(())
            } else {
                Err(format!("{seen:?}, not {self:?}"))
            }
        });
    }
}

/// The threads that close what others sent, by their name as the kernel cuts it.
const CLOSER: &str = "gpu-ipc-closer";

/// The names of the library's threads, sorted.
fn own_threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task")
        .expect("proc is mounted")
        .flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    let mut names: Vec<String> = names.map(|name| name.trim_end().to_owned()).collect();
    names.retain(|name| name.starts_with("gpu-ipc"));
    names.sort();
    names
}

/// A session with an honest participant that holds a block.
pub struct Stage {
    _dir: tempfile::TempDir,
    pub host: Arc<HostBackend>,
    pub gpu: Gpu,
    pub session: Session,
    honest: Participant,
    held: ReceivedBlock,
    rest: Option<Possessions>,
}

impl Stage {
    pub fn new() -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let (host, gpu) = open();
        let builder = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .quarantine(Duration::ZERO);
        let session = builder.open().expect("a session");
        let honest = Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected");
        let held = lend(&session, &honest);
        let mut stage = Stage {
            _dir: dir,
            host,
            gpu,
            session,
            honest,
            held,
            rest: None,
        };
        // Whatever is made at the first need, and stays, is there after that.
        stage.serve_the_next();
        wait_until("the first to go", || {
            stage.is_alone()?;
            let seen = Possessions::look(&stage.host);
            if seen.is_rest() {
                Ok(())
            } else {
                Err(format!("{seen:?}"))
            }
        });
        stage.rest = Some(Possessions::look(&stage.host));
        stage.serve_the_next();
        stage.await_rest("the second newcomer");
        stage
    }

    fn is_alone(&self) -> Result<(), String> {
        self.session.collect();
        let rows = self.session.participants();
        if rows == [self.honest.id()] {
            Ok(())
        } else {
            Err(format!("{rows:?} are in the table"))
        }
    }

    /// Waits until only the honest one is there, and this process has what it had before.
    #[track_caller]
    pub fn await_rest(&self, after: &str) {
        wait_until(&format!("the row to go after {after}"), || self.is_alone());
        self.rest
            .as_ref()
            .expect("it is set")
            .await_again(&self.host, after);
    }

    /// Looks whether the honest one still holds its block and gets another.
    #[track_caller]
    pub fn check(&self) {
        assert_eq!(self.held.len(), 4096);
        drop(lend(&self.session, &self.honest));
    }

    /// Looks whether who comes next is let in and gets a block.
    #[track_caller]
    pub fn serve_the_next(&self) {
        let next = Participant::builder(self.gpu.clone())
            .timeout(Some(WATCHDOG))
            .connect(self.session.socket_path());
        let next = next.expect("the next who comes is let in");
        drop(lend(&self.session, &next));
    }
}

pub fn open() -> (Arc<HostBackend>, Gpu) {
    let host = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(host.clone(), DeviceId(0)).expect("there is a device");
    (host, gpu)
}

#[track_caller]
fn lend(session: &Session, to: &Participant) -> ReceivedBlock {
    let block = session.alloc(4096).expect("there is room");
    let descriptor = block
        .share(To::Participant(to.id()), After::Done)
        .expect("who is welcome can be shared with");
    to.claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("who is welcome can claim")
}

/// Connects on a thread of its own.
pub fn come(gpu: &Gpu, path: &Path, timeout: Duration) -> JoinHandle<Result<Participant>> {
    let (builder, path) = (
        Participant::builder(gpu.clone()).timeout(Some(timeout)),
        path.to_owned(),
    );
    let thread = std::thread::Builder::new().name("newcomer".into());
    thread
        .spawn(move || builder.connect(path))
        .expect("a thread")
}

/// Every step of a side fails in turn while somebody connects.
fn fails(side: &'static [&'static str], least: u32) {
    let injector = Injector::new().expect("it was tried before");
    let stage = Stage::new();
    let mut failed = Vec::new();
    for step in 1..MOST_STEPS {
        injector.arm(side, step, Action::Fail);
        let came = come(&stage.gpu, stage.session.socket_path(), WATCHDOG)
            .join()
            .expect("nothing panics");
        let fired = injector.disarm();
        let what = format!("step {step}, {fired:?}: {came:?}");
        match came {
            Ok(newcomer) => drop(lend(&stage.session, &newcomer)),
            Err(Error::Deadline { .. }) => panic!("{what}: nobody said why"),
            Err(_) => assert!(fired.is_some(), "{what}: nothing failed"),
        }
        stage.await_rest(&what);
        stage.check();
        stage.serve_the_next();
        stage.await_rest(&format!("the next after {what}"));
        match fired {
            Some(call) => failed.push(call),
            None => {
                println!(
                    "{} steps of {side:?} failed: {}",
                    failed.len(),
                    failed.join(" ")
                );
                assert!(
                    failed.len() >= least as usize,
                    "only {} steps failed",
                    failed.len()
                );
                return;
            }
        }
    }
    panic!("a connect does not end");
}

/// Every step of either side fails in turn while somebody leaves.
fn leaving() {
    let injector = Injector::new().expect("it was tried before");
    let stage = Stage::new();
    for side in [NEWCOMER, SESSION] {
        let mut failed = 0;
        for step in 1..MOST_STEPS {
            let came = come(&stage.gpu, stage.session.socket_path(), WATCHDOG)
                .join()
                .expect("nothing panics");
            let newcomer = came.expect("nothing fails yet");
            drop(lend(&stage.session, &newcomer));
            injector.arm(side, step, Action::Fail);
            drop(newcomer);
            stage.await_rest(&format!("step {step} of {side:?}, {:?}", injector.fired()));
            let fired = injector.disarm();
            stage.check();
            if fired.is_none() {
                break;
            }
            failed += 1;
        }
        println!("{failed} steps of {side:?} failed");
        assert!(
            (1..MOST_STEPS - 1).contains(&failed),
            "{failed} steps failed"
        );
    }
}

/// A newcomer stands still at each of its steps, while the others go on.
fn newcomer_stalls() {
    let injector = Injector::new().expect("it was tried before");
    let stage = Stage::new();
    for step in 1..MOST_STEPS {
        injector.arm(NEWCOMER, step, Action::Stall);
        let newcomer = come(&stage.gpu, stage.session.socket_path(), WATCHDOG);
        wait_until("it to stand still, or to pass", || {
            if injector.fired().is_some() || newcomer.is_finished() {
                Ok(())
            } else {
                Err("neither".to_owned())
            }
        });
        stage.check();
        stage.serve_the_next();
        let fired = injector.disarm();
        let came = newcomer.join().expect("nothing panics");
        drop(lend(&stage.session, &came.expect("nothing failed")));
        stage.await_rest(&format!("step {step}, {fired:?}"));
        if fired.is_none() {
            return assert!(step > 20, "only {step} steps");
        }
    }
    panic!("a connect does not end");
}

/// The session stands still at each of its steps, and who connects waits for no answer.
fn session_stalls() {
    let injector = Injector::new().expect("it was tried before");
    let stage = Stage::new();
    let (mut gave_up, mut step) = (0, 1);
    // Long enough on an idle machine. On a busy one it gives up without need, which is as good a
    // case.
    let mut patience = Duration::from_millis(100);
    while step < MOST_STEPS {
        injector.arm(SESSION, step, Action::Stall);
        let came = come(&stage.gpu, stage.session.socket_path(), patience);
        let came = came.join().expect("nothing panics");
        stage.check();
        gave_up += u32::from(matches!(came, Err(Error::Deadline { .. })));
        if let Err(error) = &came {
            assert!(
                matches!(error, Error::Deadline { .. }),
                "step {step}: {error}"
            );
        }
        let is_in = came.is_ok();
        drop(came);
        let fired = injector.disarm();
        stage.await_rest(&format!("step {step}, {fired:?}"));
        stage.serve_the_next();
        stage.await_rest("the next");
        match (fired, is_in) {
            (Some(_), _) => step += 1,
            (None, true) => return assert!(gave_up >= 10, "only {gave_up} gave up"),
            // It gave up before that step.
            (None, false) => patience *= 2,
        }
    }
    panic!("a connect does not end");
}
