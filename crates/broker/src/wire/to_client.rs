//! What a broker says to participants.

use transport::shared::slot::Generation;
use transport::wire::packet::MOST_BYTES;

use super::Refusal;
use super::packet::{DecodeError, check, check_version, epoch, identity, malformed, read, start};
use crate::object::identity::{Epoch, Identity};
use crate::object::layout::MOST_REGIONS;

/// Where the write lease of one region is written down: in the participant's counter file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LeaseSlot {
    /// The slot.
    pub slot: u32,
    /// Its generation.
    pub generation: Generation,
}

/// What became of a commit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Standing {
    /// The object became visible under this epoch.
    Committed(Epoch),
    /// It is still being filled, or is about to become visible.
    Unfinished,
    /// No object of this identity is known: it never became visible, or was removed long ago.
    Unknown,
}

/// A message to a participant. The table of [`wire`](crate::wire) has the bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToClient {
    /// Answers a hello: the broker's pidfd and the participant's counter file come with it.
    Welcome {
        /// Drawn by every broker anew.
        incarnation: [u8; 16],
        /// The participant's number.
        participant: u64,
        /// The broker's process, as it counts itself.
        pid: u32,
        /// Slots of the counter file.
        slots: u32,
    },
    /// Answers a hello, and is the last message.
    Refused {
        /// Why.
        refusal: Refusal,
        /// The lowest version that the broker speaks.
        lowest: u16,
        /// The highest.
        highest: u16,
        /// Why, for people.
        why: String,
    },
    /// Answers a create; the regions come with it.
    Created {
        /// The asker's number.
        request: u64,
        /// What regions were rounded up to.
        granularity: u64,
        /// The write lease of each region.
        leases: Vec<LeaseSlot>,
    },
    /// Answers a commit.
    Committed {
        /// The asker's number.
        request: u64,
        /// The object's epoch.
        epoch: Epoch,
    },
    /// Answers the question what became of a commit.
    Outcome {
        /// The asker's number.
        request: u64,
        /// What became of it.
        standing: Standing,
    },
    /// Answers an abort and a close.
    Noted {
        /// The asker's number.
        request: u64,
    },
    /// Answers an open; the manifest and the regions come with it.
    Opened {
        /// The asker's number.
        request: u64,
        /// Which object.
        identity: Identity,
        /// Its epoch.
        epoch: Epoch,
    },
    /// Answers a watch, once there is a newer epoch.
    Newer {
        /// The asker's number.
        request: u64,
        /// Which object.
        identity: Identity,
        /// Its epoch.
        epoch: Epoch,
    },
    /// Answers a removal.
    Removed {
        /// The asker's number.
        request: u64,
        /// The last epoch that the name had.
        epoch: Epoch,
    },
    /// Lists the objects; a sealed file comes with it.
    Listing {
        /// The asker's number.
        request: u64,
        /// Bytes of JSON.
        bytes: u64,
    },
    /// Answers any question with no.
    Declined {
        /// The asker's number.
        request: u64,
        /// Why.
        refusal: Refusal,
        /// Why, for people.
        why: String,
    },
}

impl ToClient {
    /// Writes it and returns its bytes. `fds` says how many descriptors come with it, `version`
    /// what was agreed on.
    pub fn encode(&self, packet: &mut [u8; MOST_BYTES], version: u16, fds: usize) -> usize {
        let begin = |packet, number, request| start(packet, version, number, fds, request);
        let object = |packet, number, request, identity: Identity, epoch: Epoch| {
            let mut w = start(packet, version, number, fds, request);
            w.put(&identity.0);
            w.u64(epoch.0);
            w
        };
        let w = match self {
            ToClient::Welcome {
                incarnation,
                participant,
                pid,
                slots,
            } => {
                let mut w = begin(packet, 129, 0);
                w.put(incarnation);
                w.u64(*participant);
                w.u32(*pid);
                w.u32(*slots);
                w
            }
            ToClient::Refused {
                refusal,
                lowest,
                highest,
                why,
            } => {
                let mut w = begin(packet, 130, 0);
                w.u16(*refusal as u16);
                w.u16(*lowest);
                w.u16(*highest);
                w.text(why);
                w
            }
            ToClient::Created {
                request,
                granularity,
                leases,
            } => {
                let mut w = begin(packet, 131, *request);
                w.u64(*granularity);
                w.u32(leases.len() as u32);
                w.u32(0);
                for lease in leases {
                    w.u32(lease.slot);
                    w.u32(0);
                    w.u64(lease.generation.get());
                }
                w
            }
            ToClient::Committed { request, epoch } => {
                let mut w = begin(packet, 132, *request);
                w.u64(epoch.0);
                w
            }
            ToClient::Outcome { request, standing } => {
                let (state, epoch) = match standing {
                    Standing::Committed(epoch) => (1, *epoch),
                    Standing::Unfinished => (2, Epoch(0)),
                    Standing::Unknown => (3, Epoch(0)),
                };
                let mut w = begin(packet, 133, *request);
                w.u32(state);
                w.u32(0);
                w.u64(epoch.0);
                w
            }
            ToClient::Noted { request } => begin(packet, 134, *request),
            ToClient::Opened {
                request,
                identity,
                epoch,
            } => object(packet, 135, *request, *identity, *epoch),
            ToClient::Newer {
                request,
                identity,
                epoch,
            } => object(packet, 136, *request, *identity, *epoch),
            ToClient::Removed { request, epoch } => {
                let mut w = begin(packet, 137, *request);
                w.u64(epoch.0);
                w
            }
            ToClient::Listing { request, bytes } => {
                let mut w = begin(packet, 138, *request);
                w.u64(*bytes);
                w
            }
            ToClient::Declined {
                request,
                refusal,
                why,
            } => {
                let mut w = begin(packet, 139, *request);
                w.u16(*refusal as u16);
                w.text(why);
                w
            }
        };
        w.end()
    }

    /// Reads a message that came with this many descriptors.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] for anything that [`encode`](ToClient::encode) does not write.
    pub fn decode(packet: &[u8], fds: usize) -> Result<ToClient, DecodeError> {
        let (header, mut r) = read(packet)?;
        if header.number != 130 {
            check_version(&header)?;
        }
        let refusal = |number| {
            Refusal::from_number(number)
                .ok_or_else(|| malformed("the refusal's code", number, "1 to 15"))
        };
        let request = header.request;
        let message = match header.number {
            129 => ToClient::Welcome {
                incarnation: r.array()?,
                participant: r.u64()?,
                pid: r.u32()?,
                slots: r.u32()?,
            },
            130 => ToClient::Refused {
                refusal: refusal(r.u16()?)?,
                lowest: r.u16()?,
                highest: r.u16()?,
                why: r.text()?,
            },
            131 => {
                let granularity = r.u64()?;
                let count = r.u32()? as usize;
                r.zeros::<4>()?;
                if count > MOST_REGIONS {
                    return Err(malformed("the number of regions", count, "at most 16"));
                }
                let mut leases = Vec::with_capacity(count);
                for _ in 0..count {
                    let slot = r.u32()?;
                    r.zeros::<4>()?;
                    let number = r.u64()?;
                    let generation = Generation::new(number)
                        .ok_or_else(|| malformed("the generation", number, "below 2^61"))?;
                    leases.push(LeaseSlot { slot, generation });
                }
                ToClient::Created {
                    request,
                    granularity,
                    leases,
                }
            }
            132 => ToClient::Committed {
                request,
                epoch: epoch(&mut r)?,
            },
            133 => {
                let state = r.u32()?;
                r.zeros::<4>()?;
                let standing = match (state, epoch(&mut r)?) {
                    (1, epoch) => Standing::Committed(epoch),
                    (2, Epoch(0)) => Standing::Unfinished,
                    (3, Epoch(0)) => Standing::Unknown,
                    _ => {
                        return Err(malformed(
                            "the state of a commit",
                            state,
                            "1 with an epoch, or 2 or 3 without",
                        ));
                    }
                };
                ToClient::Outcome { request, standing }
            }
            134 => ToClient::Noted { request },
            135 => ToClient::Opened {
                request,
                identity: identity(&mut r)?,
                epoch: epoch(&mut r)?,
            },
            136 => ToClient::Newer {
                request,
                identity: identity(&mut r)?,
                epoch: epoch(&mut r)?,
            },
            137 => ToClient::Removed {
                request,
                epoch: epoch(&mut r)?,
            },
            138 => ToClient::Listing {
                request,
                bytes: r.u64()?,
            },
            139 => ToClient::Declined {
                request,
                refusal: refusal(r.u16()?)?,
                why: r.text()?,
            },
            number => return Err(malformed("the type", number, "129 to 139")),
        };
        if matches!(message, ToClient::Welcome { .. } | ToClient::Refused { .. }) && request != 0 {
            return Err(malformed(
                "the request",
                request,
                "0 in a message that has none",
            ));
        }
        check(&header, &r, fds, |came| match &message {
            ToClient::Welcome { .. } => came == 2,
            ToClient::Created { leases, .. } => came == leases.len(),
            ToClient::Opened { .. } => (1..=1 + MOST_REGIONS).contains(&came),
            ToClient::Listing { .. } => came == 1,
            _ => came == 0,
        })?;
        Ok(message)
    }

    /// Returns the question that it answers; 0 for none.
    pub fn request(&self) -> u64 {
        match self {
            ToClient::Welcome { .. } | ToClient::Refused { .. } => 0,
            ToClient::Created { request, .. }
            | ToClient::Committed { request, .. }
            | ToClient::Outcome { request, .. }
            | ToClient::Noted { request }
            | ToClient::Opened { request, .. }
            | ToClient::Newer { request, .. }
            | ToClient::Removed { request, .. }
            | ToClient::Listing { request, .. }
            | ToClient::Declined { request, .. } => *request,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_message() -> impl Strategy<Value = (ToClient, usize)> {
        let epoch = || any::<u64>().prop_map(Epoch);
        let identity = || any::<[u8; 16]>().prop_map(Identity);
        let refusal =
            || (1u16..=15).prop_map(|number| Refusal::from_number(number).expect("one of ours"));
        let lease = (any::<u32>(), 0u64..1 << 61).prop_map(|(slot, generation)| LeaseSlot {
            slot,
            generation: Generation::new(generation).expect("61 bits"),
        });
        let standing = prop_oneof![
            epoch().prop_map(Standing::Committed),
            Just(Standing::Unfinished),
            Just(Standing::Unknown)
        ];
        prop_oneof![
            (any::<[u8; 16]>(), any::<(u64, u32, u32)>()).prop_map(
                |(incarnation, (participant, pid, slots))| {
                    (
                        ToClient::Welcome {
                            incarnation,
                            participant,
                            pid,
                            slots,
                        },
                        2,
                    )
                }
            ),
            (refusal(), any::<(u16, u16)>(), "[a-z é]{0,40}").prop_map(
                |(refusal, (lowest, highest), why)| {
                    (
                        ToClient::Refused {
                            refusal,
                            lowest,
                            highest,
                            why,
                        },
                        0,
                    )
                }
            ),
            (
                any::<u64>(),
                any::<u64>(),
                proptest::collection::vec(lease, 0..=MOST_REGIONS)
            )
                .prop_map(|(request, granularity, leases)| {
                    let fds = leases.len();
                    (
                        ToClient::Created {
                            request,
                            granularity,
                            leases,
                        },
                        fds,
                    )
                }),
            (any::<u64>(), epoch())
                .prop_map(|(request, epoch)| (ToClient::Committed { request, epoch }, 0)),
            (any::<u64>(), standing)
                .prop_map(|(request, standing)| (ToClient::Outcome { request, standing }, 0)),
            any::<u64>().prop_map(|request| (ToClient::Noted { request }, 0)),
            (any::<u64>(), identity(), epoch()).prop_map(|(request, identity, epoch)| (
                ToClient::Opened {
                    request,
                    identity,
                    epoch
                },
                4
            )),
            (any::<u64>(), identity(), epoch()).prop_map(|(request, identity, epoch)| (
                ToClient::Newer {
                    request,
                    identity,
                    epoch
                },
                0
            )),
            (any::<u64>(), epoch())
                .prop_map(|(request, epoch)| (ToClient::Removed { request, epoch }, 0)),
            any::<(u64, u64)>()
                .prop_map(|(request, bytes)| (ToClient::Listing { request, bytes }, 1)),
            (any::<u64>(), refusal(), "[a-z é]{0,40}").prop_map(|(request, refusal, why)| (
                ToClient::Declined {
                    request,
                    refusal,
                    why
                },
                0
            )),
        ]
    }

    proptest! {
        #[test]
        fn a_message_survives_its_bytes((message, fds) in any_message()) {
            let mut packet = [0; MOST_BYTES];
            let len = message.encode(&mut packet, 1, fds);
            prop_assert_eq!(ToClient::decode(&packet[..len], fds).expect("its own bytes"), message);
            prop_assert!(ToClient::decode(&packet[..len - 1], fds).is_err());
            prop_assert!(ToClient::decode(&packet[..=len], fds).is_err());
        }

        #[test]
        fn no_bytes_panic_and_what_decodes_is_canonical(
            (message, fds) in any_message(), at in any::<proptest::sample::Index>(), with: u8,
        ) {
            let mut packet = [0; MOST_BYTES];
            let len = message.encode(&mut packet, 1, fds);
            packet[at.index(len)] = with;
            if let Ok(message) = ToClient::decode(&packet[..len], fds) {
                let mut again = [0; MOST_BYTES];
                let version = u16::from_le_bytes([packet[2], packet[3]]);
                prop_assert_eq!(message.encode(&mut again, version, fds), len);
                prop_assert_eq!(&again[..len], &packet[..len]);
            }
        }
    }
}
