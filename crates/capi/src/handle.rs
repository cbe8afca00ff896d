//! Handles: what C holds in place of a pointer.
//!
//! A handle is never followed. It says which library made it, what it stands for, and which use of
//! which row of that kind's table; so one that is null, closed, of another kind or of another
//! library is found out by comparing numbers.
//!
//! | bits | part | meaning |
//! |---|---|---|
//! | 54 to 63 | instance | the library and process that made it, above 0 |
//! | 50 to 53 | kind | session, participant, ... |
//! | 24 to 49 | generation | which use of the row, above 0 |
//! | 0 to 23 | row | its place in the kind's table |
//!
//! A row whose generations are used up is not used again. So no two handles of a process are equal,
//! before 2^50 were made of a kind.

use std::ptr;

const ROW_BITS: u32 = 24;
const GENERATION_BITS: u32 = 26;
pub(crate) const KIND_BITS: u32 = 4;
const INSTANCE_BITS: u32 = 10;
const _: () = assert!(ROW_BITS + GENERATION_BITS + KIND_BITS + INSTANCE_BITS == usize::BITS);

/// The most rows of a table.
pub(crate) const MOST_ROWS: u32 = 1 << ROW_BITS;
/// The last generation of a row.
pub(crate) const LAST_GENERATION: u32 = (1 << GENERATION_BITS) - 1;
/// The most instances that can be told apart.
pub(crate) const MOST_INSTANCES: u16 = 1 << INSTANCE_BITS;

/// What a handle says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Handle {
    pub instance: u16,
    pub kind: u8,
    pub generation: u32,
    pub row: u32,
}

impl Handle {
    /// Reads what C holds; `None` for null.
    #[inline]
    pub fn of<T>(pointer: *const T) -> Option<Handle> {
        let bits = pointer.addr();
        (bits != 0).then_some(Handle {
            instance: (bits >> (ROW_BITS + GENERATION_BITS + KIND_BITS)) as u16,
            kind: (bits >> (ROW_BITS + GENERATION_BITS)) as u8 & ((1 << KIND_BITS) - 1),
            generation: (bits >> ROW_BITS) as u32 & LAST_GENERATION,
            row: bits as u32 & (MOST_ROWS - 1),
        })
    }

    /// Returns what C gets.
    #[inline]
    pub fn to_c<T>(self) -> *mut T {
        let bits = usize::from(self.instance) << (ROW_BITS + GENERATION_BITS + KIND_BITS)
            | usize::from(self.kind) << (ROW_BITS + GENERATION_BITS)
            | (self.generation as usize) << ROW_BITS
            | self.row as usize;
        ptr::without_provenance_mut(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_survives() {
        let parts = [
            (1, 1, 1, 0),
            (1023, 15, LAST_GENERATION, MOST_ROWS - 1),
            (512, 8, 1 << 25, 1 << 23),
        ];
        for (instance, kind, generation, row) in parts {
            let handle = Handle {
                instance,
                kind,
                generation,
                row,
            };
            assert_eq!(Handle::of(handle.to_c::<u8>()), Some(handle));
        }
        assert_eq!(Handle::of(ptr::null::<u8>()), None);
    }
}
