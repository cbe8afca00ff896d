//! Why a server refuses, as a number that both sides know and that stays the same in every version.
//!
//! | numbers | of |
//! |---|---|
//! | 1 to 63 | sessions; 1, 2, 4, 5, 6 and 10 mean the same in every protocol |
//! | 64 to 127 | brokers |
//!
//! 3 and 9 were defined and never sent: they stay unused.

use super::field::Field;
use super::packet::{Malformed, Reader, Writer, malformed};

/// Makes the refusals: each with its number and what the other side can do about it.
macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $remedy:literal;)*) => {
        /// Why a server refuses.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u16)]
        #[non_exhaustive]
        pub enum RefusalCode {
            $($(#[$doc])* $name = $number,)*
        }

        impl RefusalCode {
            /// All of them.
            pub const ALL: &[RefusalCode] = &[$(RefusalCode::$name),*];

            /// Returns what the side that was refused can do about it.
            pub const fn remedy(self) -> &'static str {
                match self {
                    $(RefusalCode::$name => $remedy,)*
                }
            }
        }
    };
}

refusals! {
    /// No version is spoken by both sides.
    Version = 1, "build both sides from one version of gpu-ipc";
    /// The user may not connect, or not do this.
    User = 2, "allow this uid: a session by `allow_uids`, a broker by `--allow-uid` or `--allow-gid`, an object by its readers";
    /// The vendors or the devices differ, or the device is not served.
    Device = 4, "open the participant on the producer's device, or start the broker with this device";
    /// The message breaks the protocol.
    Protocol = 5, "connect to a session or a broker of gpu-ipc, from gpu-ipc";
    /// A limit of the server is reached.
    Limit = 6, "raise the limit of the producer or broker, or hold less";
    /// The session shuts down.
    Closing = 7, "connect to a session that stays open";
    /// The region is unknown, gone, or none of its blocks is leased to the participant.
    Region = 8, "claim a block of the region first";
    /// A call of the server's driver or system failed.
    Failed = 10, "look at the log of the producer or broker";
    /// The participant has no such lease.
    Lease = 11, "forward a block that is held";
    /// The participant that is addressed is unknown, dead or gone.
    Addressee = 12, "forward to a participant that is connected to the same session";
    /// The session's source of regions tells nothing of itself.
    Snapshot = 13, "open the session on an `allocators::Arena`; `gpu-ipc ls` shows its sums";
    /// The session keeps no such descriptor for the participant, or keeps another under the name.
    Deposit = 14, "deposit it first, under a name that is used once";
    /// The name, epoch or identity does not exist.
    NotFound = 64, "`gpu-ipc objects` lists what there is";
    /// The identity belongs to another object.
    Exists = 65, "draw another identity";
    /// The name has another epoch than was expected.
    Conflict = 66, "open the epoch that is there, then create again";
    /// No memory is left.
    OutOfMemory = 67, "remove objects, or create with `replace`";
    /// The object was aborted, or this participant is not its writer.
    NotWriter = 68, "create it again";
    /// The keeper does not take the object.
    Keeper = 69, "start `gpu-ipc keep` with more room, then commit again";
    /// The participant shares a context with other processes, so that its death proves nothing.
    SharedContext = 70, "write from a process that is not a client of MPS";
    /// The draft is not a valid manifest.
    Layout = 71, "correct the layout";
    /// The name is written on another host.
    Home = 72, "write it there, or give the object another name here";
    /// Another process holds the pool.
    Held = 73, "close the pool there, or end that process: its death is proven once its GPU work has ended";
    /// The name has a pool, or an object where a pool is asked for.
    Pool = 74, "adopt the pool that is there, choose another name, or remove the name first";
}

impl Field for RefusalCode {
    fn write(&self, w: &mut Writer<'_>) {
        w.u16(*self as u16);
    }

    fn read(r: &mut Reader<'_>) -> Result<RefusalCode, Malformed> {
        let (number, protocol) = (r.u16()?, r.protocol());
        let known = RefusalCode::ALL.iter().copied();
        known
            .filter(|code| protocol.refuses(*code as u16))
            .find(|&code| code as u16 == number)
            .ok_or_else(|| malformed("the refusal's code", number, protocol.refusals_are))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_a_number_of_its_own_and_a_remedy() {
        let numbers = RefusalCode::ALL.iter().map(|&code| code as u16);
        let distinct: std::collections::BTreeSet<u16> = numbers.collect();
        assert_eq!(distinct.len(), RefusalCode::ALL.len());
        assert!(
            RefusalCode::ALL
                .iter()
                .all(|code| !code.remedy().is_empty())
        );
        assert!(!distinct.contains(&3) && !distinct.contains(&9));
    }
}
