//! What a test and its [`Agent`](crate::agent::Agent) say to each other.

use std::num::NonZeroU32;
use std::os::fd::RawFd;
use std::path::PathBuf;

use gpu_ipc::participant::Notice;
use gpu_ipc::{ClaimError, Claims, Descriptor, Error, ParticipantId, State, To};
use serde::{Deserialize, Serialize};

/// What an agent is told. Blocks have the numbers that its answers gave them.
#[derive(Serialize, Deserialize, Debug)]
pub enum Command {
    // A consumer's.
    Connect {
        socket: PathBuf,
    },
    ConnectWithCache {
        socket: PathBuf,
        bytes: u64,
        regions: usize,
    },
    /// By a descriptor that the agent was started with.
    ConnectBy {
        connection: RawFd,
    },
    Disconnect,
    Claim {
        descriptor: Bytes,
        wait: Waits,
    },
    TryClaim {
        descriptor: Bytes,
    },
    ClaimMany {
        descriptors: Vec<Bytes>,
    },
    Prefetch {
        descriptor: Bytes,
    },
    NextNotice,
    Forward {
        block: u64,
        to: Whom,
    },
    Slice {
        block: u64,
        from: u64,
        to: u64,
    },
    Len {
        block: u64,
    },
    State {
        block: u64,
    },
    /// Has a kernel of another device read a block whose words are alike.
    LookFrom {
        device: u32,
        block: u64,
    },
    KeptLeases,
    Mappings,
    LetGoOfAll,
    /// Whether a block is only read, as the library says.
    IsReadOnly {
        block: u64,
    },
    /// A write into a block by the library.
    Write {
        block: u64,
        stamp: u64,
    },
    /// A write into a block by its address, which nothing of the library's looks at.
    Overwrite {
        block: u64,
        stamp: u64,
    },
    /// Asks the kernel to let a block's pages be written, on the host backend.
    MakeWritable {
        block: u64,
    },
    /// A write into a block that comes after the agent's death.
    LateWrite {
        block: u64,
        stamp: u64,
        milliseconds: u64,
    },
    // A crowd's: many participants in one process.
    JoinUntilRefused {
        socket: PathBuf,
    },
    Join {
        socket: PathBuf,
        count: u64,
    },
    ClaimByFirst {
        descriptor: Bytes,
    },
    ClaimByAll {
        descriptor: Bytes,
    },
    // A producer's.
    Open {
        socket: PathBuf,
    },
    Alloc {
        len: u64,
        stamp: u64,
    },
    Share {
        block: u64,
        to: Whom,
        on_stream: bool,
    },
    Cancel {
        block: u64,
        descriptor: Bytes,
    },
    Outstanding {
        block: u64,
    },
    Collect,
    /// Breaks the device's context, on the host backend.
    BreakContext,
    // Either's.
    Stamp {
        block: u64,
    },
    UsedOnStream {
        block: u64,
    },
    LetGo {
        block: u64,
    },
    Synchronize,
    CloseGate,
    OpenGates,
    /// A kernel that writes on and on into a block.
    WriteOn {
        block: u64,
        words: u64,
    },
    /// A kernel that breaks the context.
    Crash,
    /// A child that lives until it is killed.
    Fork,
    /// So many children, one after the other, in which every call must say `Forked`, while other
    /// threads keep the locks busy.
    ForkAndCall {
        children: u32,
    },
    DieAt(Step),
}

/// A descriptor as it travels.
pub type Bytes = Vec<u8>;

/// What a claim waits for the contents on.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waits {
    OnTheHost,
    OnTheStream,
    ForNothing,
}

/// [`To`] as it travels.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub enum Whom {
    Participant(u64),
    Once,
    Times(NonZeroU32),
    Unlimited,
}

impl From<To> for Whom {
    fn from(to: To) -> Whom {
        match to {
            To::Participant(id) => Whom::Participant(id.0),
            To::Ticket(Claims::Once) => Whom::Once,
            To::Ticket(Claims::Times(times)) => Whom::Times(times),
            To::Ticket(Claims::Unlimited) => Whom::Unlimited,
            other => panic!("a receiver without a word here: {other:?}"),
        }
    }
}

impl From<Whom> for To {
    fn from(whom: Whom) -> To {
        match whom {
            Whom::Participant(id) => To::Participant(ParticipantId(id)),
            Whom::Once => To::Ticket(Claims::Once),
            Whom::Times(times) => To::Ticket(Claims::Times(times)),
            Whom::Unlimited => To::Ticket(Claims::Unlimited),
        }
    }
}

/// A step of a block's life at which an agent can die.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    // The library's.
    Ask,
    Claim,
    Drop,
    Forward,
    Hello,
    Map,
    Redeem,
    Release,
    Share,
    Unmap,
    Welcome,
    // The agent's own.
    CollectBegins,
    Forwarded,
    Send,
    Use,
}

impl Step {
    /// The name under which the library tells of the step, where it does.
    pub fn name(self) -> &'static str {
        match self {
            Step::Ask => "ask",
            Step::Claim => "claim",
            Step::Drop => "drop",
            Step::Forward => "forward",
            Step::Hello => "hello",
            Step::Map => "map",
            Step::Redeem => "redeem",
            Step::Release => "release",
            Step::Share => "share",
            Step::Unmap => "unmap",
            Step::Welcome => "welcome",
            Step::CollectBegins => "the agent's collect",
            Step::Forwarded => "the agent's forwarded",
            Step::Send => "the agent's send",
            Step::Use => "the agent's use",
        }
    }
}

/// What an agent answers.
pub type Answer = Result<Done, Refusal>;

/// What came of a command that succeeded.
#[derive(Serialize, Deserialize, Debug)]
pub enum Done {
    Nothing,
    Number(u64),
    Descriptor(Bytes),
    State(Contents),
    Notice(Heard),
    Joined {
        count: u64,
        first: u64,
        refusal: Refusal,
    },
    Claimed {
        blocks: u64,
        refusal: Option<Refusal>,
    },
    Collected {
        blocks: u64,
        limbo: u64,
    },
}

/// [`State`] as it travels.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Contents {
    Pending,
    Ready,
    ReadyProducerGone,
    Poisoned,
}

impl From<State> for Contents {
    fn from(state: State) -> Contents {
        match state {
            State::Pending => Contents::Pending,
            State::Ready => Contents::Ready,
            State::ReadyProducerGone => Contents::ReadyProducerGone,
            State::Poisoned => Contents::Poisoned,
        }
    }
}

/// [`Notice`] as it travels.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Heard {
    ProducerGone,
    Closing,
    PleaseUnmap,
    Revoked { lease: String },
    TryAgain,
}

impl Heard {
    /// What is told of a descriptor that was taken back.
    pub fn revoked(descriptor: &Descriptor) -> Heard {
        Heard::Revoked {
            lease: format!("{:?}", descriptor.lease()),
        }
    }
}

impl From<Notice> for Heard {
    fn from(notice: Notice) -> Heard {
        match notice {
            Notice::ProducerGone => Heard::ProducerGone,
            Notice::Closing => Heard::Closing,
            Notice::PleaseUnmap { .. } => Heard::PleaseUnmap,
            Notice::Revoked { lease } => Heard::Revoked {
                lease: format!("{lease:?}"),
            },
            Notice::TryAgain => Heard::TryAgain,
            other => panic!("a notice without a word here: {other:?}"),
        }
    }
}

/// Why a command failed.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Refusal {
    pub why: Why,
    pub text: String,
}

/// The kind of a failure: a [`ClaimError`]'s, or another call's.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    WouldBlock,
    Revoked,
    AlreadyClaimed,
    Stale,
    ProducerGone,
    Capturing,
    Forked,
    Refused,
    Backend,
    AnotherCall,
}

impl From<ClaimError> for Refusal {
    fn from(error: ClaimError) -> Refusal {
        let why = match &error {
            ClaimError::WouldBlock => Why::WouldBlock,
            ClaimError::Revoked => Why::Revoked,
            ClaimError::AlreadyClaimed => Why::AlreadyClaimed,
            ClaimError::Stale => Why::Stale,
            ClaimError::ProducerGone => Why::ProducerGone,
            ClaimError::Capturing => Why::Capturing,
            ClaimError::Forked => Why::Forked,
            ClaimError::Refused { .. } => Why::Refused,
            ClaimError::Backend(_) => Why::Backend,
        };
        Refusal {
            why,
            text: error.to_string(),
        }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal {
            why: Why::AnotherCall,
            text: error.to_string(),
        }
    }
}

impl From<&str> for Refusal {
    fn from(text: &str) -> Refusal {
        Refusal {
            why: Why::AnotherCall,
            text: text.to_owned(),
        }
    }
}
