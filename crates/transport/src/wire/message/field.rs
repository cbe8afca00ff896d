//! Fields that only the messages of sessions have.

use gpu_api::{
    Access, BackendKind, DevicePtr, DeviceUuid, MemHandle, ParticipantId, RegionId, Spot,
};

use crate::wire::descriptor::{BYTES, Descriptor, SealKey, SessionId};
use crate::wire::field::Field;
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::{Malformed, Reader, Writer, malformed};
use crate::{record, wrappers};

wrappers!(DevicePtr DeviceUuid MemHandle ParticipantId RegionId SessionId);

macro_rules! kinds {
    ($($kind:ident, $what:literal, $must:literal;)*) => {$(
        impl Field for $kind {
            fn write(&self, w: &mut Writer<'_>) {
                w.put(&[*self as u8]);
            }

            fn read(r: &mut Reader<'_>) -> Result<$kind, Malformed> {
                let [byte] = r.array()?;
                $kind::from_byte(byte).ok_or_else(|| malformed($what, byte, $must))
            }
        }
    )*};
}
kinds! {
    BackendKind, "the backend", "1, 2 or 3";
    Access, "the access", "0 or 1";
}

record!(LeaseAddress {
    file,
    slot,
    generation
});
record!(Spot {
    range,
    range_len,
    offset,
    behind
});

impl Field for SealKey {
    fn write(&self, w: &mut Writer<'_>) {
        w.put(self.as_bytes());
    }

    fn read(r: &mut Reader<'_>) -> Result<SealKey, Malformed> {
        r.array().map(SealKey::from_bytes)
    }
}

impl Field for Descriptor {
    fn write(&self, w: &mut Writer<'_>) {
        w.put(self.as_bytes());
    }

    fn read(r: &mut Reader<'_>) -> Result<Descriptor, Malformed> {
        let bytes: [u8; BYTES] = r.array()?;
        Descriptor::decode(&bytes).map_err(|_| {
            malformed(
                "the first byte of the descriptor",
                bytes[0],
                "that of a good descriptor",
            )
        })
    }
}
