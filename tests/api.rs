//! What the types of the public API promise by themselves, whatever they do.

use std::fmt::Debug;

use gpu_ipc::admin::SessionReport;
use gpu_ipc::allocators::{Arena, ProcessState};
use gpu_ipc::backend::Detected;
use gpu_ipc::participant::{Connecting, GraphBlocks, Notice, ParticipantBuilder};
use gpu_ipc::session::{
    AdoptToken, Collected, DepositId, LeaseId, Loan, Released, SessionBuilder, ShareOptions,
    ShutdownReport, Stats,
};
use gpu_ipc::{
    After, ClaimError, Claims, Descriptor, Error, Gpu, Participant, ReceivedBlock, SentBlock,
    Session, State, Stream, To, Wait,
};

fn crosses<T: Send + Sync + Debug + 'static>() {}
fn is_copied<T: Clone + Send + Sync + Debug>() {}

#[test]
fn what_is_held_may_be_used_from_any_thread_and_shown() {
    crosses::<Session>();
    crosses::<SessionBuilder>();
    crosses::<SentBlock>();
    crosses::<Loan>();
    crosses::<Released>();
    crosses::<Participant>();
    crosses::<ParticipantBuilder>();
    crosses::<Connecting>();
    crosses::<ReceivedBlock>();
    crosses::<GraphBlocks>();
    crosses::<Stream>();
    crosses::<Gpu>();
    crosses::<Detected>();
    crosses::<Arena>();
    crosses::<ProcessState>();
}

#[test]
fn what_is_told_may_go_to_any_thread_and_be_shown() {
    crosses::<Error>();
    crosses::<ClaimError>();
    crosses::<Collected>();
    crosses::<Descriptor>();
    crosses::<Notice>();
    crosses::<DepositId>();
    crosses::<LeaseId>();
    crosses::<SessionReport>();
    crosses::<ShareOptions>();
    crosses::<ShutdownReport>();
    crosses::<State>();
    crosses::<Stats>();
    crosses::<AdoptToken>();
    is_copied::<To>();
    is_copied::<Claims>();
    is_copied::<After<'_>>();
    is_copied::<Wait<'_>>();
}

#[test]
fn what_is_cheap_to_clone_can_be_cloned_and_a_right_cannot() {
    is_copied::<Session>();
    is_copied::<Participant>();
    is_copied::<ReceivedBlock>();
    is_copied::<Stream>();
    is_copied::<Gpu>();
    // A producer's handle is one: its drop puts the block into limbo.
    trait Unless<T> {
        fn cloned() {}
    }
    struct Any;
    struct Cloned;
    impl<T> Unless<Any> for T {}
    impl<T: Clone> Unless<Cloned> for T {}
    // Ambiguous, and so no program, if it could be cloned.
    <SentBlock as Unless<_>>::cloned();
}

/// The names at the root of the crate: what a first program needs. All else lies in the module of
/// its readers.
const ROOT: [&str; 19] = [
    "After",
    "BackendKind",
    "ClaimError",
    "Claims",
    "Descriptor",
    "Error",
    "Gone",
    "Gpu",
    "Participant",
    "ParticipantId",
    "ReceivedBlock",
    "Result",
    "SentBlock",
    "Session",
    "State",
    "Stream",
    "To",
    "Wait",
    "detect",
];

/// The modules, by their readers.
const MODULES: [&str; 11] = [
    "admin",
    "allocators",
    "backend",
    "broker",
    "concepts",
    "cuda",
    "hip",
    "host",
    "participant",
    "session",
    "torch",
];

#[test]
fn the_root_has_the_names_of_a_first_program_and_no_more() {
    let (mut names, mut modules) = (Vec::new(), Vec::new());
    let source = include_str!("../src/lib.rs");
    // Items of the root begin in the first column; those of a module are indented.
    for item in source.split("\npub ").skip(1) {
        if let Some(module) = item.strip_prefix("mod ") {
            modules.push(module.split([' ', ';']).next().expect("a name"));
        } else {
            let list = item
                .strip_prefix("use ")
                .expect("the root holds modules and `pub use` alone");
            let list = list
                .split(';')
                .next()
                .expect("an end")
                .trim_start_matches("::");
            let list = list
                .split_once("::")
                .map_or(list, |(_, names)| names)
                .trim_matches(['{', '}']);
            let list = list.split(',').map(|name| {
                name.trim()
                    .rsplit(' ')
                    .next()
                    .expect("a name")
                    .trim_matches(['{', '}'])
            });
            for name in list.map(str::trim).filter(|name| !name.is_empty()) {
                if MODULES.contains(&name) {
                    modules.push(name)
                } else {
                    names.push(name)
                }
            }
        }
    }
    names.sort_unstable();
    modules.sort_unstable();
    assert_eq!(
        names, ROOT,
        "at most twenty: a name that a first program does without goes into a module"
    );
    assert_eq!(modules, MODULES);
    const { assert!(ROOT.len() <= 20) };
}
