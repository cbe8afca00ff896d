//! One tensor as plain bytes: the eight fields, the device's identity, and the layout.
//!
//! | bytes | content |
//! |---|---|
//! | 0..4 | `GPTM` |
//! | 4 | version, 1 |
//! | 5 | type of the elements ([`Dtype`]) |
//! | 6 | dimensions, at most 64 |
//! | 7 | bit 0: the uuid is known; bit 1: the event is to be waited for |
//! | 8..24 | uuid of the device, or zeros |
//! | 24..28 | number of the device where it was sent |
//! | 28..32 | bytes of the segment handle; 0 for a storage of no bytes |
//! | 32..40, 40..48 | bytes of the storage, and its offset in the segment |
//! | 48..56 | counter |
//! | 56..58, 58..60 | bytes of the counter file's name, and of the event handle (0 or 64) |
//! | 60..64 | zero |
//! | 64..72 | offset of the tensor in the storage, in elements |
//! | 72.. | shape and strides, 8 bytes a number; segment handle; name; event handle |
//!
//! All numbers are little-endian and unsigned. Python writes the first 72 bytes with
//! `struct.pack("<4sBBBB16sIIQQQHHIQ", ...)`.

use gpu_api::{DeviceUuid, Error, Result};

use crate::fields::Fields;
use crate::layout::{Dtype, Layout, MAX_DIMENSIONS};
use crate::segment_handle::MAX_BYTES;

const MAGIC: [u8; 4] = *b"GPTM";
const VERSION: u8 = 1;
const HEADER: usize = 72;
const HAS_UUID: u8 = 1;
const HAS_EVENT: u8 = 2;

/// A tensor that is shared: what a transport carries.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorMessage {
    /// The storage, as PyTorch describes it.
    pub fields: Fields,
    /// The device's identity, where the sender knows it.
    pub uuid: Option<DeviceUuid>,
    /// What of the storage the tensor is.
    pub layout: Layout,
}

impl TensorMessage {
    /// Writes the bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for fields or a layout that no message can carry, such as a negative
    /// device.
    ///
    /// # Examples
    ///
    /// ```
    /// use gpu_ipc_torch::{Dtype, Fields, Layout, TensorMessage};
    ///
    /// let layout = Layout::contiguous(Dtype::F32, &[0]);
    /// let message = TensorMessage { fields: Fields::default(), uuid: None, layout };
    /// assert_eq!(TensorMessage::decode(&message.encode()?)?, message);
    /// # Ok::<(), gpu_api::Error>(())
    /// ```
    pub fn encode(&self) -> Result<Vec<u8>> {
        let fields = &self.fields;
        fields.decode()?;
        self.layout.check(fields.size_bytes)?;
        let empty = Vec::new();
        let handle = fields.handle.as_ref().unwrap_or(&empty);
        let name = fields.ref_counter_handle.as_ref().unwrap_or(&empty);
        let event = fields.event_handle.as_ref().unwrap_or(&empty);
        let unfit =
            |what, len: usize| Error::invalid(what, format!("{len} bytes"), "as PyTorch writes it");
        let short = |what, len: usize| u16::try_from(len).map_err(|_| unfit(what, len));
        let mut bytes = Vec::with_capacity(
            HEADER + 16 * self.layout.shape.len() + handle.len() + name.len() + 64,
        );
        bytes.extend(MAGIC);
        let flags = if self.uuid.is_some() { HAS_UUID } else { 0 }
            | if fields.event_sync_required {
                HAS_EVENT
            } else {
                0
            };
        bytes.extend([
            VERSION,
            self.layout.dtype as u8,
            self.layout.shape.len() as u8,
            flags,
        ]);
        bytes.extend(self.uuid.map_or([0; 16], |uuid| uuid.0));
        bytes.extend((fields.device as u32).to_le_bytes());
        bytes.extend((handle.len() as u32).to_le_bytes());
        for number in [
            fields.size_bytes,
            fields.offset_bytes,
            fields.ref_counter_offset,
        ] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(short("the name of PyTorch's counter file", name.len())?.to_le_bytes());
        bytes.extend(short("PyTorch's event handle", event.len())?.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.layout.offset.to_le_bytes());
        for number in self.layout.shape.iter().chain(&self.layout.strides) {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend([handle, name, event].into_iter().flatten());
        Ok(bytes)
    }

    /// Reads the bytes and checks everything that can be checked without opening. Total: any bytes
    /// give a message or an error.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] and [`Error::Mismatch`], as [`Fields::decode`] and [`Layout::check`] give
    /// them.
    pub fn decode(bytes: &[u8]) -> Result<TensorMessage> {
        let what = "a tensor's message";
        let invalid = |got: String, must| Error::invalid(what, got, must);
        let Some((header, mut rest)) = bytes.split_first_chunk::<HEADER>() else {
            return Err(invalid(
                format!("{} bytes", bytes.len()),
                "at least 72 bytes",
            ));
        };
        if header[..4] != MAGIC {
            return Err(invalid("of another kind".into(), "beginning with GPTM"));
        }
        if header[4] != VERSION {
            return Err(Error::mismatch(
                "the version of tensor messages",
                header[4],
                VERSION,
                "build both sides from one version",
            ));
        }
        let short =
            |at: usize| usize::from(u16::from_le_bytes(std::array::from_fn(|i| header[at + i])));
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let (dimensions, flags, handle_len) =
            (usize::from(header[6]), header[7], number(28) as usize);
        let Some(dtype) = Dtype::from_byte(header[5]) else {
            return Err(invalid(format!("of type {}", header[5]), "of a known type"));
        };
        if dimensions > MAX_DIMENSIONS
            || flags & !(HAS_UUID | HAS_EVENT) != 0
            || number(60) != 0
            || handle_len > MAX_BYTES
        {
            let got =
                format!("{dimensions} dimensions, flags {flags:#x}, {handle_len} bytes of handle");
            return Err(invalid(got, "within the limits of version 1"));
        }
        let (name_len, event_len) = (short(56), short(58));
        let expected = 16 * dimensions + handle_len + name_len + event_len;
        if rest.len() != expected {
            return Err(invalid(
                format!("{} bytes after its first 72", rest.len()),
                "as long as its lengths say",
            ));
        }
        let mut take = |len: usize| {
            let (taken, left) = rest.split_at(len);
            rest = left;
            taken
        };
        let mut numbers = || {
            let (numbers, _) = take(8 * dimensions).as_chunks::<8>();
            numbers
                .iter()
                .map(|&number| u64::from_le_bytes(number))
                .collect::<Vec<u64>>()
        };
        let (shape, strides) = (numbers(), numbers());
        let mut some = |len: usize| {
            let taken = take(len);
            (!taken.is_empty()).then(|| taken.to_vec())
        };
        let (handle, ref_counter_handle, event_handle) =
            (some(handle_len), some(name_len), some(event_len));
        let fields = Fields {
            device: i64::from(number(24)),
            handle,
            size_bytes: long(32),
            offset_bytes: long(40),
            ref_counter_handle,
            ref_counter_offset: long(48),
            event_handle,
            event_sync_required: flags & HAS_EVENT != 0,
        };
        if flags & HAS_UUID == 0 && header[8..24] != [0; 16] {
            return Err(invalid(
                "with a uuid that is said to be unknown".into(),
                "without one",
            ));
        }
        let uuid =
            (flags & HAS_UUID != 0).then(|| DeviceUuid(std::array::from_fn(|i| header[8 + i])));
        let layout = Layout {
            dtype,
            offset: long(64),
            shape,
            strides,
        };
        fields.decode()?;
        layout.check(fields.size_bytes)?;
        Ok(TensorMessage {
            fields,
            uuid,
            layout,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_message() -> impl Strategy<Value = TensorMessage> {
        let place = (
            any::<[u8; 32]>(),
            0..128i64,
            0..1u64 << 40,
            0..1u64 << 40,
            0..10_000u64,
            proptest::option::of(any::<u8>()),
            "/torch_[0-9]{1,6}_[0-9]{1,9}_[0-9]{1,4}",
        );
        let view = (
            proptest::collection::vec((0..4u64, 0..9u64), 0..5),
            0..50u64,
            0..Dtype::ALL.len(),
        );
        (place, view, proptest::option::of(any::<[u8; 16]>())).prop_map(
            |(place, (dims, offset, dtype), uuid)| {
                let (handle, device, extra, offset_bytes, ref_counter_offset, event, name) = place;
                let (shape, strides) = dims.into_iter().unzip();
                let layout = Layout {
                    dtype: Dtype::ALL[dtype],
                    offset,
                    shape,
                    strides,
                };
                let fields = Fields {
                    device,
                    handle: Some([&[2, b'c'][..], &handle, &handle].concat()),
                    size_bytes: layout.end().expect("small") + extra,
                    offset_bytes,
                    ref_counter_handle: Some(name.into_bytes()),
                    ref_counter_offset,
                    event_handle: Some(vec![event.unwrap_or(0); 64]),
                    event_sync_required: event.is_some(),
                };
                TensorMessage {
                    fields,
                    uuid: uuid.map(DeviceUuid),
                    layout,
                }
            },
        )
    }

    #[test]
    fn the_bytes_are_as_documented() {
        let fields = Fields {
            device: 3,
            handle: Some(vec![7; 64]),
            size_bytes: 0x1000,
            offset_bytes: 0x200,
            ref_counter_handle: Some(b"/torch_1_2_3".to_vec()),
            ref_counter_offset: 5,
            event_handle: Some(vec![9; 64]),
            event_sync_required: true,
        };
        let layout = Layout {
            dtype: Dtype::F32,
            offset: 1,
            shape: vec![3],
            strides: vec![4],
        };
        let bytes = TensorMessage {
            fields,
            uuid: Some(DeviceUuid([8; 16])),
            layout,
        }
        .encode()
        .expect("good");
        let mut expected = b"GPTM\x01\x08\x01\x03".to_vec();
        expected.extend([8; 16]);
        expected.extend([3, 0, 0, 0, 64, 0, 0, 0]);
        expected.extend([
            0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0,
        ]);
        expected.extend([12, 0, 64, 0, 0, 0, 0, 0]);
        expected.extend([
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0,
        ]);
        expected.extend([7; 64]);
        expected.extend(b"/torch_1_2_3");
        expected.extend([9; 64]);
        assert_eq!(bytes, expected);
    }

    proptest! {
        #[test]
        fn a_message_survives_its_bytes(message in any_message()) {
            prop_assert_eq!(TensorMessage::decode(&message.encode().expect("it fits")).expect("good"), message);
        }

        #[test]
        fn a_changed_or_cut_message_never_panics(
            message in any_message(),
            at: prop::sample::Index,
            bit in 0..8u32,
            cut: prop::sample::Index,
        ) {
            let mut bytes = message.encode().expect("it fits");
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            if let Ok(changed) = TensorMessage::decode(&bytes) {
                prop_assert_eq!(changed.encode().expect("what was read can be written"), bytes.clone());
            }
            prop_assert!(TensorMessage::decode(&bytes[..cut.index(bytes.len())]).is_err());
        }

        #[test]
        fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = TensorMessage::decode(&bytes);
        }
    }
}
