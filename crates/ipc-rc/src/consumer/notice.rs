//! What a participant tells its application.

use gpu_api::RegionId;

use crate::notices::Vital;
use transport::wire::descriptor::LeaseId;

/// Something an application may want to know at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Notice {
    /// The producer is dead or has closed its session: it grants nothing more. Held blocks stay
    /// readable.
    ProducerGone,
    /// The producer is closing its session: it grants nothing more, but existing grants can be
    /// claimed.
    Closing,
    /// The producer is short of memory and would like this region unmapped. Nothing has to be done:
    /// it is unmapped as soon as no block of it is held. An application that can drop such blocks
    /// helps.
    PleaseUnmap {
        /// The region, as [`ReceivedBlock::region`](crate::ReceivedBlock::region) gives it.
        region: RegionId,
    },
    /// A grant to this participant was taken back before it was claimed; its descriptor can be
    /// thrown away.
    Revoked {
        /// The grant, as [`Descriptor::lease`](crate::Descriptor::lease) gives it.
        lease: LeaseId,
    },
    /// What a [`try_claim`](crate::Participant::try_claim) answered with `WouldBlock` waited for
    /// may have come.
    TryAgain,
}

impl Vital for Notice {
    fn is_vital(&self) -> bool {
        matches!(self, Notice::ProducerGone)
    }
}
