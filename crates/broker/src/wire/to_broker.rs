//! What participants say to a broker.

use transport::messages;
use transport::os::process::MOST_DESCENDANTS;
use transport::wire::field::Field;
use transport::wire::packet::{Malformed, Reader, Writer, malformed};

use crate::object::identity::{Epoch, Identity};

/// Which object of a broker.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Selector {
    /// The newest of a name.
    Latest(String),
    /// This epoch of a name.
    Epoch(String, Epoch),
    /// This one.
    Identity(Identity),
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Selector::Latest(name) => write!(f, "{name}"),
            Selector::Epoch(name, epoch) => write!(f, "epoch {epoch} of {name}"),
            Selector::Identity(identity) => write!(f, "the object {identity}"),
        }
    }
}

impl Field for Selector {
    fn write(&self, w: &mut Writer<'_>) {
        let (kind, epoch, identity, name) = match self {
            Selector::Latest(name) => (0, Epoch(0), Identity([0; 16]), name.as_str()),
            Selector::Epoch(name, epoch) => (1, *epoch, Identity([0; 16]), name.as_str()),
            Selector::Identity(identity) => (2, Epoch(0), *identity, ""),
        };
        w.put(&[kind, 0, 0, 0, 0, 0, 0, 0]);
        epoch.write(w);
        identity.write(w);
        w.text(name);
    }

    fn read(r: &mut Reader<'_>) -> Result<Selector, Malformed> {
        let [kind] = r.array()?;
        r.zeros::<7>()?;
        let (epoch, identity, name) = (Epoch::read(r)?, Identity::read(r)?, r.text()?);
        let (no_epoch, no_identity) = (epoch == Epoch(0), identity == Identity([0; 16]));
        match kind {
            0 if no_epoch && no_identity => Ok(Selector::Latest(name)),
            1 if no_identity => Ok(Selector::Epoch(name, epoch)),
            2 if no_epoch && name.is_empty() => Ok(Selector::Identity(identity)),
            _ => Err(malformed(
                "the kind of an open",
                kind,
                "0, 1 or 2, with its own fields alone",
            )),
        }
    }
}

/// The epoch by which a removal means what a name has that is not committed: none has it.
pub const UNFINISHED: Epoch = Epoch(u64::MAX);

/// What a create asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wanted {
    /// It is never committed, and goes with its writer.
    pub scratch: bool,
    /// The name's epochs are given up before memory is made.
    pub replace: bool,
    /// The epoch that the name must have, at the create and at the commit.
    pub expect: Option<Epoch>,
    /// The regions to take over from the name's newest epoch, one bit each: no memory is made for
    /// them.
    pub taken: u16,
}

impl Field for Wanted {
    fn write(&self, w: &mut Writer<'_>) {
        w.u32(
            u32::from(self.scratch)
                | u32::from(self.replace) << 1
                | u32::from(self.expect.is_some()) << 2,
        );
        w.u32(self.taken.into());
        w.u64(self.expect.map_or(0, |epoch| epoch.0));
    }

    fn read(r: &mut Reader<'_>) -> Result<Wanted, Malformed> {
        let (flags, regions, epoch) = (r.u32()?, r.u32()?, Epoch::read(r)?);
        let taken = u16::try_from(regions)
            .map_err(|_| malformed("the regions that are taken over", regions, "bits 0 to 15"))?;
        if flags > 7 || (flags & 4 == 0 && epoch != Epoch(0)) {
            return Err(malformed(
                "the flags of a create",
                flags,
                "1, 2 and 4, and no epoch without 4",
            ));
        }
        Ok(Wanted {
            scratch: flags & 1 != 0,
            replace: flags & 2 != 0,
            expect: (flags & 4 != 0).then_some(epoch),
            taken,
        })
    }
}

messages! {
    /// A message to a broker. The table of [`wire`](crate::wire) has the bytes.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub enum ToBroker of super::packet::PROTOCOL, "1 to 14" {
        /// The first message: who connects, with its pidfd and those of descendants that keep the
        /// device's files.
        1 Hello [1 + usize::from(*descendants)] {
            /// The lowest version that it speaks.
            lowest: u16,
            /// The highest.
            highest: u16,
            /// It shares a context of the driver with other processes.
            shared_context: bool [1],
            /// How many pidfds follow the first.
            descendants: u16,
            /// The name that it gives itself, for people.
            name: String,
        }
        /// Make the regions of an object, leased to this participant. The draft of its manifest
        /// comes with it.
        2 Create(request) [1] {
            /// Which object.
            identity: Identity,
            /// How.
            wanted: Wanted,
        }
        /// Make an object visible: its writer has ended its leases.
        3 Commit(request) {
            /// Which object.
            identity: Identity,
        }
        /// What became of a commit?
        4 AskOutcome(request) {
            /// Of which object.
            identity: Identity,
        }
        /// Give an unfinished object up.
        5 Abort(request) {
            /// Which object.
            identity: Identity,
        }
        /// Lease an object for reading.
        6 Open(request) {
            /// Which object.
            selector: Selector,
        }
        /// The lease has ended.
        7 Close(request) {
            /// Which object.
            identity: Identity,
        }
        /// Tell when the name has an epoch newer than this.
        8 Watch(request) {
            /// The epoch that was seen; 0 for none.
            seen: Epoch,
            /// Which name.
            name: String,
        }
        /// Remove one epoch of a name, or all of it.
        9 Remove(request) {
            /// Which epoch; 0 for all; [`UNFINISHED`] for what is not committed yet.
            epoch: Epoch,
            /// Which name.
            name: String,
        }
        /// Asks for the objects and their readers.
        10 List(request) {}
        /// Asks for the sums of a listing, with the objects of so many names alone that the answer
        /// costs the same however many there are; from version 3 on.
        11 Sum(request) {}
        /// Make this participant the holder of a pool. The end of a pipe comes with it, whose other end
        /// the holder keeps: it hangs up when no forked child of it is left.
        12 Adopt(request) [1] {
            /// Drawn by the asker: what it shows to end the hold.
            token: Identity,
            /// Which pool.
            name: String,
        }
        /// The hold has ended: nothing of the participant touches the pool any more.
        13 Release(request) {
            /// Of which hold.
            token: Identity,
            /// Of which pool.
            name: String,
        }
        /// Lease a pool for reading.
        14 ReadPool(request) {
            /// Which pool.
            name: String,
        }
    }
}

impl ToBroker {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            ToBroker::Hello { descendants, .. } if usize::from(*descendants) > MOST_DESCENDANTS => {
                Err(malformed(
                    "the number of descendants",
                    *descendants,
                    "at most 200",
                ))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::property::{check_canonical, check_survival};
    use proptest::prelude::*;

    fn any_identity() -> impl Strategy<Value = Identity> {
        any::<[u8; 16]>().prop_map(Identity)
    }

    fn any_message() -> impl Strategy<Value = ToBroker> {
        let epoch = || any::<u64>().prop_map(Epoch);
        let name = || "[a-z/é]{0,20}";
        let selector = prop_oneof![
            name().prop_map(Selector::Latest),
            (name(), epoch()).prop_map(|(name, epoch)| Selector::Epoch(name, epoch)),
            any_identity().prop_map(Selector::Identity),
        ];
        prop_oneof![
            (
                any::<u16>(),
                any::<u16>(),
                any::<bool>(),
                0u16..=200,
                name()
            )
                .prop_map(|(lowest, highest, shared_context, descendants, name)| {
                    ToBroker::Hello {
                        lowest,
                        highest,
                        shared_context,
                        descendants,
                        name,
                    }
                }),
            (
                any::<u64>(),
                any_identity(),
                any::<(bool, bool, u16)>(),
                proptest::option::of(epoch())
            )
                .prop_map(|(request, identity, (scratch, replace, taken), expect)| {
                    let wanted = Wanted {
                        scratch,
                        replace,
                        expect,
                        taken,
                    };
                    ToBroker::Create {
                        request,
                        identity,
                        wanted,
                    }
                }),
            (any::<u64>(), any_identity())
                .prop_map(|(request, identity)| ToBroker::Commit { request, identity }),
            (any::<u64>(), any_identity())
                .prop_map(|(request, identity)| ToBroker::AskOutcome { request, identity }),
            (any::<u64>(), any_identity())
                .prop_map(|(request, identity)| ToBroker::Abort { request, identity }),
            (any::<u64>(), selector)
                .prop_map(|(request, selector)| ToBroker::Open { request, selector }),
            (any::<u64>(), any_identity())
                .prop_map(|(request, identity)| ToBroker::Close { request, identity }),
            (any::<u64>(), epoch(), name()).prop_map(|(request, seen, name)| ToBroker::Watch {
                request,
                seen,
                name
            }),
            (any::<u64>(), epoch(), name()).prop_map(|(request, epoch, name)| ToBroker::Remove {
                request,
                epoch,
                name
            }),
            any::<u64>().prop_map(|request| ToBroker::List { request }),
            any::<u64>().prop_map(|request| ToBroker::Sum { request }),
            (any::<u64>(), any_identity(), name()).prop_map(|(request, token, name)| {
                ToBroker::Adopt {
                    request,
                    token,
                    name,
                }
            }),
            (any::<u64>(), any_identity(), name()).prop_map(|(request, token, name)| {
                ToBroker::Release {
                    request,
                    token,
                    name,
                }
            }),
            (any::<u64>(), name()).prop_map(|(request, name)| ToBroker::ReadPool { request, name }),
        ]
    }

    proptest! {
        #[test]
        fn a_message_survives_its_bytes(message in any_message()) {
            check_survival(&message)?;
        }

        #[test]
        fn no_bytes_panic_and_what_decodes_is_canonical(
            message in any_message(), at in any::<proptest::sample::Index>(), with: u8,
        ) {
            check_canonical(&message, at, with)?;
        }
    }
}
