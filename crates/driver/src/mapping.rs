//! Addresses, and physical memory mapped on them.

use std::ffi::c_int;
use std::mem;

use gpu_api::{Access, Error, Result};

use crate::calls::{
    ACCESS_READ, ACCESS_READ_WRITE, AccessDescription, LOCATION_DEVICE, Location, MemoryHandle,
};
use crate::physical::Physical;
use crate::vendor::{Scope, Vendor};

/// Addresses with physical memory mapped on them, piece by piece; dropped, all of it is taken down
/// again in reverse.
pub(crate) struct Building<'a, 'd, V: Vendor> {
    scope: &'a Scope<'d, V>,
    base: u64,
    size: usize,
    piece: usize,
    /// Bytes from the base that are mapped.
    mapped: usize,
}

impl<'a, 'd, V: Vendor> Building<'a, 'd, V> {
    /// Reserves addresses for pieces that fill them.
    pub(crate) fn reserve(scope: &'a Scope<'d, V>, size: usize, piece: usize) -> Result<Self> {
        let base = reserve(scope, size, 0)?;
        Ok(Building {
            scope,
            base,
            size,
            piece,
            mapped: 0,
        })
    }

    /// Maps the next piece.
    pub(crate) fn map(&mut self, physical: &Physical<'_, '_, V>) -> Result<()> {
        debug_assert!(
            self.mapped + self.piece <= self.size,
            "more pieces than addresses"
        );
        // SAFETY: `Physical::map` asks for reserved addresses without a mapping: those behind what
        // is mapped.
        unsafe { physical.map(self.base + self.mapped as u64, self.piece) }?;
        self.mapped += self.piece;
        Ok(())
    }

    /// Lets devices reach what is mapped, which is all of it, and gives the mapping to the caller:
    /// its base, and the handle of its memory where the driver wants that kept.
    pub(crate) fn finish(
        self,
        mut pieces: Vec<Physical<'_, '_, V>>,
        ordinal: c_int,
        access: Access,
        reaching: &[c_int],
    ) -> Result<(u64, Option<MemoryHandle>)> {
        // What fails takes the mapping down before the memory below it.
        if self.mapped != self.size {
            let got = format!("{} bytes of {}", self.mapped, self.size);
            drop(self);
            drop(pieces);
            return Err(Error::invalid(
                "memory to import",
                got,
                "as many pieces as were announced",
            ));
        }
        let (base, quirks) = (self.base, self.scope.vendor.quirks());
        if let Err(error) = open(self.scope, (base, self.size), ordinal, access, reaching) {
            if quirks.tells_failed_mappings {
                drop(self);
                drop(pieces);
            } else {
                // It may not be mapped, and what is not must not be unmapped: all of it stays.
                mem::forget(self);
                mem::forget(pieces);
            }
            return Err(error);
        }
        let kept = if quirks.keeps_handles {
            pieces.pop()
        } else {
            None
        };
        let kept = kept.map(Physical::keep);
        pieces.into_iter().try_for_each(Physical::give_back)?;
        mem::forget(self);
        Ok((base, kept))
    }
}

impl<V: Vendor> Drop for Building<'_, '_, V> {
    fn drop(&mut self) {
        // What cannot be taken down stays, and so does what it rests on: a leak, and the error that
        // led here is on its way to the caller.
        while self.mapped > 0 {
            self.mapped -= self.piece;
            // SAFETY: `unmap` asks for a whole mapping that nothing uses: nobody has seen its
            // address.
            if unsafe { unmap(self.scope, self.base + self.mapped as u64, self.piece) }.is_err() {
                return;
            }
        }
        // SAFETY: `unreserve` asks for a whole reservation without a mapping: all were unmapped
        // above.
        let _ = unsafe { unreserve(self.scope, self.base, self.size) };
    }
}

/// Reserves addresses, at `hint` if the driver likes.
pub(crate) fn reserve<V: Vendor>(scope: &Scope<'_, V>, size: usize, hint: u64) -> Result<u64> {
    let symbol = &scope.vendor.driver().calls.range_reserve;
    let mut base = 0;
    scope.allocate(symbol, size as u64, |function| {
        // SAFETY: `range_reserve` writes one address: `base` is one. The size is a multiple
        // of the granularity; alignment and flags are 0, and the hint is looked at alone.
        unsafe { function(&raw mut base, size, 0, hint, 0) }
    })?;
    Ok(base)
}

/// Gives reserved addresses back.
///
/// # Safety
///
/// They are a whole reservation without a mapping.
pub(crate) unsafe fn unreserve<V: Vendor>(
    scope: &Scope<'_, V>,
    base: u64,
    size: usize,
) -> Result<()> {
    scope.call(&scope.vendor.driver().calls.range_free, |function| {
        // SAFETY: `range_free` asks for a whole reservation without a mapping: our caller
        // vouches for it.
        unsafe { function(base, size) }
    })
}

/// Takes a mapping down.
///
/// # Safety
///
/// It is a whole mapping that nothing uses.
pub(crate) unsafe fn unmap<V: Vendor>(scope: &Scope<'_, V>, base: u64, size: usize) -> Result<()> {
    scope.call(&scope.vendor.driver().calls.range_unmap, |function| {
        // SAFETY: `range_unmap` asks for a whole mapping that nothing uses: our caller vouches for
        // it.
        unsafe { function(base, size) }
    })
}

/// Lets a device, and those that were given a way to its memory, reach a mapping.
pub(crate) fn open<V: Vendor>(
    scope: &Scope<'_, V>,
    (base, size): (u64, usize),
    ordinal: c_int,
    access: Access,
    reaching: &[c_int],
) -> Result<()> {
    let mut descriptions = vec![description(ordinal, access)];
    descriptions.extend(reaching.iter().map(|&device| description(device, access)));
    set_access(scope, base, size, &descriptions)
}

fn description(ordinal: c_int, access: Access) -> AccessDescription {
    let flags = match access {
        Access::ReadWrite => ACCESS_READ_WRITE,
        Access::ReadOnly => ACCESS_READ,
    };
    AccessDescription {
        location: Location {
            kind: LOCATION_DEVICE,
            id: ordinal,
        },
        flags,
    }
}

/// Lets devices reach a mapping, each as its description says.
fn set_access<V: Vendor>(
    scope: &Scope<'_, V>,
    base: u64,
    size: usize,
    descriptions: &[AccessDescription],
) -> Result<()> {
    scope.call(&scope.vendor.driver().calls.range_access, |function| {
        // SAFETY: `range_access` reads as many descriptions as it is told: the slice's. An
        // address range without a mapping is refused.
        unsafe { function(base, size, descriptions.as_ptr(), descriptions.len()) }
    })
}
