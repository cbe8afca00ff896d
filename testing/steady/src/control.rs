//! Leaks on purpose: what a run must find.

use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::ptr;

use clap::ValueEnum;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use serde::Serialize;

/// Bytes of a page, as much as a mapping leaks.
const PAGE: usize = 4096;
/// How many words the list has, by the cube of the looks: other programs make a call longer, but
/// not as much.
const LONGER: usize = 2;
/// Descriptors and mappings at each look.
const EACH: usize = 10;

/// What a control leaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Leak {
    /// A table that has 16 bytes more after each cycle.
    Bytes,
    /// Ten descriptors at each look.
    Descriptor,
    /// Ten pages of shared memory that stay mapped, at each look.
    Mapping,
    /// A list that each cycle reads, and that is longer after each look, by more each time.
    Time,
}

/// What was leaked so far.
#[derive(Debug)]
pub struct Leaks {
    kind: Leak,
    table: Vec<[u8; 16]>,
    descriptors: Vec<OwnedFd>,
    list: Vec<u64>,
    looks: usize,
}

impl Leaks {
    /// Leaks nothing yet.
    pub fn new(kind: Leak) -> Leaks {
        Leaks {
            kind,
            table: Vec::new(),
            descriptors: Vec::new(),
            list: Vec::new(),
            looks: 0,
        }
    }

    /// Leaks what a cycle leaks.
    pub fn cycle(&mut self) {
        match self.kind {
            Leak::Bytes => self.table.push([1; 16]),
            Leak::Time => drop(black_box(black_box(&self.list).iter().sum::<u64>())),
            Leak::Descriptor | Leak::Mapping => {}
        }
    }

    /// Leaks what a look finds.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn look(&mut self) -> Result<(), String> {
        self.looks += 1;
        match self.kind {
            Leak::Bytes => {}
            Leak::Time => self.list.resize(LONGER * self.looks.pow(3), 1),
            Leak::Descriptor => {
                (0..EACH).try_for_each(|_| file().map(|file| self.descriptors.push(file)))?
            }
            Leak::Mapping => (0..EACH).try_for_each(|_| {
                let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED);
                // SAFETY: `mmap` of a null address takes free addresses only; nobody dereferences
                // the result.
                let mapped = unsafe { mmap(ptr::null_mut(), PAGE, protection, flags, &file()?, 0) };
                mapped.map(drop).map_err(|e| format!("mmap: {e}"))
            })?,
        }
        Ok(())
    }
}

fn file() -> Result<OwnedFd, String> {
    let file =
        memfd_create("steady", MemfdFlags::CLOEXEC).map_err(|e| format!("memfd_create: {e}"))?;
    ftruncate(&file, PAGE as u64).map_err(|e| format!("ftruncate: {e}"))?;
    Ok(file)
}
