//! Why a producer refuses, as a number that both sides know. 3 and 9 were defined and never sent:
//! they stay unused.

/// Why a producer refuses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum RefusalCode {
    /// The versions differ.
    Version = 1,
    /// The user may not connect.
    User = 2,
    /// The vendors or the devices differ.
    Device = 4,
    /// The message breaks the protocol.
    Protocol = 5,
    /// A limit of the producer is reached.
    Limit = 6,
    /// The session shuts down.
    Closing = 7,
    /// The region is unknown, gone, or none of its blocks is leased to the participant.
    Region = 8,
    /// A call of the producer's driver or system failed.
    Failed = 10,
    /// The participant has no such lease.
    Lease = 11,
    /// The participant that is addressed is unknown, dead or gone.
    Addressee = 12,
    /// The session's source of regions tells nothing of itself.
    Snapshot = 13,
}

impl RefusalCode {
    pub(super) const ALL: [RefusalCode; 11] = [
        RefusalCode::Version,
        RefusalCode::User,
        RefusalCode::Device,
        RefusalCode::Protocol,
        RefusalCode::Limit,
        RefusalCode::Closing,
        RefusalCode::Region,
        RefusalCode::Failed,
        RefusalCode::Lease,
        RefusalCode::Addressee,
        RefusalCode::Snapshot,
    ];

    pub(super) fn from_number(number: u16) -> Option<RefusalCode> {
        Self::ALL.into_iter().find(|&code| code as u16 == number)
    }

    /// Returns what the participant can do about it.
    pub const fn remedy(self) -> &'static str {
        match self {
            RefusalCode::Version => "build both sides from one version of gpu-ipc",
            RefusalCode::User => "add this user to the producer's `allow_uids`",
            RefusalCode::Device => "open the participant on the producer's device",
            RefusalCode::Protocol => "connect to a session of gpu-ipc, from gpu-ipc",
            RefusalCode::Limit => "raise the producer's limit, or hold less",
            RefusalCode::Closing => "connect to a session that stays open",
            RefusalCode::Region => "claim a block of the region first",
            RefusalCode::Failed => "look at the producer's log",
            RefusalCode::Lease => "forward a block that is held",
            RefusalCode::Addressee => {
                "forward to a participant that is connected to the same session"
            }
            RefusalCode::Snapshot => {
                "open the session on an `allocators::Arena`; `gpu-ipc ls` shows its sums"
            }
        }
    }
}
