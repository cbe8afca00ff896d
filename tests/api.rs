//! What the types of the public API promise by themselves, whatever they do.

use std::fmt::Debug;

use gpu_ipc::allocators::{Arena, ProcessState};
use gpu_ipc::{
    AdoptToken, After, ClaimError, Claims, Collected, Connecting, Descriptor, Detected, Error, Gpu, GraphBlocks,
    LeaseId, Notice, Participant, ParticipantBuilder, ReceivedBlock, SentBlock, Session, SessionBuilder, SessionReport,
    ShareOptions, ShutdownReport, State, Stats, Stream, To, Wait,
};

fn crosses<T: Send + Sync + Debug + 'static>() {}
fn is_copied<T: Clone + Send + Sync + Debug>() {}

#[test]
fn what_is_held_may_be_used_from_any_thread_and_shown() {
    crosses::<Session>();
    crosses::<SessionBuilder>();
    crosses::<SentBlock>();
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
