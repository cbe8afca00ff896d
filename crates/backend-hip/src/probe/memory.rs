//! Memory that is exported as a file descriptor: that it is the same on both sides, that it outlives its exporter's
//! mapping, and that a read-only mapping is one.

use std::os::fd::AsFd;

use gpu_api::{Access, GpuDescriptors, GpuMemory, Sharing};

use super::{Runtime, Seen, expect, told};

const LEN: u64 = 4 << 20;
/// Where the importer writes.
const REPLY: u64 = 4096;

pub(super) fn export(runtime: &Runtime) -> Seen {
    let memory = runtime.hip.alloc(runtime.device, LEN, Sharing::Fd).map_err(told)?;
    let last = memory.base.offset(memory.len - 8);
    runtime.write(memory.base, 1)?;
    runtime.write(last, 2)?;
    let fd = runtime.hip.export_fd(memory.base).map_err(told)?;
    runtime.channel.send(&memory.len.to_le_bytes(), Some(fd.as_fd()))?;
    drop(fd);
    runtime.channel.await_point(b'w')?;
    expect("the exporter sees what the importer wrote", runtime.read(memory.base.offset(REPLY))? == 3)?;
    // SAFETY: `free` asks for an allocation that nothing touches: the importer waits, and what it maps is its own.
    unsafe { runtime.hip.free(memory.base) }.map_err(told)?;
    runtime.channel.tell(b'f')?;
    runtime.channel.await_point(b'r')
}

pub(super) fn import(runtime: &Runtime) -> Seen {
    let (len, fd) = runtime.channel.receive()?;
    let (len, fd) = (u64::from_le_bytes(len), fd.ok_or("no descriptor came")?);
    let import = |len| runtime.hip.import_fd(runtime.device, fd.as_fd(), len, Access::ReadWrite);
    expect("more than there is cannot be imported", import(len + (1 << 30)).is_err())?;
    let base = import(len).map_err(told)?;
    expect("the importer sees the first word", runtime.read(base)? == 1)?;
    expect("the importer sees the last word", runtime.read(base.offset(len - 8))? == 2)?;
    runtime.write(base.offset(REPLY), 3)?;
    drop(fd);
    runtime.channel.tell(b'w')?;
    runtime.channel.await_point(b'f')?;
    expect("the memory outlives its exporter's free", runtime.read(base)? == 1)?;
    // SAFETY: `close` asks for a mapping that nothing touches: the last use was waited for.
    unsafe { runtime.hip.close(base) }.map_err(told)?;
    runtime.channel.tell(b'r')
}

/// Exports memory that the other side is to read only, and looks whether it stayed as it was.
pub(super) fn lend(runtime: &Runtime) -> Seen {
    let memory = runtime.hip.alloc(runtime.device, LEN, Sharing::Fd).map_err(told)?;
    runtime.write(memory.base, 1)?;
    let fd = runtime.hip.export_fd(memory.base).map_err(told)?;
    runtime.channel.send(&memory.len.to_le_bytes(), Some(fd.as_fd()))?;
    runtime.channel.await_point(b'r')?;
    // The other side ends, one way or the other.
    while runtime.channel.await_point(b'!').is_ok() {}
    expect("memory that was imported to read stayed as it was", runtime.read(memory.base)? == 1)
}

/// Imports memory to read, and writes it all the same.
pub(super) fn overwrite(runtime: &Runtime) -> Seen {
    let (len, fd) = runtime.channel.receive()?;
    let (len, fd) = (u64::from_le_bytes(len), fd.ok_or("no descriptor came")?);
    let base = runtime.hip.import_fd(runtime.device, fd.as_fd(), len, Access::ReadOnly).map_err(told)?;
    expect("the importer sees the first word", runtime.read(base)? == 1)?;
    runtime.channel.tell(b'r')?;
    runtime.write(base, 9)?;
    runtime.channel.tell(b'!')
}
