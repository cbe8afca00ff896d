//! One part of an object: a named tensor.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};

use crate::boundary::{array, room, text};
use crate::engine::{DType, DevicePtr, Dimension, Layout, PartSpec};
use crate::failure::{Failure, Outcome};
use crate::sized::sized_struct;

/// The most dimensions of a part.
pub const GPU_IPC_MOST_RANK: usize = 32;
/// The bytes of a part's or object's name with its zero byte, at most.
pub const GPU_IPC_NAME_BYTES: usize = 256;

/// Identifies one object for ever, on every host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_identity {
    /// Random bits, drawn by its writer.
    pub bytes: [u8; 16],
}

/// A part of an object that is to be made.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_part_spec {
    /// Its name: 1 to 255 bytes of UTF-8, unique in its object.
    pub name: *const c_char,
    /// Elements along each dimension, the last one fastest; null with a rank of 0 for a scalar.
    pub shape: *const u64,
    /// Elements from one to the next along each dimension; null when they lie close together.
    pub strides: *const u64,
    /// How many dimensions there are, at most 32.
    pub rank: u32,
    /// DLPack's type code of its elements: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6
    /// bool.
    pub type_code: u8,
    /// Bits of one lane: 8 for bytes, 32 for float.
    pub type_bits: u8,
    /// Lanes of one element; 0 stands for 1.
    pub type_lanes: u16,
}

/// A part of an object that is there.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_part {
    /// `sizeof(gpu_ipc_part)`.
    pub size: usize,
    /// The address of its first byte in this process.
    pub ptr: *mut c_void,
    /// Its bytes.
    pub len: u64,
    /// How many dimensions it has.
    pub rank: u32,
    /// DLPack's type code of its elements.
    pub type_code: u8,
    /// Bits of one lane.
    pub type_bits: u8,
    /// Lanes of one element.
    pub type_lanes: u16,
    /// Elements along each dimension.
    pub shape: [u64; GPU_IPC_MOST_RANK],
    /// Elements from one to the next along each dimension.
    pub strides: [u64; GPU_IPC_MOST_RANK],
    /// Its name, with a zero byte behind.
    pub name: [c_char; GPU_IPC_NAME_BYTES],
}
sized_struct!(gpu_ipc_part of 800 { size, ptr, len, rank, type_code, type_bits, type_lanes, shape, strides, name });

/// Packs the parts that C describes: each group apart, or all together where `groups` is null.
///
/// # Safety
///
/// There are `count` of them, with good pointers in them, and as many groups; and `user_len` bytes.
pub(super) unsafe fn layout_of(
    specs: *const gpu_ipc_part_spec,
    count: usize,
    groups: *const u32,
    user: *const c_void,
    user_len: usize,
) -> Outcome<Layout> {
    // SAFETY: `array` asks for what this function asks for.
    let specs = unsafe { array(specs, count, "parts") }?;
    // SAFETY: `array` asks for what this function asks for.
    let user = unsafe { array(user.cast::<u8>(), user_len, "the user's bytes") }?;
    // SAFETY: `spec_of` asks for good pointers, as this function does.
    let parts = specs
        .iter()
        .map(|spec| unsafe { spec_of(spec) })
        .collect::<Outcome<Vec<_>>>()?;
    if groups.is_null() {
        return Ok(Layout::pack(parts, user)?);
    }
    // SAFETY: `array` asks for what this function asks for.
    let groups = unsafe { array(groups, count, "groups") }?;
    let mut grouped: BTreeMap<u32, Vec<PartSpec>> = BTreeMap::new();
    for (&group, part) in groups.iter().zip(parts) {
        grouped.entry(group).or_default().push(part);
    }
    Ok(Layout::pack_groups(grouped.into_values(), user)?)
}

/// # Safety
///
/// The pointers are good.
unsafe fn spec_of(spec: &gpu_ipc_part_spec) -> Outcome<PartSpec> {
    // SAFETY: `text` asks for what this function asks for.
    let name = unsafe { text(spec.name, "the name of a part") }?;
    let rank = spec.rank as usize;
    if rank > GPU_IPC_MOST_RANK {
        return Err(Failure::invalid(
            "the number of dimensions",
            format!("{rank} of {name}"),
            "at most 32",
        ));
    }
    // SAFETY: `array` asks for what this function asks for.
    let shape = unsafe { array(spec.shape, rank, "the shape of a part") }?;
    let dtype = DType {
        code: spec.type_code,
        bits: spec.type_bits,
        lanes: spec.type_lanes.max(1),
    };
    let mut part = PartSpec::contiguous(name, dtype, shape)?;
    if !spec.strides.is_null() {
        // SAFETY: `array` asks for what this function asks for.
        let strides = unsafe { array(spec.strides, rank, "the strides of a part") }?;
        part.dimensions = shape
            .iter()
            .zip(strides)
            .map(|(&extent, &stride)| Dimension { extent, stride })
            .collect();
        let beyond = || {
            Failure::invalid(
                "the size of a part",
                format!("{shape:?} by {strides:?}"),
                "below 2^64 bytes",
            )
        };
        // As long as the elements reach.
        let reach = |last: u64, dimension: &Dimension| {
            last.checked_add(
                dimension
                    .extent
                    .saturating_sub(1)
                    .checked_mul(dimension.stride)?,
            )
        };
        let last = part
            .dimensions
            .iter()
            .try_fold(0u64, reach)
            .and_then(|last| last.checked_add(1));
        let elements = if shape.contains(&0) {
            0
        } else {
            last.ok_or_else(beyond)?
        };
        part.len = dtype.bytes_of(elements).ok_or_else(beyond)?;
    }
    Ok(part)
}

/// Says what a part is; `None` for a name that is not there.
pub(super) fn describe(
    layout: &Layout,
    name: &str,
    address: Option<DevicePtr>,
) -> Option<gpu_ipc_part> {
    let spec = &layout.part(name)?.spec;
    let mut part = crate::sized::zeroed::<gpu_ipc_part>();
    part.ptr = std::ptr::with_exposed_provenance_mut(address?.0 as usize);
    part.len = spec.len;
    part.rank = spec.dimensions.len() as u32;
    (part.type_code, part.type_bits, part.type_lanes) =
        (spec.dtype.code, spec.dtype.bits, spec.dtype.lanes);
    for (at, dimension) in spec.dimensions.iter().enumerate().take(GPU_IPC_MOST_RANK) {
        (part.shape[at], part.strides[at]) = (dimension.extent, dimension.stride);
    }
    name_into(&mut part.name, &spec.name);
    Some(part)
}

/// Writes a name, with a zero byte behind, over zeros.
pub(super) fn name_into(place: &mut [c_char; GPU_IPC_NAME_BYTES], name: &str) {
    let bytes = name.bytes().take(GPU_IPC_NAME_BYTES - 1);
    place
        .iter_mut()
        .zip(bytes)
        .for_each(|(place, byte)| *place = byte as c_char);
}

/// Describes a part by its name.
///
/// # Safety
///
/// `part` has as many bytes as its `size` says.
pub(super) unsafe fn write_part(
    layout: &Layout,
    name: &str,
    address: Option<DevicePtr>,
    part: *mut gpu_ipc_part,
) -> Outcome {
    let found = describe(layout, name, address).ok_or_else(|| no_such(name))?;
    // SAFETY: `write` asks for what this function asks for.
    unsafe { crate::sized::write(part, &found) }
}

/// Describes a part by its number.
///
/// # Safety
///
/// `part` has as many bytes as its `size` says.
pub(super) unsafe fn write_part_at(
    layout: &Layout,
    number: usize,
    address: impl Fn(&str) -> Option<DevicePtr>,
    part: *mut gpu_ipc_part,
) -> Outcome {
    let name = name_at(layout, number)?;
    // SAFETY: `write_part` asks for what this function asks for.
    unsafe { write_part(layout, &name, address(&name), part) }
}

/// Copies the bytes that lie beside the parts; as many as fit.
///
/// # Safety
///
/// There is room for `capacity` bytes.
pub(super) unsafe fn user_into(layout: &Layout, bytes: *mut c_void, capacity: usize) -> Outcome {
    // SAFETY: `room` asks for what this function asks for.
    let bytes = unsafe { room(bytes, capacity) }?;
    let len = bytes.len().min(layout.user().len());
    bytes[..len].copy_from_slice(&layout.user()[..len]);
    Ok(())
}

/// Finds the name of the part at a place in the order of names.
pub(super) fn name_at(layout: &Layout, at: usize) -> Outcome<String> {
    let found = layout.parts().get(at).map(|part| part.spec.name.clone());
    found.ok_or_else(|| {
        Failure::invalid(
            "the number of a part",
            format!("{at} of {}", layout.parts().len()),
            "below their count",
        )
    })
}

pub(super) fn no_such(name: &str) -> Failure {
    Failure::invalid("the name of a part", name, "one of the object's")
}
