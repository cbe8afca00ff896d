//! Memory of a broker that goes with the process that asked for it.

use std::sync::Arc;

use gpu_api::DevicePtr;
use ipc_rc::Stream;

use super::link::Link;
use super::writer::{CreateOptions, Writer};
use crate::error::Result;
use crate::object::layout::Layout;

/// Memory that is never committed, counts against the broker's limits, and goes with this process.
#[derive(Debug)]
pub struct Scratch {
    writer: Writer,
}

impl Scratch {
    pub(super) fn create(link: &Arc<Link>, name: &str, layout: Layout) -> Result<Scratch> {
        let writer = Writer::create(link, name, layout, &CreateOptions::default(), true)?;
        Ok(Scratch { writer })
    }

    /// Returns the address of a part; see [`Writer::device_ptr`].
    pub fn device_ptr(&self, part: &str) -> Option<DevicePtr> {
        self.writer.device_ptr(part)
    }

    /// Notes that work on this stream touches it.
    ///
    /// # Errors
    ///
    /// As [`Writer::used_on`].
    pub fn used_on(&self, stream: &Stream) -> Result<()> {
        self.writer.used_on(stream)
    }

    /// Returns the parts' names, types, shapes and offsets.
    pub fn layout(&self) -> &Layout {
        self.writer.layout()
    }

    /// Returns the addresses' start, behind which the regions lie in order.
    pub(super) fn base(&self) -> DevicePtr {
        self.writer.base()
    }

    /// Copies a piece of a part to the host.
    ///
    /// # Errors
    ///
    /// As [`Reader::read_at`](crate::Reader::read_at).
    pub fn read_at(&self, part: &str, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.writer.read_at(part, offset, bytes)
    }

    /// Copies bytes from the host into a part from `offset` on, and waits for it.
    ///
    /// # Errors
    ///
    /// As [`Writer::write_part`].
    pub fn write_part(&mut self, part: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        self.writer.write_part(part, offset, bytes)
    }
}
