//! The questions of a client against a model: messages are lost, late, repeated and out of order,
//! the broker takes its time over a commit, dies, and another takes its place with what the keeper
//! has.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use transport::os::socket::ReceiveOutcome;
use transport::shared::counter_file::CounterFile;

use super::super::connection::Words;
use super::*;
use crate::object::identity::Epoch;
use crate::wire::VERSIONS;

#[derive(Clone, Debug)]
enum Step {
    /// A thread asks what may be asked of any broker, or of this one only.
    Ask(bool),
    /// Something is told that needs no answer here.
    Tell,
    Commit,
    /// The time passes, and what is due is sent.
    Send(u64),
    /// The broker hears the oldest message: answers, does not decide yet, or never gets it.
    Hear(Heard),
    /// One of the answers arrives; it may arrive again.
    Answer(usize, bool),
    LoseAnswer(usize),
    /// A thread looks for its answer, or gives up.
    Take(usize),
    Withdraw(usize),
    Die,
    Reconnect,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Heard {
    Answered,
    Undecided,
    Lost,
}

fn step() -> impl Strategy<Value = Step> {
    let heard = prop_oneof![
        3 => Just(Heard::Answered),
        1 => Just(Heard::Undecided),
        1 => Just(Heard::Lost),
    ];
    prop_oneof![
        2 => any::<bool>().prop_map(Step::Ask),
        1 => Just(Step::Tell),
        2 => Just(Step::Commit),
        3 => (0u64..1_500).prop_map(Step::Send),
        5 => heard.prop_map(Step::Hear),
        5 => (any::<usize>(), any::<bool>()).prop_map(|(at, again)| Step::Answer(at, again)),
        1 => any::<usize>().prop_map(Step::LoseAnswer),
        3 => any::<usize>().prop_map(Step::Take),
        1 => any::<usize>().prop_map(Step::Withdraw),
        1 => Just(Step::Die),
        2 => Just(Step::Reconnect),
    ]
}

/// A question that a thread waits for.
struct Asked {
    request: u64,
    survives: bool,
    /// The broker that it was asked of; `None` when there was none.
    of: Option<u64>,
}

struct World {
    questions: Questions,
    now: Instant,
    /// The broker's number, and its end.
    life: u64,
    broker: Option<OwnedFd>,
    answers: Vec<ToClient>,
    asked: Vec<Asked>,
    /// Which broker has the memory of an object.
    made_by: BTreeMap<Identity, u64>,
    commits: Vec<(Arc<CommitCell>, Identity)>,
    /// What is visible: the keeper has it.
    kept: BTreeMap<Identity, Epoch>,
    last: u128,
}

fn connect() -> (Connection, OwnedFd) {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    let gpu = GPU.get_or_init(|| {
        let host = HostBackend::new(HostConfig::default()).expect("a device");
        Gpu::new(host, DeviceId(0)).expect("it is there")
    });
    let (socket, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    let file = CounterFile::create(64).expect("a file");
    let connection = Connection {
        socket,
        version: VERSIONS.highest,
        lineage: None,
        words: Arc::new(Words::of(gpu, file).expect("they are registered")),
    };
    (connection, theirs)
}

impl World {
    fn new() -> World {
        let (connection, broker) = connect();
        World {
            questions: Questions::new(connection),
            now: Instant::now(),
            life: 1,
            broker: Some(broker),
            answers: Vec::new(),
            asked: Vec::new(),
            made_by: BTreeMap::new(),
            commits: Vec::new(),
            kept: BTreeMap::new(),
            last: 0,
        }
    }

    /// An object that this broker made.
    fn object(&mut self) -> Identity {
        self.last += 1;
        let identity = Identity(self.last.to_le_bytes());
        self.made_by.insert(identity, self.life);
        identity
    }

    fn hear(&mut self, heard: Heard) -> bool {
        let Some(broker) = &self.broker else {
            return false;
        };
        let (mut bytes, mut fds) = ([0; MOST_BYTES], Vec::new());
        let ReceiveOutcome::Packet(len) =
            socket::receive(broker, &mut bytes, &mut fds).expect("it is open")
        else {
            return false;
        };
        let message = ToBroker::decode(&bytes[..len], 0).expect("a good message");
        if let ToBroker::Commit { identity, .. }
        | ToBroker::Abort { identity, .. }
        | ToBroker::Close { identity, .. } = &message
        {
            assert_eq!(self.made_by[identity], self.life, "asked of another broker");
        }
        let next = Epoch(self.kept.len() as u64 + 1);
        match (heard, message) {
            (Heard::Lost, _) | (Heard::Undecided, ToBroker::Commit { .. }) => {}
            (_, ToBroker::Commit { request, identity }) => {
                let epoch = *self.kept.entry(identity).or_insert(next);
                self.answers.push(ToClient::Committed { request, epoch });
            }
            (heard, ToBroker::AskOutcome { request, identity }) => {
                let standing = match self.kept.get(&identity) {
                    Some(&epoch) => Standing::Committed(epoch),
                    None if heard == Heard::Undecided => Standing::Unfinished,
                    None => Standing::Unknown,
                };
                self.answers.push(ToClient::Outcome { request, standing });
            }
            (_, message) => self.answers.push(ToClient::Noted {
                request: message.request(),
            }),
        }
        true
    }

    fn answer(&mut self, at: usize, again: bool) {
        if self.answers.is_empty() {
            return;
        }
        let at = at % self.answers.len();
        let answer = self.answers[at].clone();
        if !again {
            self.answers.remove(at);
        }
        self.questions.hear(answer, Vec::new());
    }

    /// Takes an answer, and says whether it was there.
    fn take(&mut self, at: usize) -> bool {
        let asked = &self.asked[at];
        let Some(answer) = self.questions.take(asked.request) else {
            return false;
        };
        match answer {
            Ok((answer, _)) => assert_eq!(answer.request(), asked.request),
            Err(error) => {
                let is_gone = asked.of != Some(self.life) || self.broker.is_none();
                assert!(!asked.survives && is_gone, "{error}");
            }
        }
        self.asked.remove(at);
        true
    }

    fn ask(&mut self, survives: bool) {
        let identity = self.object();
        let message = |request| match survives {
            true => ToBroker::AskOutcome { request, identity },
            false => ToBroker::Abort { request, identity },
        };
        let of = self.broker.as_ref().map(|_| self.life);
        let (fds, waiter) = (Vec::new(), Waiter::Asker);
        let request = self.questions.begin(message, fds, waiter, survives);
        self.asked.push(Asked {
            request,
            survives,
            of,
        });
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Ask(survives) => self.ask(survives),
            Step::Tell => {
                let identity = self.object();
                let message = |request| ToBroker::Close { request, identity };
                let (fds, waiter) = (Vec::new(), Waiter::Nobody);
                self.questions.begin(message, fds, waiter, false);
            }
            // The link asks for a commit only of the broker that made the object.
            Step::Commit if self.broker.is_some() => {
                let identity = self.object();
                let cell = Arc::new(CommitCell::default());
                self.commits.push((cell.clone(), identity));
                let message = |request| ToBroker::Commit { request, identity };
                let waiter = Waiter::Commit(cell, identity);
                self.questions.begin(message, Vec::new(), waiter, false);
            }
            Step::Send(ms) => {
                self.now += Duration::from_millis(ms);
                self.questions.send_due(self.now);
            }
            Step::Hear(heard) => drop(self.hear(heard)),
            Step::Answer(at, again) => self.answer(at, again),
            Step::LoseAnswer(at) if !self.answers.is_empty() => {
                self.answers.remove(at % self.answers.len());
            }
            Step::Take(at) if !self.asked.is_empty() => drop(self.take(at % self.asked.len())),
            Step::Withdraw(at) if !self.asked.is_empty() => {
                let asked = self.asked.remove(at % self.asked.len());
                self.questions.withdraw(asked.request);
            }
            Step::Die if self.broker.take().is_some() => {
                self.answers.clear();
                self.questions.lose();
            }
            Step::Reconnect if self.broker.is_none() => {
                let (connection, broker) = connect();
                self.life += 1;
                self.broker = Some(broker);
                self.questions.welcome(connection);
            }
            _ => {}
        }
    }
}

proptest! {
    /// Whatever is lost, late or repeated: each question ends, with its own answer; one about what
    /// a broker had is never put to another; a commit is told visible exactly if it is.
    #[test]
    fn each_question_ends_and_a_commit_is_told_as_it_is(
        steps in proptest::collection::vec(step(), 0..80),
    ) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
        }
        // From here on the broker lives, and nothing is lost.
        world.step(&Step::Reconnect);
        world.step(&Step::Send(60_000));
        while world.hear(Heard::Answered) {}
        while !world.answers.is_empty() {
            world.answer(0, false);
        }
        while !world.asked.is_empty() {
            prop_assert!(world.take(0), "a question without an answer");
        }
        for (cell, identity) in std::mem::take(&mut world.commits) {
            let commit = super::super::commit::Commit {
                cell,
                identity,
                fork: gpu_api::ForkGuard::new().expect("a guard"),
            };
            match commit.wait_for(Duration::ZERO) {
                Ok(epoch) => prop_assert_eq!(world.kept.get(&identity), Some(&epoch)),
                Err(ObjectError::WriterLost { .. }) => prop_assert!(!world.kept.contains_key(&identity)),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
        prop_assert!(world.questions.table.is_empty(), "a row stays");
        world.step(&Step::Send(60_000));
        prop_assert!(!world.hear(Heard::Answered), "asked after its end");
    }
}
