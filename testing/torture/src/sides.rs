//! How the two sides of a run get at memory: by the library, or as a control does.

use std::time::Duration;

use super::message::{Message, Outbox};
use harness::rng::Dice;

/// How a producer gives out memory: by the library, or as a control does.
pub trait Lender {
    /// Does one thing by chance: lends a block, takes one back, tidies up.
    fn lend(
        &mut self,
        dice: &mut Dice,
        partners: &[(u64, u64)],
        outbox: &Outbox,
    ) -> Result<(), String>;

    /// Looks what came back.
    fn tend(&mut self);

    /// Lets go of what the producer itself keeps.
    fn let_go(&mut self);

    /// Counts what is lent and not back.
    fn held(&mut self) -> u64;

    /// Waits until nothing is held, and says how many blocks did not come back. When it is `alone`,
    /// because everybody else has left, nothing else of theirs may be left either.
    fn finish(&mut self, alone: bool) -> u64;
}

/// What became of a message.
pub enum Taken<H> {
    /// The block.
    Held(H),
    /// Nothing, and that is as it should be.
    Nothing,
    /// A duplicate was refused.
    Refused,
    /// The producer is gone.
    Gone,
}

/// How a consumer gets at what it is sent: by the library, or as a control does.
pub trait Borrower {
    /// A block that is held. Its lease ends when it is dropped.
    type Held;

    /// Returns its number at the producer.
    fn participant(&self) -> u64;

    /// Claims what a message grants.
    fn take(&mut self, message: &Message, dice: &mut Dice) -> Result<Taken<Self::Held>, String>;

    /// Says whether a block contains what it should, as far as anything was promised.
    fn is_intact(&mut self, held: &Self::Held, message: &Message) -> Result<bool, String>;

    /// Says what can be said about a block that is not intact.
    fn describe(&self, held: &Self::Held, message: &Message) -> String;

    /// Says whether the producer is gone.
    fn is_gone(&self) -> bool;

    /// Makes a grant for another out of a lease.
    fn forward(
        &mut self,
        held: &Self::Held,
        to: u64,
        message: &Message,
    ) -> Result<Option<Message>, String>;

    /// Returns where a forked child can write to a block.
    fn memory(&self, held: &Self::Held) -> Option<(*mut u8, usize)>;

    /// Has something written to a block after this process' death, if the device can.
    fn write_late(&mut self, held: &Self::Held, delay: Duration) -> Result<bool, String>;
}
