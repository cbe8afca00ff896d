//! Addresses, and physical memory mapped on them.

use std::mem;

use gpu_api::{Access, Error, Result};

use crate::call::Scope;
use crate::error::SUCCESS;
use crate::physical::Physical;
use crate::sys::{
    ACCESS_READ, ACCESS_READ_WRITE, AccessDescription, CUdevice, LOCATION_DEVICE, Location,
};

/// Addresses with physical memory mapped on them, piece by piece; dropped, all of it is taken down
/// again in reverse.
pub(crate) struct Building<'a, 'd> {
    scope: &'a Scope<'d>,
    base: u64,
    size: usize,
    piece: usize,
    /// Bytes from the base that are mapped.
    mapped: usize,
}

impl<'a, 'd> Building<'a, 'd> {
    /// Reserves addresses for pieces that fill them.
    pub(crate) fn reserve(scope: &'a Scope<'d>, size: usize, piece: usize) -> Result<Self> {
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
    pub(crate) fn map(&mut self, physical: &Physical<'_, '_>) -> Result<()> {
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

    /// Lets devices reach what is mapped, which is all of it.
    pub(crate) fn open(
        &self,
        ordinal: CUdevice,
        access: Access,
        reaching: &[CUdevice],
    ) -> Result<()> {
        if self.mapped != self.size {
            let got = format!("{} bytes of {}", self.mapped, self.size);
            return Err(Error::Invalid {
                what: "memory to import",
                got,
                must: "as many pieces as were announced",
            });
        }
        open(
            self.scope,
            (self.base, self.size),
            ordinal,
            access,
            reaching,
        )
    }

    /// Gives the mapping to the caller.
    pub(crate) fn keep(self) -> u64 {
        let base = self.base;
        mem::forget(self);
        base
    }
}

impl Drop for Building<'_, '_> {
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
pub(crate) fn reserve(scope: &Scope<'_>, size: usize, hint: u64) -> Result<u64> {
    let symbol = &scope.driver.symbols.cuMemAddressReserve;
    let mut base = 0;
    let code = scope.code(symbol, |function| {
        // SAFETY: `cuMemAddressReserve` writes one address: `base` is one. The size is a multiple
        // of the granularity; alignment and flags are 0, and the hint is looked at alone.
        unsafe { function(&raw mut base, size, 0, hint, 0) }
    })?;
    match code {
        SUCCESS => Ok(base),
        code => Err(scope.allocation_error(symbol.name, code, size as u64)),
    }
}

/// Gives reserved addresses back.
///
/// # Safety
///
/// They are a whole reservation without a mapping.
pub(crate) unsafe fn unreserve(scope: &Scope<'_>, base: u64, size: usize) -> Result<()> {
    scope.call(&scope.driver.symbols.cuMemAddressFree, |function| {
        // SAFETY: `cuMemAddressFree` asks for a whole reservation without a mapping: our caller
        // vouches for it.
        unsafe { function(base, size) }
    })
}

/// Takes a mapping down.
///
/// # Safety
///
/// It is a whole mapping that nothing uses.
pub(crate) unsafe fn unmap(scope: &Scope<'_>, base: u64, size: usize) -> Result<()> {
    scope.call(&scope.driver.symbols.cuMemUnmap, |function| {
        // SAFETY: `cuMemUnmap` asks for a whole mapping that nothing uses: our caller vouches for
        // it.
        unsafe { function(base, size) }
    })
}

/// Lets a device, and those that were given a way to its memory, reach a mapping.
pub(crate) fn open(
    scope: &Scope<'_>,
    (base, size): (u64, usize),
    ordinal: CUdevice,
    access: Access,
    reaching: &[CUdevice],
) -> Result<()> {
    let mut descriptions = vec![description(ordinal, access)];
    descriptions.extend(reaching.iter().map(|&device| description(device, access)));
    set_access(scope, base, size, &descriptions)
}

fn description(ordinal: CUdevice, access: Access) -> AccessDescription {
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
fn set_access(
    scope: &Scope<'_>,
    base: u64,
    size: usize,
    descriptions: &[AccessDescription],
) -> Result<()> {
    scope.call(&scope.driver.symbols.cuMemSetAccess, |function| {
        // SAFETY: `cuMemSetAccess` reads as many descriptions as it is told: the slice's. An
        // address range without a mapping is refused.
        unsafe { function(base, size, descriptions.as_ptr(), descriptions.len()) }
    })
}
