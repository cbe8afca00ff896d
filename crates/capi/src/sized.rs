//! Structures that begin with their size, so that a program and a library of different versions
//! agree on what is there.
//!
//! The caller sets `size` to `sizeof` of the structure that it was compiled with. What the library
//! knows beyond that is zero, which stands for the default everywhere. What the caller knows beyond
//! the library must be zero, and so must reserved fields: both may have a meaning in a later
//! version, which this one must not leave out in silence. A size below that of the first release
//! that had the structure, or that ends inside a field, is no structure of any version.

use std::mem::MaybeUninit;
use std::ptr;

use crate::engine::Error;
use crate::failure::{Failure, Outcome, null};

/// A field of a structure, by the place of its first byte.
pub(crate) struct Field {
    pub name: &'static str,
    pub at: usize,
    /// Whether it must be zero.
    pub is_reserved: bool,
}

/// A structure of C's that begins with its size.
///
/// # Safety
///
/// - The first field is a `usize`, the size in bytes.
/// - All bytes zero are a value, and every byte may be copied.
/// - `FIELDS` names every field, in order.
pub(crate) unsafe trait SizedStruct: Copy {
    /// What messages call it.
    const NAME: &'static str;
    /// Its bytes in the first release that had it.
    const FIRST: usize;
    const FIELDS: &'static [Field];
}

/// Implements [`SizedStruct`] for a `#[repr(C)]` structure of integers and raw pointers: its bytes
/// in the first release that had it, and its fields.
macro_rules! sized_struct {
    ($type:ident of $first:literal { $($field:ident),* $(,)? }) => {
        const _: fn($type) = |value| {
            let $type { $($field: _),* } = value;
        };
        const _: () = assert!(std::mem::offset_of!($type, size) == 0);
        const _: () = assert!($crate::sized::ends_a_field::<$type>($first));
        // SAFETY: `SizedStruct` asks for
        // - the size first: asserted above;
        // - that zeros are a value: integers, arrays of them and raw pointers alone are in it;
        // - all fields: the pattern above has them.
        unsafe impl $crate::sized::SizedStruct for $type {
            const NAME: &'static str = stringify!($type);
            const FIRST: usize = $first;
            const FIELDS: &'static [$crate::sized::Field] = &[$($crate::sized::Field {
                name: stringify!($field),
                at: std::mem::offset_of!($type, $field),
                is_reserved: $crate::sized::is_reserved(stringify!($field)),
            }),*];
        }
    };
}
pub(crate) use sized_struct;

/// Says whether a field of this name must be zero.
pub(crate) const fn is_reserved(name: &str) -> bool {
    matches!(name.as_bytes(), b"reserved")
}

/// Says whether a structure that is cut to this size has all of each of its fields.
pub(crate) const fn ends_a_field<T: SizedStruct>(size: usize) -> bool {
    let mut at = 0;
    while at < T::FIELDS.len() {
        if T::FIELDS[at].at == size {
            return true;
        }
        at += 1;
    }
    size == size_of::<T>()
}

/// Returns the structure with every byte zero.
pub(crate) fn zeroed<T: SizedStruct>() -> T {
    // SAFETY: `assume_init` asks for a value: zeros are one, by the trait.
    unsafe { MaybeUninit::<T>::zeroed().assume_init() }
}

/// Reads a structure of the caller's; null stands for zeros.
///
/// # Safety
///
/// Null, or an address where the structure's size stands and as many bytes can be read.
pub(crate) unsafe fn read<T: SizedStruct>(given: *const T) -> Outcome<T> {
    let mut ours = zeroed::<T>();
    if given.is_null() {
        return Ok(ours);
    }
    // SAFETY: `size_of_given` asks for what this function asks for.
    let size = unsafe { size_of_given(given) }?;
    let known = size.min(size_of::<T>());
    // SAFETY: `copy_nonoverlapping` asks for this many bytes on both sides that do not overlap: the
    // caller's has `size`, ours its own size, and ours is on this frame. Any bytes are a value of
    // integers and pointers.
    unsafe { ptr::copy_nonoverlapping(given.cast::<u8>(), (&raw mut ours).cast(), known) };
    for at in known..size {
        // SAFETY: `add` asks to stay inside: the caller's structure has `size` bytes.
        let byte = unsafe { given.cast::<u8>().add(at) };
        // SAFETY: `read` asks for a byte that can be read: as above.
        if unsafe { byte.read() } != 0 {
            let why = format!(
                "its byte {at} is set, of which this library knows {}",
                size_of::<T>()
            );
            return Err(later(T::NAME, why));
        }
    }
    let ends = T::FIELDS.iter().skip(1).map(|next| next.at);
    for (field, end) in T::FIELDS.iter().zip(ends.chain([size_of::<T>()])) {
        if field.is_reserved && bytes_of(&ours)[field.at..end].iter().any(|&byte| byte != 0) {
            return Err(later(
                T::NAME,
                format!("its field `{}` is not zero", field.name),
            ));
        }
    }
    Ok(ours)
}

/// Writes a structure of the caller's, as much of it as the caller knows; `size` stays.
///
/// # Safety
///
/// Null, or an address where the structure's size stands and as many bytes can be written.
pub(crate) unsafe fn write<T: SizedStruct>(given: *mut T, ours: &T) -> Outcome {
    if given.is_null() {
        return Err(null(T::NAME));
    }
    // SAFETY: `size_of_given` asks for what this function asks for.
    let size = unsafe { size_of_given(given) }?;
    let behind_size = size_of::<usize>();
    let known = size.min(size_of::<T>()) - behind_size;
    // SAFETY: `add` asks to stay inside: every such structure is larger than its size.
    let from = unsafe { ptr::from_ref(ours).cast::<u8>().add(behind_size) };
    // SAFETY: `add` asks to stay inside: `size_of_given` found at least the size.
    let to = unsafe { given.cast::<u8>().add(behind_size) };
    // SAFETY: `copy_nonoverlapping` asks for this many bytes on both sides that do not overlap:
    // both have `known` behind their sizes, and ours is the library's.
    unsafe { ptr::copy_nonoverlapping(from, to, known) };
    Ok(())
}

/// Makes the failure of a structure that says what only a later version may know.
#[cold]
pub(crate) fn later(what: &'static str, why: String) -> Failure {
    Error::unsupported(
        what,
        why,
        "set it to zero, or install the libgpu_ipc that the program was compiled for",
    )
    .into()
}

fn bytes_of<T: SizedStruct>(value: &T) -> &[u8] {
    // SAFETY: `from_raw_parts` asks for as many initialized bytes that nothing changes: every byte
    // of such a structure was zeroed or copied.
    unsafe { std::slice::from_raw_parts(ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// # Safety
///
/// `given` is an address where a size can be read.
unsafe fn size_of_given<T: SizedStruct>(given: *const T) -> Outcome<usize> {
    // SAFETY: `read_unaligned` asks for this many readable bytes: this function's own condition.
    let size = unsafe { given.cast::<usize>().read_unaligned() };
    let is_known = size >= T::FIRST && (size >= size_of::<T>() || ends_a_field::<T>(size));
    if !is_known || size > 1 << 16 {
        let got = format!("{} of size {size}", T::NAME);
        return Err(Failure::invalid(
            "the size of a structure",
            got,
            "set to its sizeof before the call",
        ));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::{GPU_IPC_INVALID, GPU_IPC_UNSUPPORTED};

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(C)]
    struct Mine {
        size: usize,
        number: u64,
        reserved: u32,
        later: u32,
    }
    sized_struct!(Mine of 16 { size, number, reserved, later });

    #[repr(C)]
    struct Theirs {
        mine: Mine,
        beyond: u64,
    }

    fn read_of(theirs: &Theirs) -> Outcome<Mine> {
        // SAFETY: `read` asks for as many bytes as its size says: no test says more than `Theirs`
        // has.
        unsafe { read(ptr::from_ref(theirs).cast::<Mine>()) }
    }

    #[test]
    fn an_older_program_leaves_the_rest_at_zero_and_a_newer_one_must() {
        let mut theirs = Theirs {
            mine: Mine {
                size: 16,
                number: 7,
                reserved: 0,
                later: 9,
            },
            beyond: 0,
        };
        assert_eq!(
            read_of(&theirs).expect("older"),
            Mine {
                size: 16,
                number: 7,
                reserved: 0,
                later: 0
            }
        );
        theirs.mine.size = 20;
        assert_eq!(read_of(&theirs).expect("between").later, 0);
        theirs.mine.size = size_of::<Theirs>();
        assert_eq!(read_of(&theirs).expect("newer, but zero").later, 9);
        theirs.mine.reserved = 1;
        let failure = read_of(&theirs).expect_err("reserved");
        assert_eq!(failure.code(), GPU_IPC_UNSUPPORTED);
        theirs.mine.reserved = 0;
        theirs.beyond = 1 << 40;
        assert_eq!(
            read_of(&theirs).expect_err("newer, and set").code(),
            GPU_IPC_UNSUPPORTED
        );
        // Not even the first release, a field in two, none.
        for size in [0, 7, 8, 12, 15, 17, 18, 23, 1 << 20] {
            theirs.mine.size = size;
            assert_eq!(
                read_of(&theirs).expect_err("no size").code(),
                GPU_IPC_INVALID
            );
        }
    }

    #[test]
    fn no_byte_is_written_that_the_program_does_not_know() {
        let ours = Mine {
            size: 0,
            number: 1,
            reserved: 0,
            later: 2,
        };
        let mut theirs = Mine {
            size: 16,
            number: 0,
            reserved: 0,
            later: 99,
        };
        // SAFETY: `write` asks for as many bytes as the size says: 16 of 24.
        unsafe { write(&raw mut theirs, &ours) }.expect("a good size");
        assert_eq!(
            theirs,
            Mine {
                size: 16,
                number: 1,
                reserved: 0,
                later: 99
            }
        );
    }
}
