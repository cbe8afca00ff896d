//! What a broker says to participants.

use arrayvec::ArrayVec;
use transport::shared::slot::Generation;
use transport::wire::field::Field;
use transport::wire::packet::{Malformed, Reader, Writer, malformed};
use transport::wire::refusal::RefusalCode;
use transport::{messages, record};

use crate::object::identity::{Epoch, Identity, Lineage};
use crate::object::layout::MOST_REGIONS;
use crate::pool::Previous;

/// Where the write lease of one region is written down: in the participant's counter file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LeaseSlot {
    /// The slot.
    pub slot: u32,
    /// Its generation.
    pub generation: Generation,
}

record!(LeaseSlot { slot [4], generation });

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

impl Field for Standing {
    fn write(&self, w: &mut Writer<'_>) {
        let (state, epoch) = match self {
            Standing::Committed(epoch) => (1, *epoch),
            Standing::Unfinished => (2, Epoch(0)),
            Standing::Unknown => (3, Epoch(0)),
        };
        w.u32(state);
        w.u32(0);
        epoch.write(w);
    }

    fn read(r: &mut Reader<'_>) -> Result<Standing, Malformed> {
        let state = r.u32()?;
        r.zeros::<4>()?;
        match (state, Epoch::read(r)?) {
            (1, epoch) => Ok(Standing::Committed(epoch)),
            (2, Epoch(0)) => Ok(Standing::Unfinished),
            (3, Epoch(0)) => Ok(Standing::Unknown),
            _ => Err(malformed(
                "the state of a commit",
                state,
                "1 with an epoch, or 2 or 3 without",
            )),
        }
    }
}

messages! {
    /// A message to a participant. The table of [`wire`](crate::wire) has the bytes.
    #[derive(Clone, PartialEq, Eq, Debug)]
    #[allow(
        clippy::large_enum_variant,
        reason = "it lives for one call on the stack; a box would be an allocation a message"
    )]
    pub enum ToClient of super::packet::PROTOCOL, "129 to 140" {
        /// Answers a hello: the broker's pidfd and the participant's counter file come with it.
        129 Welcome [2] {
            /// Which history the broker's epochs are of; of no meaning before version 2.
            lineage: Lineage,
            /// The participant's number.
            participant: u64,
            /// The broker's process, as it counts itself.
            pid: u32,
            /// Slots of the counter file.
            slots: u32,
        }
        /// Answers a hello, and is the last message.
        130 Refused {
            /// Why.
            refusal: RefusalCode,
            /// The lowest version that the broker speaks.
            lowest: u16,
            /// The highest.
            highest: u16,
            /// Why, for people.
            why: String,
        }
        /// Answers a create; the regions come with it.
        131 Created(request) [leases.len()] {
            /// What regions were rounded up to.
            granularity: u64,
            /// The write lease of each region.
            leases: ArrayVec<LeaseSlot, MOST_REGIONS>,
        }
        /// Answers a commit.
        132 Committed(request) {
            /// The object's epoch.
            epoch: Epoch,
        }
        /// Answers the question what became of a commit.
        133 Outcome(request) {
            /// What became of it.
            standing: Standing,
        }
        /// Answers an abort and a close.
        134 Noted(request) {}
        /// Answers an open; the manifest and the regions come with it.
        135 Opened(request) [1 + *regions as usize] {
            /// Which object.
            identity: Identity,
            /// Its epoch.
            epoch: Epoch,
            /// How many regions it has.
            regions: u32 [4],
        }
        /// Answers a watch, once there is a newer epoch.
        136 Newer(request) {
            /// Which object.
            identity: Identity,
            /// Its epoch.
            epoch: Epoch,
        }
        /// Answers a removal.
        137 Removed(request) {
            /// The last epoch that the name had.
            epoch: Epoch,
        }
        /// Lists the objects; a sealed file comes with it.
        138 Listing(request) [1] {
            /// Bytes of JSON.
            bytes: u64,
        }
        /// Answers any question with no.
        139 Declined(request) {
            /// Why.
            refusal: RefusalCode,
            /// Why, for people.
            why: String,
        }
        /// Answers an adopt and the lease of a pool for reading; the manifest, the regions and the
        /// journal come with it.
        140 Pool(request) [1 + *files as usize] {
            /// Which object.
            identity: Identity,
            /// How often the pool was adopted.
            generation: u64,
            /// How the hold before this one ended.
            previous: Previous,
            /// Regions and journal.
            files: u32,
        }
    }
}

impl ToClient {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            ToClient::Opened { regions, .. } if *regions as usize > MOST_REGIONS => {
                Err(malformed("the number of regions", *regions, "at most 16"))
            }
            ToClient::Pool { files, .. } if !(2..=MOST_REGIONS as u32).contains(files) => {
                Err(malformed("the files of a pool", *files, "2 to 16"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::PROTOCOL;
    use crate::wire::property::{check_canonical, check_survival};
    use proptest::prelude::*;

    fn any_message() -> impl Strategy<Value = ToClient> {
        let epoch = || any::<u64>().prop_map(Epoch);
        let identity = || any::<[u8; 16]>().prop_map(Identity);
        let of_brokers = |code: &RefusalCode| PROTOCOL.refuses(*code as u16);
        let codes: Vec<RefusalCode> = RefusalCode::ALL
            .iter()
            .copied()
            .filter(of_brokers)
            .collect();
        let refusal = || proptest::sample::select(codes.clone());
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
                |(lineage, (participant, pid, slots))| ToClient::Welcome {
                    lineage: Lineage(lineage),
                    participant,
                    pid,
                    slots,
                }
            ),
            (refusal(), any::<(u16, u16)>(), "[a-z é]{0,40}").prop_map(
                |(refusal, (lowest, highest), why)| ToClient::Refused {
                    refusal,
                    lowest,
                    highest,
                    why,
                }
            ),
            (
                any::<(u64, u64)>(),
                proptest::collection::vec(lease, 0..=MOST_REGIONS)
            )
                .prop_map(|((request, granularity), leases)| ToClient::Created {
                    request,
                    granularity,
                    leases: leases.into_iter().collect(),
                }),
            (any::<u64>(), epoch())
                .prop_map(|(request, epoch)| ToClient::Committed { request, epoch }),
            (any::<u64>(), standing)
                .prop_map(|(request, standing)| ToClient::Outcome { request, standing }),
            any::<u64>().prop_map(|request| ToClient::Noted { request }),
            (any::<u64>(), identity(), epoch(), 0..=MOST_REGIONS as u32).prop_map(
                |(request, identity, epoch, regions)| ToClient::Opened {
                    request,
                    identity,
                    epoch,
                    regions,
                }
            ),
            (any::<u64>(), identity(), epoch()).prop_map(|(request, identity, epoch)| {
                ToClient::Newer {
                    request,
                    identity,
                    epoch,
                }
            }),
            (any::<u64>(), epoch())
                .prop_map(|(request, epoch)| ToClient::Removed { request, epoch }),
            any::<(u64, u64)>().prop_map(|(request, bytes)| ToClient::Listing { request, bytes }),
            (
                any::<u64>(),
                identity(),
                any::<u64>(),
                0u8..3,
                2..=MOST_REGIONS as u32
            )
                .prop_map(|(request, identity, generation, previous, files)| {
                    ToClient::Pool {
                        request,
                        identity,
                        generation,
                        previous: Previous::of(previous).expect("one of three"),
                        files,
                    }
                }),
            (any::<u64>(), refusal(), "[a-z é]{0,40}").prop_map(|(request, refusal, why)| {
                ToClient::Declined {
                    request,
                    refusal,
                    why,
                }
            }),
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
