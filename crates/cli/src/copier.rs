//! A stream, and a buffer in host memory that contents of blocks go through.

use gpu_ipc::backend::DevicePtr;
use gpu_ipc::{Gpu, ReceivedBlock, Result, SentBlock, Stream};

use crate::pattern;

/// A block of either side. Its memory stays while work is queued on a stream that it is used on.
pub trait Block {
    /// Returns its address here.
    fn address(&self) -> DevicePtr;
    /// Returns its bytes.
    fn bytes(&self) -> u64;
    /// Keeps it until what is queued on the stream is done.
    fn keep(&self, stream: &Stream);
}

impl Block for SentBlock {
    fn address(&self) -> DevicePtr {
        self.device_ptr()
    }

    fn bytes(&self) -> u64 {
        self.len()
    }

    fn keep(&self, stream: &Stream) {
        self.used_on(stream).expect("a stream of its own");
    }
}

impl Block for ReceivedBlock {
    fn address(&self) -> DevicePtr {
        self.device_ptr()
    }

    fn bytes(&self) -> u64 {
        self.len()
    }

    fn keep(&self, stream: &Stream) {
        self.used_on(stream).expect("a stream of its own");
    }
}

/// Writes and reads stamped contents.
#[derive(Debug)]
pub struct Copier {
    gpu: Gpu,
    stream: Stream,
    /// Belongs to the copy that is queued, until the stream is done.
    buffer: Vec<u8>,
}

impl Copier {
    /// Makes one for a device.
    ///
    /// # Errors
    ///
    /// The driver's error when it cannot make a stream.
    pub fn new(gpu: &Gpu) -> Result<Copier> {
        Ok(Copier {
            gpu: gpu.clone(),
            stream: Stream::create(gpu)?,
            buffer: Vec::new(),
        })
    }

    /// Returns the stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits until nothing is queued.
    pub fn settle(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Queues a stamp's contents for a block.
    pub fn write(&mut self, block: &impl Block, stamp: u64) -> Result<()> {
        let len = self.take_buffer(block)?;
        pattern::fill(&mut self.buffer, stamp);
        let from = self.buffer.as_ptr();
        // SAFETY: `copy_to_device` asks for
        // - a live stream: `self` keeps it;
        // - two ranges that are valid until the copy is done: the buffer has `len` bytes and is
        //   neither touched nor freed before the stream is done, and the block is borrowed here and
        //   kept for the stream below.
        let queued = unsafe {
            self.gpu
                .backend()
                .copy_to_device(self.stream.raw(), block.address(), from, len)
        };
        block.keep(&self.stream);
        queued
    }

    /// Says whether a block has a stamp's contents, after all that is queued.
    pub fn holds(&mut self, block: &impl Block, stamp: u64) -> Result<bool> {
        let len = self.take_buffer(block)?;
        let to = self.buffer.as_mut_ptr();
        // SAFETY: `copy_to_host` asks for
        // - a live stream: `self` keeps it;
        // - two ranges that are valid until the copy is done: as in `write`.
        let queued = unsafe {
            self.gpu
                .backend()
                .copy_to_host(self.stream.raw(), to, block.address(), len)
        };
        block.keep(&self.stream);
        queued?;
        self.settle()?;
        Ok(pattern::matches(&self.buffer, stamp))
    }

    /// Lists the words of the block that was read last which are not a stamp's: places and
    /// contents.
    pub fn differences(&self, stamp: u64) -> impl Iterator<Item = (u64, u64)> {
        pattern::differences(&self.buffer, stamp)
    }

    /// Queues this many writes of one byte all over a block: work that takes a while.
    pub fn overwrite(&mut self, block: &impl Block, byte: u8, times: u32) -> Result<()> {
        block.keep(&self.stream);
        for _ in 0..times {
            // SAFETY: `fill` asks for
            // - a live stream: `self` keeps it;
            // - a range that is valid until the fill is done: the block is borrowed here and kept
            //   for the stream above.
            unsafe {
                self.gpu
                    .backend()
                    .fill(self.stream.raw(), block.address(), byte, block.bytes())
            }?;
        }
        Ok(())
    }

    /// Waits until the buffer is free and makes it as long as the block.
    fn take_buffer(&mut self, block: &impl Block) -> Result<usize> {
        self.settle()?;
        // A block lies in the address space.
        let len = usize::try_from(block.bytes()).unwrap_or(usize::MAX);
        self.buffer.resize(len, 0);
        Ok(len)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // A copy may still be queued that uses the buffer. If the stream cannot be waited for, the
        // buffer is leaked.
        if self.settle().is_err() {
            std::mem::forget(std::mem::take(&mut self.buffer));
        }
    }
}
