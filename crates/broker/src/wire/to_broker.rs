//! What participants say to a broker.

use transport::wire::packet::MOST_BYTES;

use super::packet::{DecodeError, check, check_version, epoch, identity, malformed, read, start};
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

/// A message to a broker. The table of [`wire`](crate::wire) has the bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToBroker {
    /// The first message: who connects, with its pidfd and those of descendants that keep the
    /// device's files.
    Hello {
        /// The lowest version that it speaks.
        lowest: u16,
        /// The highest.
        highest: u16,
        /// It shares a context of the driver with other processes.
        shared_context: bool,
        /// The name that it gives itself, for people.
        name: String,
    },
    /// Make the regions of an object, leased to this participant. The draft of its manifest comes
    /// with it.
    Create {
        /// The asker's number.
        request: u64,
        /// Which object.
        identity: Identity,
        /// It is never committed, and goes with its writer.
        scratch: bool,
        /// Give up the name's epochs first.
        replace: bool,
        /// The epoch that the name must have at the commit.
        expect: Option<Epoch>,
        /// The regions that are taken over from the name's newest epoch, one bit each: no memory is
        /// made for them.
        taken: u16,
    },
    /// Make an object visible: its writer has ended its leases.
    Commit {
        /// The asker's number.
        request: u64,
        /// Which object.
        identity: Identity,
    },
    /// What became of a commit?
    AskOutcome {
        /// The asker's number.
        request: u64,
        /// Of which object.
        identity: Identity,
    },
    /// Give an unfinished object up.
    Abort {
        /// The asker's number.
        request: u64,
        /// Which object.
        identity: Identity,
    },
    /// Lease an object for reading.
    Open {
        /// The asker's number.
        request: u64,
        /// Which object.
        selector: Selector,
    },
    /// The lease has ended.
    Close {
        /// The asker's number.
        request: u64,
        /// Which object.
        identity: Identity,
    },
    /// Tell when the name has an epoch newer than this.
    Watch {
        /// The asker's number.
        request: u64,
        /// The epoch that was seen; 0 for none.
        seen: Epoch,
        /// Which name.
        name: String,
    },
    /// Remove one epoch of a name, or all of it.
    Remove {
        /// The asker's number.
        request: u64,
        /// Which epoch; 0 for all.
        epoch: Epoch,
        /// Which name.
        name: String,
    },
    /// Asks for the objects and their readers.
    List {
        /// The asker's number.
        request: u64,
    },
}

impl ToBroker {
    /// Writes it and returns its bytes. `fds` says how many descriptors come with it, `version`
    /// what was agreed on.
    pub fn encode(&self, packet: &mut [u8; MOST_BYTES], version: u16, fds: usize) -> usize {
        let begin = |packet, number, request| start(packet, version, number, fds, request);
        let about = |packet, number, request, identity: Identity| {
            let mut w = start(packet, version, number, fds, request);
            w.put(&identity.0);
            w
        };
        let w = match self {
            ToBroker::Hello {
                lowest,
                highest,
                shared_context,
                name,
            } => {
                let mut w = start(packet, *lowest, 1, fds, 0);
                w.u16(*highest);
                w.u16(u16::from(*shared_context));
                w.text(name);
                w
            }
            ToBroker::Create {
                request,
                identity,
                scratch,
                replace,
                expect,
                taken,
            } => {
                let mut w = about(packet, 2, *request, *identity);
                w.u32(
                    u32::from(*scratch)
                        | u32::from(*replace) << 1
                        | u32::from(expect.is_some()) << 2,
                );
                w.u32(u32::from(*taken));
                w.u64(expect.map_or(0, |epoch| epoch.0));
                w
            }
            ToBroker::Commit { request, identity } => about(packet, 3, *request, *identity),
            ToBroker::AskOutcome { request, identity } => about(packet, 4, *request, *identity),
            ToBroker::Abort { request, identity } => about(packet, 5, *request, *identity),
            ToBroker::Open { request, selector } => {
                let (kind, epoch, identity, name) = match selector {
                    Selector::Latest(name) => (0, Epoch(0), Identity([0; 16]), name.as_str()),
                    Selector::Epoch(name, epoch) => (1, *epoch, Identity([0; 16]), name.as_str()),
                    Selector::Identity(identity) => (2, Epoch(0), *identity, ""),
                };
                let mut w = begin(packet, 6, *request);
                w.put(&[kind, 0, 0, 0, 0, 0, 0, 0]);
                w.u64(epoch.0);
                w.put(&identity.0);
                w.text(name);
                w
            }
            ToBroker::Close { request, identity } => about(packet, 7, *request, *identity),
            ToBroker::Watch {
                request,
                seen,
                name,
            } => {
                let mut w = begin(packet, 8, *request);
                w.u64(seen.0);
                w.text(name);
                w
            }
            ToBroker::Remove {
                request,
                epoch,
                name,
            } => {
                let mut w = begin(packet, 9, *request);
                w.u64(epoch.0);
                w.text(name);
                w
            }
            ToBroker::List { request } => begin(packet, 10, *request),
        };
        w.end()
    }

    /// Reads a message that came with this many descriptors.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] for anything that [`encode`](ToBroker::encode) does not write.
    pub fn decode(packet: &[u8], fds: usize) -> Result<ToBroker, DecodeError> {
        let (header, mut r) = read(packet)?;
        if header.number != 1 {
            check_version(&header)?;
        }
        let request = header.request;
        let message = match header.number {
            1 => {
                let (highest, flags) = (r.u16()?, r.u16()?);
                if flags > 1 || request != 0 {
                    return Err(malformed(
                        "the flags of a hello",
                        flags,
                        "0 or 1, and no request",
                    ));
                }
                ToBroker::Hello {
                    lowest: header.version,
                    highest,
                    shared_context: flags == 1,
                    name: r.text()?,
                }
            }
            2 => {
                let identity = identity(&mut r)?;
                let flags = r.u32()?;
                let regions = r.u32()?;
                let Ok(taken) = u16::try_from(regions) else {
                    return Err(malformed(
                        "the regions that are taken over",
                        regions,
                        "bits 0 to 15",
                    ));
                };
                let epoch = epoch(&mut r)?;
                if flags > 7 || (flags & 4 == 0 && epoch != Epoch(0)) {
                    return Err(malformed(
                        "the flags of a create",
                        flags,
                        "1, 2 and 4, and no epoch without 4",
                    ));
                }
                let expect = (flags & 4 != 0).then_some(epoch);
                let (scratch, replace) = (flags & 1 != 0, flags & 2 != 0);
                ToBroker::Create {
                    request,
                    identity,
                    scratch,
                    replace,
                    expect,
                    taken,
                }
            }
            3 => ToBroker::Commit {
                request,
                identity: identity(&mut r)?,
            },
            4 => ToBroker::AskOutcome {
                request,
                identity: identity(&mut r)?,
            },
            5 => ToBroker::Abort {
                request,
                identity: identity(&mut r)?,
            },
            6 => {
                let [kind] = r.array()?;
                r.zeros::<7>()?;
                let (epoch, identity, name) = (epoch(&mut r)?, identity(&mut r)?, r.text()?);
                let (no_epoch, no_identity) = (epoch == Epoch(0), identity == Identity([0; 16]));
                let selector = match kind {
                    0 if no_epoch && no_identity => Selector::Latest(name),
                    1 if no_identity => Selector::Epoch(name, epoch),
                    2 if no_epoch && name.is_empty() => Selector::Identity(identity),
                    _ => {
                        return Err(malformed(
                            "the kind of an open",
                            kind,
                            "0, 1 or 2, with its own fields alone",
                        ));
                    }
                };
                ToBroker::Open { request, selector }
            }
            7 => ToBroker::Close {
                request,
                identity: identity(&mut r)?,
            },
            8 => ToBroker::Watch {
                request,
                seen: epoch(&mut r)?,
                name: r.text()?,
            },
            9 => ToBroker::Remove {
                request,
                epoch: epoch(&mut r)?,
                name: r.text()?,
            },
            10 => ToBroker::List { request },
            number => return Err(malformed("the type", number, "1 to 10")),
        };
        check(&header, &r, fds, |came| match message {
            ToBroker::Hello { .. } => came >= 1,
            ToBroker::Create { .. } => came == 1,
            _ => came == 0,
        })?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_identity() -> impl Strategy<Value = Identity> {
        any::<[u8; 16]>().prop_map(Identity)
    }

    fn any_message() -> impl Strategy<Value = (ToBroker, usize)> {
        let epoch = || any::<u64>().prop_map(Epoch);
        let name = || "[a-z/é]{0,20}";
        let selector = prop_oneof![
            name().prop_map(Selector::Latest),
            (name(), epoch()).prop_map(|(name, epoch)| Selector::Epoch(name, epoch)),
            any_identity().prop_map(Selector::Identity),
        ];
        prop_oneof![
            (any::<u16>(), any::<u16>(), any::<bool>(), name()).prop_map(
                |(lowest, highest, shared_context, name)| {
                    (
                        ToBroker::Hello {
                            lowest,
                            highest,
                            shared_context,
                            name,
                        },
                        3,
                    )
                }
            ),
            (
                any::<u64>(),
                any_identity(),
                any::<(bool, bool, u16)>(),
                proptest::option::of(epoch())
            )
                .prop_map(|(request, identity, (scratch, replace, taken), expect)| {
                    (
                        ToBroker::Create {
                            request,
                            identity,
                            scratch,
                            replace,
                            expect,
                            taken,
                        },
                        1,
                    )
                }),
            (any::<u64>(), any_identity())
                .prop_map(|(request, identity)| (ToBroker::Commit { request, identity }, 0)),
            (any::<u64>(), any_identity())
                .prop_map(|(request, identity)| (ToBroker::AskOutcome { request, identity }, 0)),
            (any::<u64>(), any_identity())
                .prop_map(|(request, identity)| (ToBroker::Abort { request, identity }, 0)),
            (any::<u64>(), selector)
                .prop_map(|(request, selector)| (ToBroker::Open { request, selector }, 0)),
            (any::<u64>(), any_identity())
                .prop_map(|(request, identity)| (ToBroker::Close { request, identity }, 0)),
            (any::<u64>(), epoch(), name()).prop_map(|(request, seen, name)| (
                ToBroker::Watch {
                    request,
                    seen,
                    name
                },
                0
            )),
            (any::<u64>(), epoch(), name()).prop_map(|(request, epoch, name)| (
                ToBroker::Remove {
                    request,
                    epoch,
                    name
                },
                0
            )),
            any::<u64>().prop_map(|request| (ToBroker::List { request }, 0)),
        ]
    }

    proptest! {
        #[test]
        fn a_message_survives_its_bytes((message, fds) in any_message()) {
            let mut packet = [0; MOST_BYTES];
            let len = message.encode(&mut packet, 1, fds);
            prop_assert_eq!(ToBroker::decode(&packet[..len], fds).expect("its own bytes"), message);
            prop_assert!(ToBroker::decode(&packet[..len], fds + 1).is_err());
            prop_assert!(ToBroker::decode(&packet[..len - 1], fds).is_err());
            prop_assert!(ToBroker::decode(&packet[..=len], fds).is_err());
        }

        #[test]
        fn no_bytes_panic_and_what_decodes_is_canonical(
            (message, fds) in any_message(), at in any::<proptest::sample::Index>(), with: u8,
        ) {
            let mut packet = [0; MOST_BYTES];
            let len = message.encode(&mut packet, 1, fds);
            packet[at.index(len)] = with;
            if let Ok(message) = ToBroker::decode(&packet[..len], fds) {
                let mut again = [0; MOST_BYTES];
                prop_assert_eq!(message.encode(&mut again, 1, fds), len);
                prop_assert_eq!(&again[..len], &packet[..len]);
            }
        }
    }
}
