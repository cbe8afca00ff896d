//! The eight fields that PyTorch sends for a storage, checked.

use gpu_api::{DeviceUuid, Error, EventHandle, Result};

use crate::counter_file::{CounterName, SLOTS};
use crate::segment_handle::SegmentHandle;

/// The tuple of `UntypedStorage._share_cuda_()`, field for field, as it came: nothing is checked
/// yet.
///
/// | | Python | here |
/// |---|---|---|
/// | 0 | device number | `device` |
/// | 1 | segment handle, or `None` | `handle` |
/// | 2 | bytes of the storage | `size_bytes` |
/// | 3 | its offset in the segment, in bytes | `offset_bytes` |
/// | 4 | name of the counter file, or `None` | `ref_counter_handle` |
/// | 5 | counter in that file | `ref_counter_offset` |
/// | 6 | event handle, or `None` | `event_handle` |
/// | 7 | whether to wait for the event, or `None` | `event_sync_required` |
///
/// HIP's tuple has the same fields: field 7 is false and field 6 all zeros, because the sender has
/// synchronised.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fields {
    /// The device's number in the process that sent it.
    pub device: i64,
    /// The segment, as bytes; see [`SegmentHandle`].
    pub handle: Option<Vec<u8>>,
    /// Bytes of the storage.
    pub size_bytes: u64,
    /// Bytes from the segment's first.
    pub offset_bytes: u64,
    /// The counter file's name.
    pub ref_counter_handle: Option<Vec<u8>>,
    /// The counter's number in the file.
    pub ref_counter_offset: u64,
    /// The event's handle.
    pub event_handle: Option<Vec<u8>>,
    /// Whether the event must be waited for.
    pub event_sync_required: bool,
}

/// A storage that PyTorch shared, every field within its bounds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedStorage {
    /// The device's number in the process that sent it: it says nothing about numbers here.
    pub device: u32,
    /// The device's identity, where the sender told it beside the tuple.
    pub uuid: Option<DeviceUuid>,
    /// Where its bytes are; `None` for a storage of no bytes.
    pub place: Option<Place>,
}

/// Where a storage's bytes are, and what to do before and after using them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The segment.
    pub segment: SegmentHandle,
    /// The segment as it was sent: what tells one from another.
    pub segment_bytes: Vec<u8>,
    /// Bytes from the segment's first.
    pub offset: u64,
    /// Bytes; 0 for a view of nothing that is counted all the same.
    pub len: u64,
    /// The counter to decrease.
    pub counter: Counter,
    /// The event to wait for first; `None` when the sender has waited for its work itself (HIP
    /// always does).
    pub event: Option<EventHandle>,
}

/// One counter of a counter file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counter {
    /// The file.
    pub file: CounterName,
    /// Its number there, below [`SLOTS`].
    pub slot: u32,
}

impl Fields {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a field out of its bounds or one that lacks another,
    /// [`Error::Mismatch`] for a segment handle of an unknown version.
    pub fn decode(&self) -> Result<SharedStorage> {
        let device = u32::try_from(self.device)
            .ok()
            .filter(|&device| device <= i8::MAX as u32)
            .ok_or_else(|| {
                Error::invalid("PyTorch's device number", self.device, "between 0 and 127")
            })?;
        let Some(handle) = &self.handle else {
            if self.size_bytes != 0 {
                let got = format!("absent for {} bytes", self.size_bytes);
                return Err(Error::invalid("PyTorch's segment handle", got, "there"));
            }
            return Ok(SharedStorage {
                device,
                uuid: None,
                place: None,
            });
        };
        let segment = SegmentHandle::decode(handle)?;
        let limit = i64::MAX.cast_unsigned();
        if self.size_bytes > limit
            || self.offset_bytes > limit
            || self.offset_bytes + self.size_bytes > limit
        {
            return Err(Error::invalid(
                "PyTorch's storage",
                format!("{} bytes at offset {}", self.size_bytes, self.offset_bytes),
                "below 2^63 bytes",
            ));
        }
        if let SegmentHandle::Expandable(chunks) = &segment
            && self.offset_bytes + self.size_bytes > chunks.len()
        {
            let got = format!(
                "{} bytes at offset {} of {}",
                self.size_bytes,
                self.offset_bytes,
                chunks.len()
            );
            return Err(Error::invalid(
                "PyTorch's storage",
                got,
                "inside the chunks that came with it",
            ));
        }
        let Some(name) = &self.ref_counter_handle else {
            return Err(Error::invalid("PyTorch's counter file", "absent", "named"));
        };
        let slot = u32::try_from(self.ref_counter_offset)
            .ok()
            .filter(|&slot| slot < SLOTS)
            .ok_or_else(|| {
                let got = self.ref_counter_offset.to_string();
                Error::invalid(
                    "PyTorch's counter",
                    got,
                    "below 10000, the counters of a file",
                )
            })?;
        let counter = Counter {
            file: CounterName::new(name)?,
            slot,
        };
        let event = match (&self.event_handle, self.event_sync_required) {
            (_, false) => None,
            (Some(bytes), true) => {
                let raw = <[u8; 64]>::try_from(bytes.as_slice()).map_err(|_| {
                    Error::invalid(
                        "PyTorch's event handle",
                        format!("{} bytes", bytes.len()),
                        "64 bytes",
                    )
                })?;
                Some(EventHandle(raw))
            }
            (None, true) => {
                return Err(Error::invalid(
                    "PyTorch's event handle",
                    "absent, though it is to be waited for",
                    "64 bytes",
                ));
            }
        };
        let place = Place {
            segment,
            segment_bytes: handle.clone(),
            offset: self.offset_bytes,
            len: self.size_bytes,
            counter,
            event,
        };
        Ok(SharedStorage {
            device,
            uuid: None,
            place: Some(place),
        })
    }
}

impl SharedStorage {
    /// Notes the identity of the device, which the tuple lacks: opening on another device is then
    /// refused.
    #[must_use]
    pub fn on(mut self, uuid: DeviceUuid) -> SharedStorage {
        self.uuid = Some(uuid);
        self
    }

    /// Returns its bytes.
    pub fn len(&self) -> u64 {
        self.place.as_ref().map_or(0, |place| place.len)
    }

    /// Says whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A tuple as PyTorch 2.11 writes it on CUDA.
    fn cuda() -> Fields {
        Fields {
            device: 1,
            handle: Some([&[2, b'c'][..], &[7; 64]].concat()),
            size_bytes: 4096,
            offset_bytes: 512,
            ref_counter_handle: Some(b"/torch_4711_1804289383_0".to_vec()),
            ref_counter_offset: 9999,
            event_handle: Some(vec![3; 64]),
            event_sync_required: true,
        }
    }

    #[test]
    fn cudas_tuple_is_read() {
        let storage = cuda().decode().expect("good");
        assert_eq!((storage.device, storage.len()), (1, 4096));
        let place = storage.place.expect("a place");
        assert_eq!((place.offset, place.counter.slot), (512, 9999));
        assert_eq!(place.counter.file.as_str(), "/torch_4711_1804289383_0");
        assert_eq!(place.event, Some(EventHandle([3; 64])));
    }

    #[test]
    fn a_storage_lies_inside_its_chunks_before_any_is_opened() {
        let mut handle = vec![2, b'e'];
        handle.extend(4711u64.to_ne_bytes());
        handle.extend(4096u64.to_ne_bytes());
        handle.extend(2u64.to_ne_bytes());
        handle.extend([5, 0, 0, 0, 6, 0, 0, 0]);
        let fields = Fields {
            handle: Some(handle),
            size_bytes: 8000,
            offset_bytes: 192,
            ..cuda()
        };
        assert_eq!(fields.decode().expect("good").len(), 8000);
        assert!(
            Fields {
                offset_bytes: 193,
                ..fields
            }
            .decode()
            .is_err()
        );
    }

    #[test]
    fn hips_tuple_has_no_event() {
        let fields = Fields {
            event_handle: Some(vec![0; 64]),
            event_sync_required: false,
            ..cuda()
        };
        assert_eq!(
            fields.decode().expect("good").place.expect("a place").event,
            None
        );
    }

    #[test]
    fn a_storage_of_no_bytes_needs_nothing() {
        // What `_share_cuda_` gives for `torch.empty(0)`: four times `None`.
        let storage = Fields::default().decode().expect("good");
        assert!(storage.is_empty() && storage.place.is_none());
    }

    #[test]
    fn each_field_has_its_bounds() {
        let bad: &[fn(&mut Fields)] = &[
            |f| f.device = -1,
            |f| f.device = 128,
            |f| f.handle = None,
            |f| f.handle = Some(vec![]),
            |f| f.size_bytes = 1 << 63,
            |f| f.offset_bytes = u64::MAX,
            |f| (f.offset_bytes, f.size_bytes) = (1 << 62, 1 << 62),
            |f| f.ref_counter_handle = None,
            |f| f.ref_counter_handle = Some(b"/../etc".to_vec()),
            |f| f.ref_counter_offset = 10_000,
            |f| f.ref_counter_offset = u64::MAX,
            |f| f.event_handle = None,
            |f| f.event_handle = Some(vec![0; 63]),
        ];
        for (index, spoil) in bad.iter().enumerate() {
            let mut fields = cuda();
            spoil(&mut fields);
            assert!(fields.decode().is_err(), "case {index}");
        }
    }

    proptest! {
        #[test]
        fn every_tuple_gives_a_storage_in_bounds_or_an_error(
            device: i64, handle in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..80)),
            size_bytes: u64, offset_bytes: u64,
            name in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..40)),
            ref_counter_offset in 0..20_000u64,
            event_handle in proptest::option::of(proptest::collection::vec(any::<u8>(), 60..70)),
            event_sync_required: bool,
        ) {
            let fields = Fields {
                device, handle, size_bytes, offset_bytes, ref_counter_handle: name, ref_counter_offset, event_handle,
                event_sync_required,
            };
            if let Ok(SharedStorage { place: Some(place), .. }) = fields.decode() {
                prop_assert!(place.counter.slot < SLOTS);
                prop_assert!(place.offset.checked_add(place.len).is_some());
                prop_assert_eq!(place.event.is_some(), event_sync_required);
            }
        }
    }
}
