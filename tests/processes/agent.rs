//! The other process as a test sees it: this test's own binary, started again. It can be a
//! consumer, a producer, or both.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::Command as Program;

use gpu_ipc::{Descriptor, ParticipantId, Session, To};
use harness::Child;
use harness::program::this_program;
use serde::{Deserialize, Serialize};

use crate::words::{Answer, Bytes, Command, Contents, Done, Heard, Refusal, Step, Waits, Why};

/// What this binary can be started as.
#[derive(Serialize, Deserialize)]
pub enum Role {
    Agent,
}

/// An agent. Killed when dropped.
pub struct Agent(Child<Command, Answer>);

impl Deref for Agent {
    type Target = Child<Command, Answer>;
    fn deref(&self) -> &Child<Command, Answer> {
        &self.0
    }
}

impl DerefMut for Agent {
    fn deref_mut(&mut self) -> &mut Child<Command, Answer> {
        &mut self.0
    }
}

impl Agent {
    /// Starts one.
    pub fn start() -> Agent {
        Self::start_with(&[])
    }

    /// Starts one with environment variables.
    pub fn start_with(variables: &[(&str, &str)]) -> Agent {
        let mut program = this_program();
        program.envs(variables.iter().copied());
        Self::run(program)
    }

    /// Starts one by a command that runs this binary in the end.
    pub fn run(program: Program) -> Agent {
        Agent(Child::run(program, &Role::Agent))
    }

    /// Gives a command that must succeed.
    #[track_caller]
    pub fn must(&mut self, command: &Command) -> Done {
        self.ask(command)
            .unwrap_or_else(|refusal| panic!("{command:?}: {refusal:?}"))
    }

    /// Gives a command that must fail.
    #[track_caller]
    pub fn must_not(&mut self, command: &Command) -> Refusal {
        match self.ask(command) {
            Ok(done) => panic!("{command:?}: {done:?}"),
            Err(refusal) => refusal,
        }
    }

    #[track_caller]
    fn number(&mut self, command: &Command) -> u64 {
        number(self.must(command))
    }

    #[track_caller]
    fn nothing(&mut self, command: &Command) {
        let done = self.must(command);
        assert!(matches!(done, Done::Nothing), "{command:?}: {done:?}");
    }

    /// Tells it to die when it reaches a step.
    #[track_caller]
    pub fn die_at(&mut self, step: Step) {
        self.nothing(&Command::DieAt(step));
    }

    /// Waits for its death, whatever it answers before.
    #[track_caller]
    pub fn dies(&mut self) {
        while self.answer().is_some() {}
        self.wait();
    }

    /// Reads the first 8 bytes of a block, received or its own.
    #[track_caller]
    pub fn stamp(&mut self, block: u64) -> u64 {
        self.number(&Command::Stamp { block })
    }

    /// Names its stream as one that uses a block.
    #[track_caller]
    pub fn used(&mut self, block: u64) {
        self.nothing(&Command::UsedOnStream { block });
    }

    /// Lets go of a block, received or its own.
    #[track_caller]
    pub fn let_go(&mut self, block: u64) {
        self.nothing(&Command::LetGo { block });
    }

    /// Holds its stream up.
    #[track_caller]
    pub fn close_gate(&mut self) {
        self.nothing(&Command::CloseGate);
    }

    /// Lets its stream go on.
    #[track_caller]
    pub fn open_gates(&mut self) {
        self.nothing(&Command::OpenGates);
    }

    /// Waits for its stream.
    #[track_caller]
    pub fn synchronize(&mut self) {
        self.nothing(&Command::Synchronize);
    }

    /// Forks a child that does nothing until it is killed, and returns its number.
    #[track_caller]
    pub fn fork(&mut self) -> rustix::process::Pid {
        let pid = self.number(&Command::Fork);
        rustix::process::Pid::from_raw(pid.try_into().expect("a process' number")).expect("not 0")
    }

    /// Launches a kernel that writes on and on into a block.
    #[track_caller]
    pub fn write_on(&mut self, block: u64, words: u64) {
        self.nothing(&Command::WriteOn { block, words });
    }

    /// Launches a kernel that breaks its context.
    #[track_caller]
    pub fn crash(&mut self) {
        self.nothing(&Command::Crash);
    }
}

/// As a consumer.
impl Agent {
    /// Connects it to a session, and returns its number there.
    #[track_caller]
    pub fn connect(&mut self, session: &Session) -> ParticipantId {
        self.connect_to(session.socket_path())
    }

    /// Connects it to the session behind a socket, and returns its number there.
    #[track_caller]
    pub fn connect_to(&mut self, socket: &Path) -> ParticipantId {
        ParticipantId(self.number(&Command::Connect {
            socket: socket.into(),
        }))
    }

    /// Connects it to a session that turns it away, and returns why.
    #[track_caller]
    pub fn cannot_connect(&mut self, session: &Session) -> Refusal {
        self.must_not(&Command::Connect {
            socket: session.socket_path().into(),
        })
    }

    /// Gives up its connection.
    #[track_caller]
    pub fn disconnect(&mut self) {
        self.nothing(&Command::Disconnect);
    }

    /// Claims a block, waiting for its contents on the host, and returns its number of it.
    #[track_caller]
    pub fn claim(&mut self, descriptor: &Descriptor) -> u64 {
        self.number(&claim(descriptor, Waits::OnTheHost))
    }

    /// Claims a block whose contents its stream waits for.
    #[track_caller]
    pub fn claim_on_stream(&mut self, descriptor: &Descriptor) -> u64 {
        self.number(&claim(descriptor, Waits::OnTheStream))
    }

    /// Claims a block without waiting for its contents.
    #[track_caller]
    pub fn claim_unready(&mut self, descriptor: &Descriptor) -> u64 {
        self.number(&claim(descriptor, Waits::ForNothing))
    }

    /// Claims a block in vain, and returns why.
    #[track_caller]
    pub fn cannot_claim(&mut self, descriptor: &Descriptor) -> Why {
        self.must_not(&claim(descriptor, Waits::OnTheHost)).why
    }

    /// Claims a block, or says at once why not.
    #[track_caller]
    pub fn try_claim(&mut self, descriptor: &Descriptor) -> Result<u64, Refusal> {
        self.ask(&Command::TryClaim {
            descriptor: bytes(descriptor),
        })
        .map(number)
    }

    /// Claims several blocks at once, and returns how many it got, and why not one of the others.
    #[track_caller]
    pub fn claim_many(&mut self, descriptors: &[Descriptor]) -> (u64, Option<Why>) {
        match self.must(&claim_many(descriptors)) {
            Done::Claimed { blocks, refusal } => (blocks, refusal.map(|refusal| refusal.why)),
            other => panic!("{other:?}"),
        }
    }

    /// Asks for what a claim will need.
    #[track_caller]
    pub fn prefetch(&mut self, descriptor: &Descriptor) {
        self.nothing(&Command::Prefetch {
            descriptor: bytes(descriptor),
        });
    }

    /// Waits until it is told this; what else it is told before is dropped.
    #[track_caller]
    pub fn hears(&mut self, heard: &Heard) {
        loop {
            match self.must(&Command::NextNotice) {
                Done::Notice(notice) if notice == *heard => return,
                Done::Notice(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Hands a block on, or says why not.
    #[track_caller]
    pub fn forward(&mut self, block: u64, to: To) -> Result<Descriptor, Refusal> {
        self.ask(&Command::Forward {
            block,
            to: to.into(),
        })
        .map(descriptor)
    }

    /// Cuts a slice from a block, and returns its number of it.
    #[track_caller]
    pub fn slice(&mut self, block: u64, from: u64, to: u64) -> u64 {
        self.number(&Command::Slice { block, from, to })
    }

    /// Returns the bytes of a block.
    #[track_caller]
    pub fn len(&mut self, block: u64) -> u64 {
        self.number(&Command::Len { block })
    }

    /// Has a kernel of another device read a block whose words are alike, and returns the word.
    #[track_caller]
    pub fn look_from(&mut self, device: u32, block: u64) -> u64 {
        self.number(&Command::LookFrom { device, block })
    }

    /// Returns what its contents are.
    #[track_caller]
    pub fn contents(&mut self, block: u64) -> Contents {
        match self.must(&Command::State { block }) {
            Done::State(contents) => contents,
            other => panic!("{other:?}"),
        }
    }

    /// Says whether a block is only read.
    #[track_caller]
    pub fn is_read_only(&mut self, block: u64) -> bool {
        self.number(&Command::IsReadOnly { block }) == 1
    }

    /// Writes into a block by the library.
    pub fn write(&mut self, block: u64, stamp: u64) -> Result<(), Refusal> {
        self.ask(&Command::Write { block, stamp }).map(drop)
    }

    /// Counts the regions that it has mapped.
    #[track_caller]
    pub fn mappings(&mut self) -> u64 {
        self.number(&Command::Mappings)
    }

    /// Lets go of all that it received.
    #[track_caller]
    pub fn let_go_of_all(&mut self) {
        self.nothing(&Command::LetGoOfAll);
    }
}

/// As a producer.
impl Agent {
    /// Opens a session.
    #[track_caller]
    pub fn open(&mut self, socket: &Path) {
        self.nothing(&Command::Open {
            socket: socket.into(),
        });
    }

    /// Allocates a block with a stamp in it, and returns its number of it.
    #[track_caller]
    pub fn alloc(&mut self, len: u64, stamp: u64) -> u64 {
        self.number(&Command::Alloc { len, stamp })
    }

    /// Shares a block whose contents are there.
    #[track_caller]
    pub fn share(&mut self, block: u64, to: To) -> Descriptor {
        descriptor(self.must(&Command::Share {
            block,
            to: to.into(),
            on_stream: false,
        }))
    }

    /// Shares a block whose contents its stream still makes.
    #[track_caller]
    pub fn share_on_stream(&mut self, block: u64, to: To) -> Descriptor {
        descriptor(self.must(&Command::Share {
            block,
            to: to.into(),
            on_stream: true,
        }))
    }

    /// Counts the leases of a block that have not ended.
    #[track_caller]
    pub fn outstanding(&mut self, block: u64) -> u64 {
        self.number(&Command::Outstanding { block })
    }

    /// Has it collect, and returns how many blocks are in limbo then.
    #[track_caller]
    pub fn limbo(&mut self) -> u64 {
        match self.must(&Command::Collect) {
            Done::Collected { limbo, .. } => limbo,
            other => panic!("{other:?}"),
        }
    }
}

/// Returns the command to claim a block.
pub fn claim(descriptor: &Descriptor, wait: Waits) -> Command {
    Command::Claim {
        descriptor: bytes(descriptor),
        wait,
    }
}

/// Returns the command to claim several blocks at once.
pub fn claim_many(descriptors: &[Descriptor]) -> Command {
    Command::ClaimMany {
        descriptors: descriptors.iter().map(bytes).collect(),
    }
}

/// Writes a descriptor as it travels.
pub fn bytes(descriptor: &Descriptor) -> Bytes {
    descriptor.as_bytes().to_vec()
}

/// Reads the number that an agent answered.
#[track_caller]
pub fn number(done: Done) -> u64 {
    match done {
        Done::Number(number) => number,
        other => panic!("no number: {other:?}"),
    }
}

/// Reads the descriptor that an agent answered.
#[track_caller]
pub fn descriptor(done: Done) -> Descriptor {
    match done {
        Done::Descriptor(bytes) => Descriptor::decode(&bytes).expect("a descriptor"),
        other => panic!("no descriptor: {other:?}"),
    }
}
