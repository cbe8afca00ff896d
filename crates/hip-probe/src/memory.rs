//! Memory that is exported by handle or as a file descriptor: that it is the same on both sides,
//! that it outlives its exporter's mapping, that mapping it waits for nobody, that it comes back,
//! and that a read-only mapping is one.

use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use gpu_api::thread::start_scoped;
use gpu_api::{
    Access, Allocation, DevicePtr, GpuDescriptors, GpuHandles, GpuMemory, MemHandle, RawStream,
    Sharing,
};

use crate::runtime::{Runtime, Seen, expect, told};

/// Enough to tell it from what a runtime takes for itself.
const LEN: u64 = 256 << 20;
/// What a call that waits for nobody may take, and memory that comes back.
const MOMENT: Duration = Duration::from_secs(5);
/// Where the importer writes.
const REPLY: u64 = 4096;

/// Frees memory that was exported.
fn free(runtime: &Runtime, memory: Allocation) -> Seen {
    // SAFETY: `free` asks for an allocation that nothing touches: the other side waits, and what it
    // maps is its own.
    unsafe { runtime.hip.free(memory.base) }.map_err(told)
}

/// Returns the free memory once both sides have started and this one has done what it will do: a
/// runtime takes memory for itself when it starts, and when it first allocates and copies.
fn free_at_rest(runtime: &Runtime) -> Result<u64, String> {
    runtime.channel.await_point(b'h')?;
    let memory = runtime
        .hip
        .alloc(runtime.device, LEN, Sharing::Handle)
        .map_err(told)?;
    runtime.write(memory.base, 1)?;
    runtime.read(memory.base)?;
    free(runtime, memory)?;
    runtime.free_bytes()
}

/// Looks whether there is as much free memory as `before`, but for half of one allocation.
fn expect_back(runtime: &Runtime, before: u64) -> Seen {
    let until = Instant::now() + MOMENT;
    while runtime.free_bytes()? + LEN / 2 < before {
        if Instant::now() > until {
            return expect("exported memory comes back when nobody has it", false);
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Allocates and copies, after an export: the next allocation of a runtime may crash then
/// (ROCm/rocm-systems#8517), of the sizes that it serves in different ways.
fn allocate_on(runtime: &Runtime) -> Seen {
    for len in [256, 2 << 20, LEN as usize] {
        let base = runtime.malloc(len)?;
        runtime.write(base, 7)?;
        expect(
            "an allocation after an export can be used",
            runtime.read(base)? == 7,
        )?;
        runtime.free(base)?;
    }
    Ok(())
}

pub(crate) fn export_handles(runtime: &Runtime) -> Seen {
    let before = free_at_rest(runtime)?;
    let mut exported = Vec::new();
    for n in 1..3 {
        let memory = runtime
            .hip
            .alloc(runtime.device, LEN, Sharing::Handle)
            .map_err(told)?;
        runtime.write(memory.base.offset(memory.len - 8), n)?;
        let handle = runtime.hip.export_handle(memory.base).map_err(told)?;
        allocate_on(runtime)?;
        runtime.channel.send(&handle.0, None)?;
        exported.push(memory);
    }
    runtime.channel.await_point(b'w')?;
    for memory in &exported {
        expect(
            "the exporter sees what was written there",
            runtime.read(memory.base.offset(REPLY))? == 3,
        )?;
    }
    runtime.channel.await_point(b'c')?;
    exported
        .into_iter()
        .try_for_each(|memory| free(runtime, memory))?;
    expect_back(runtime, before)?;
    runtime.channel.tell(b'f')
}

pub(crate) fn open_handles(runtime: &Runtime) -> Seen {
    runtime.channel.tell(b'h')?;
    let mut handles = Vec::new();
    for _ in 1..3 {
        handles.push(MemHandle(runtime.channel.receive()?.0));
    }
    let open = |handle| {
        runtime
            .hip
            .open_handle(runtime.device, handle)
            .map_err(told)
    };
    let close = |base: DevicePtr| {
        // SAFETY: `close` asks for a mapping that nothing touches: the last use was waited for.
        unsafe { runtime.hip.close(base) }.map_err(told)
    };
    let mut open_once = Vec::new();
    for (n, handle) in (1..).zip(&handles) {
        let base = open(handle)?;
        expect(
            "a handle's memory is the same here",
            runtime.read(base.offset(LEN - 8))? == n,
        )?;
        runtime.write(base.offset(REPLY), 3)?;
        open_once.push(base);
    }
    runtime.channel.tell(b'w')?;
    open_once.into_iter().try_for_each(close)?;
    let again = open(&handles[0])?;
    expect(
        "a handle opens once more after it was closed",
        runtime.read(again.offset(LEN - 8))? == 1,
    )?;
    close(again)?;
    runtime.channel.tell(b'c')?;
    runtime.channel.await_point(b'f')
}

pub(crate) fn export(runtime: &Runtime) -> Seen {
    let before = free_at_rest(runtime)?;
    let memory = runtime
        .hip
        .alloc(runtime.device, LEN, Sharing::Fd)
        .map_err(told)?;
    let last = memory.base.offset(memory.len - 8);
    runtime.write(memory.base, 1)?;
    runtime.write(last, 2)?;
    let fd = runtime.hip.export_fd(memory.base).map_err(told)?;
    allocate_on(runtime)?;
    runtime
        .channel
        .send(&memory.len.to_le_bytes(), Some(fd.as_fd()))?;
    drop(fd);
    runtime.channel.await_point(b'w')?;
    expect(
        "the exporter sees what the importer wrote",
        runtime.read(memory.base.offset(REPLY))? == 3,
    )?;
    // Once more, while the first is mapped there.
    let second = runtime.hip.export_fd(memory.base).map_err(told)?;
    runtime.channel.send(b"2", Some(second.as_fd()))?;
    drop(second);
    runtime.channel.await_point(b'2')?;
    free(runtime, memory)?;
    runtime.channel.tell(b'f')?;
    runtime.channel.await_point(b'r')?;
    expect_back(runtime, before)
}

/// Imports while the application's default stream is held up, which must not hold up the import.
fn import_unheld(
    runtime: &Runtime,
    import: impl Fn() -> Result<DevicePtr, String> + Sync,
) -> Result<DevicePtr, String> {
    let go = runtime.hold(RawStream::new(runtime.device, RawStream::LEGACY))?;
    let (done, waiting) = mpsc::channel();
    thread::scope(|scope| {
        // The receiver is dropped after the thread's end only.
        start_scoped(scope, "gpu-ipc-probe", || done.send(import())).map_err(told)?;
        let found = waiting.recv_timeout(MOMENT);
        drop(go);
        found.unwrap_or_else(|_| {
            Err("not so: mapping memory does not wait for the default stream".to_owned())
        })
    })
}

pub(crate) fn import(runtime: &Runtime) -> Seen {
    runtime.channel.tell(b'h')?;
    let (len, fd) = runtime.channel.receive()?;
    let (len, fd) = (u64::from_le_bytes(len), fd.ok_or("no descriptor came")?);
    let import = |len| {
        runtime
            .hip
            .import_fd(runtime.device, fd.as_fd(), len, Access::ReadWrite)
    };
    expect(
        "more than there is cannot be imported",
        import(len + (1 << 30)).is_err(),
    )?;
    let base = import_unheld(runtime, || import(len).map_err(told))?;
    expect("the importer sees the first word", runtime.read(base)? == 1)?;
    expect(
        "the importer sees the last word",
        runtime.read(base.offset(len - 8))? == 2,
    )?;
    runtime.write(base.offset(REPLY), 3)?;
    drop(fd);
    runtime.channel.tell(b'w')?;
    let (_, second) = runtime.channel.receive::<1>()?;
    let second = second.ok_or("no second descriptor came")?;
    let other = runtime
        .hip
        .import_fd(runtime.device, second.as_fd(), len, Access::ReadWrite)
        .map_err(told)?;
    expect(
        "a second export is of the same memory",
        runtime.read(other.offset(REPLY))? == 3,
    )?;
    // SAFETY: `close` asks for a mapping that nothing touches: the last use was waited for.
    unsafe { runtime.hip.close(other) }.map_err(told)?;
    expect("one mapping outlives the other", runtime.read(base)? == 1)?;
    runtime.channel.tell(b'2')?;
    runtime.channel.await_point(b'f')?;
    expect(
        "the memory outlives its exporter's free",
        runtime.read(base)? == 1,
    )?;
    // SAFETY: `close` asks for a mapping that nothing touches: the last use was waited for.
    unsafe { runtime.hip.close(base) }.map_err(told)?;
    runtime.channel.tell(b'r')
}

/// Exports memory that the other side is to read only, and looks whether it stayed as it was.
pub(crate) fn lend(runtime: &Runtime) -> Seen {
    let memory = runtime
        .hip
        .alloc(runtime.device, LEN, Sharing::Fd)
        .map_err(told)?;
    runtime.write(memory.base, 1)?;
    let fd = runtime.hip.export_fd(memory.base).map_err(told)?;
    runtime
        .channel
        .send(&memory.len.to_le_bytes(), Some(fd.as_fd()))?;
    runtime.channel.await_point(b'r')?;
    // The other side ends, one way or the other.
    while runtime.channel.await_point(b'!').is_ok() {}
    expect(
        "memory that was imported to read stayed as it was",
        runtime.read(memory.base)? == 1,
    )
}

/// Imports memory to read, and writes it all the same.
pub(crate) fn overwrite(runtime: &Runtime) -> Seen {
    let (len, fd) = runtime.channel.receive()?;
    let (len, fd) = (u64::from_le_bytes(len), fd.ok_or("no descriptor came")?);
    let base = runtime
        .hip
        .import_fd(runtime.device, fd.as_fd(), len, Access::ReadOnly)
        .map_err(told)?;
    expect("the importer sees the first word", runtime.read(base)? == 1)?;
    runtime.channel.tell(b'r')?;
    runtime.write(base, 9)?;
    runtime.channel.tell(b'!')
}
