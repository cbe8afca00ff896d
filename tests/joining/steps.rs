//! Steps that fail, and steps that stand still while everybody else goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{Gpu, Session};
use harness::WATCHDOG;

use crate::injector::{Action, Injector};
use crate::servers::{Brokered, Failed, Server, threads_of_brokers};
use crate::{Case, own_thread, wait_until};

pub const CASES: &[Case] = &[
    ("steps::a_newcomers_step_that_fails_leaves_nothing", || {
        own_thread(|| fails::<Session>(Session::NEWCOMER, Session::LEAST.0));
        own_thread(|| fails::<Brokered>(Brokered::NEWCOMER, Brokered::LEAST.0));
    }),
    ("steps::a_sessions_step_that_fails_leaves_nothing", || {
        own_thread(|| fails::<Session>(Session::SERVER, Session::LEAST.1));
    }),
    ("steps::a_brokers_step_that_fails_leaves_nothing", || {
        own_thread(|| fails::<Brokered>(Brokered::SERVER, Brokered::LEAST.1));
    }),
    (
        "steps::a_step_of_the_way_out_that_fails_leaves_nothing",
        || {
            own_thread(leaving::<Session>);
            own_thread(leaving::<Brokered>);
        },
    ),
    ("steps::a_newcomer_that_stands_still_keeps_nobody", || {
        own_thread(newcomer_stalls::<Session>);
        own_thread(newcomer_stalls::<Brokered>);
    }),
    (
        "steps::who_does_not_wait_for_a_session_that_stands_still_leaves_nothing",
        || {
            own_thread(server_stalls::<Session>);
            own_thread(server_stalls::<Brokered>);
        },
    ),
];

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

    /// Says whether these are those of a server and one client, beside the `others` of servers
    /// before it, and nothing is being closed.
    fn is_rest<S: Server>(&self, others: &[String]) -> bool {
        let mut threads = others.to_vec();
        threads.extend(S::THREADS.iter().map(|&name| name.to_owned()));
        threads.sort();
        (self.mapped, self.registered) == S::FILES
            && self.threads == threads
            && !own_threads().iter().any(|name| name == CLOSER)
    }

    /// Says whether no file of the library's is left, and no thread but the `others` of servers
    /// before.
    pub fn nothing_of_the_library(&self, others: &[String]) -> bool {
        self.threads == others && self.registered == 0 && self.mapped == 0
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

/// A server with an honest client that holds memory.
pub struct Stage<S: Server> {
    dir: tempfile::TempDir,
    host: Arc<HostBackend>,
    gpu: Gpu,
    server: S,
    honest: S::Client,
    held: S::Held,
    rest: Option<Possessions>,
}

impl<S: Server> Stage<S> {
    pub fn new() -> Stage<S> {
        let others = threads_of_brokers();
        let dir = tempfile::tempdir().expect("a directory");
        let (host, gpu) = open();
        let server = S::open(dir.path(), &gpu);
        let honest = S::connect(&gpu, dir.path(), WATCHDOG).expect("connected");
        let held = server.hold(&honest);
        let mut stage = Stage {
            dir,
            host,
            gpu,
            server,
            honest,
            held,
            rest: None,
        };
        // Whatever is made at the first need, and stays, is there after that.
        stage.serve_the_next();
        wait_until("the first to go", || {
            stage.server.is_alone(&stage.honest)?;
            let seen = Possessions::look(&stage.host);
            if seen.is_rest::<S>(&others) {
                Ok(())
            } else {
                Err(format!("{seen:?}, beside {others:?} of others"))
            }
        });
        stage.rest = Some(Possessions::look(&stage.host));
        stage.serve_the_next();
        stage.await_rest("the second newcomer");
        stage
    }

    /// Returns the directory that it serves in.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// Waits until only the honest one is there, and this process has what it had before.
    #[track_caller]
    pub fn await_rest(&self, after: &str) {
        wait_until(&format!("the row to go after {after}"), || {
            self.server.is_alone(&self.honest)
        });
        self.rest
            .as_ref()
            .expect("it is set")
            .await_again(&self.host, after);
    }

    /// Looks whether the honest one still holds its memory, and is served as far as that needs no
    /// answer.
    #[track_caller]
    pub fn check(&self) {
        self.server.check(&self.honest, &self.held);
    }

    /// Looks whether who comes next is let in and gets memory.
    #[track_caller]
    pub fn serve_the_next(&self) {
        let next = S::connect(&self.gpu, self.dir.path(), WATCHDOG);
        self.server
            .serve(&next.expect("the next who comes is let in"));
    }

    /// Connects on a thread of its own.
    fn come(&self, patience: Duration) -> JoinHandle<Result<S::Client, Failed>> {
        come::<S>(&self.gpu, self.dir.path(), patience)
    }
}

pub fn open() -> (Arc<HostBackend>, Gpu) {
    let host = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(host.clone(), DeviceId(0)).expect("there is a device");
    (host, gpu)
}

/// Connects on a thread of its own.
pub fn come<S: Server>(
    gpu: &Gpu,
    dir: &Path,
    patience: Duration,
) -> JoinHandle<Result<S::Client, Failed>> {
    let (gpu, dir) = (gpu.clone(), dir.to_owned());
    let thread = std::thread::Builder::new().name("newcomer".into());
    thread
        .spawn(move || S::connect(&gpu, &dir, patience))
        .expect("a thread")
}

/// Every step of a side fails in turn while somebody connects.
fn fails<S: Server>(side: &'static [&'static str], least: u32) {
    let injector = Injector::new().expect("it was tried before");
    let stage = Stage::<S>::new();
    let mut failed = Vec::new();
    for step in 1..MOST_STEPS {
        injector.arm(side, step, Action::Fail);
        let came = stage.come(WATCHDOG).join().expect("nothing panics");
        let fired = injector.disarm();
        let what = format!("step {step}, {fired:?}: {:?}", came.as_ref().err());
        match came {
            Ok(newcomer) => stage.server.serve(&newcomer),
            Err(Failed::Late) => panic!("{what}: nobody said why"),
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
fn leaving<S: Server>() {
    let injector = Injector::new().expect("it was tried before");
    let stage = Stage::<S>::new();
    for (side, least) in [(S::NEWCOMER, S::LEAST_GOODBYE), (S::SERVER, 1)] {
        let mut failed = 0;
        for step in 1..MOST_STEPS {
            let came = stage.come(WATCHDOG).join().expect("nothing panics");
            let newcomer = came.map_err(|error| format!("{error:?}"));
            let newcomer = newcomer.expect("nothing fails yet");
            stage.server.serve(&newcomer);
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
            (least..MOST_STEPS - 1).contains(&failed),
            "{failed} steps failed"
        );
    }
}

/// A newcomer stands still at each of its steps, while the others go on.
fn newcomer_stalls<S: Server>() {
    let injector = Injector::new().expect("it was tried before");
    let stage = Stage::<S>::new();
    for step in 1..MOST_STEPS {
        injector.arm(S::NEWCOMER, step, Action::Stall);
        let newcomer = stage.come(WATCHDOG);
        wait_until("it to stand still, or to pass", || {
            if injector.fired().is_some() || newcomer.is_finished() {
                Ok(())
            } else {
                Err("neither".to_owned())
            }
        });
        if injector.fired().is_none() {
            // It passed: the next is not to stand still in its place.
            injector.disarm();
        }
        stage.check();
        stage.serve_the_next();
        let fired = injector.disarm();
        let came = newcomer.join().expect("nothing panics");
        let came = came.map_err(|error| format!("{error:?}"));
        stage.server.serve(&came.expect("nothing failed"));
        stage.await_rest(&format!("step {step}, {fired:?}"));
        if fired.is_none() {
            return assert!(step > S::LEAST.0, "only {step} steps");
        }
    }
    panic!("a connect does not end");
}

/// The server stands still at each of its steps, and who connects waits for no answer.
fn server_stalls<S: Server>() {
    let injector = Injector::new().expect("it was tried before");
    let stage = Stage::<S>::new();
    let (mut gave_up, mut step) = (0, 1);
    // Long enough on an idle machine. On a busy one it gives up without need, which is as good a
    // case.
    let mut patience = Duration::from_millis(100);
    while step < MOST_STEPS {
        injector.arm(S::SERVER, step, Action::Stall);
        let came = stage.come(patience).join().expect("nothing panics");
        stage.check();
        gave_up += u32::from(matches!(came, Err(Failed::Late)));
        if let Err(error) = &came {
            assert!(matches!(error, Failed::Late), "step {step}: {error:?}");
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
