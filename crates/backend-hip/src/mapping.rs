//! Addresses, and physical memory mapped on them.

use std::ffi::c_int;

use gpu_api::{Access, Result};

use crate::call::Scope;
use crate::error::SUCCESS;
use crate::sys::{
    ACCESS_READ, ACCESS_READ_WRITE, AccessDescription, LOCATION_DEVICE, Location, MemoryHandle,
};

/// What was built so far; dropped, it is taken down again in reverse.
pub(crate) struct Building<'a, 'd> {
    scope: &'a Scope<'d>,
    handle: Option<MemoryHandle>,
    reserved: Option<(u64, usize)>,
    mapped: bool,
}

impl<'a, 'd> Building<'a, 'd> {
    /// Begins with physical memory, which is the building's until it is finished.
    pub(crate) fn new(scope: &'a Scope<'d>, handle: MemoryHandle) -> Self {
        Building {
            scope,
            handle: Some(handle),
            reserved: None,
            mapped: false,
        }
    }

    /// Reserves, maps and gives access; the handle stays with what was built.
    pub(crate) fn finish(
        mut self,
        size: usize,
        ordinal: c_int,
        access: Access,
        reaching: &[c_int],
    ) -> Result<u64> {
        let symbols = &self.scope.driver.symbols;
        let handle = self.handle.expect("a building begins with a handle");
        let mut base = 0;
        let code = self.scope.code(&symbols.hipMemAddressReserve, |function| {
            // SAFETY: `hipMemAddressReserve` writes one address: `base` is one. The size is a
            // multiple of the granularity; alignment, hint and flags are 0.
            unsafe { function(&raw mut base, size, 0, 0, 0) }
        })?;
        if code != SUCCESS {
            return Err(self.scope.allocation_error(
                symbols.hipMemAddressReserve.name,
                code,
                size as u64,
            ));
        }
        self.reserved = Some((base, size));
        self.scope.call(&symbols.hipMemMap, |function| {
            // SAFETY: `hipMemMap` asks for a reservation without a mapping and for a handle that is
            // alive: both were made above. Offset and flags are 0; a size beyond the memory is
            // refused.
            unsafe { function(base, size, 0, handle, 0) }
        })?;
        self.mapped = true;
        open(self.scope, (base, size), ordinal, access, reaching)?;
        self.handle = None;
        self.mapped = false;
        self.reserved = None;
        Ok(base)
    }
}

impl Drop for Building<'_, '_> {
    fn drop(&mut self) {
        // What cannot be taken down stays, and so does what it rests on: a leak, and the error that
        // led here is on its way to the caller.
        let symbols = &self.scope.driver.symbols;
        if self.mapped && !self.scope.driver.version().tells_failed_mappings() {
            // Nobody knows whether it is mapped, and what is not must not be unmapped: all of it
            // stays.
            return;
        }
        if let Some((base, size)) = self.reserved.take() {
            let unmapped = !self.mapped
                || self
                    .scope
                    .call(&symbols.hipMemUnmap, |function| {
                        // SAFETY: `hipMemUnmap` asks for a whole mapping that nothing uses: nobody
                        // has seen its address.
                        unsafe { function(base, size) }
                    })
                    .is_ok();
            if unmapped {
                let _ = self.scope.call(&symbols.hipMemAddressFree, |function| {
                    // SAFETY: `hipMemAddressFree` asks for a whole reservation without a mapping:
                    // see above.
                    unsafe { function(base, size) }
                });
            }
        }
        if let Some(handle) = self.handle.take() {
            let _ = self.scope.call(&symbols.hipMemRelease, |function| {
                // SAFETY: `hipMemRelease` asks for a handle that is alive: `finish` did not hand it
                // on.
                unsafe { function(handle) }
            });
        }
    }
}

/// Lets a device, and those that were given a way to its memory, reach a mapping.
pub(crate) fn open(
    scope: &Scope<'_>,
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
fn set_access(
    scope: &Scope<'_>,
    base: u64,
    size: usize,
    descriptions: &[AccessDescription],
) -> Result<()> {
    scope.call(&scope.driver.symbols.hipMemSetAccess, |function| {
        // SAFETY: `hipMemSetAccess` reads as many descriptions as it is told: the slice's. An
        // address range without a mapping is refused.
        unsafe { function(base, size, descriptions.as_ptr(), descriptions.len()) }
    })
}
