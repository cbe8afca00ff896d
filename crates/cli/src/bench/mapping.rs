//! Rows of a region's first mapping, by size and by the way it is shared.

use std::os::fd::AsRawFd;

use gpu_ipc::backend::Sharing;
use gpu_ipc::{After, Gpu, To};
use rustix::io::{FdFlags, fcntl_setfd};

use super::fixture::{Stage, until_released};
use super::row::{Goal, Row};
use super::sample::Pairs;
use super::told::{Exported, Told};
use crate::failure::Result;
use crate::size;

/// Sizes of regions: to as much as fits, and no more than the last.
const SIZES: [u64; 6] = [2 << 20, 64 << 20, 512 << 20, 2 << 30, 8 << 30, 32 << 30];

/// First mappings.
pub fn rows(stage: &Stage) -> Result<Vec<Row>> {
    let caps = *stage.gpu.caps();
    let mut rows = Vec::new();
    for (name, sharing, possible) in [
        ("first-map-fd", Sharing::Fd, caps.fd),
        ("first-map-handle", Sharing::Handle, caps.handle),
    ] {
        for bytes in SIZES
            .into_iter()
            .take(stage.choose(SIZES.len(), 2))
            .filter(|_| possible)
        {
            if fits(stage, bytes)? {
                let shown = size::show(bytes).replace(' ', "");
                let measured = row(stage, name, sharing, bytes, &shown).or_else(|first| {
                    // Once more, with all anew; the note says that it had to be.
                    let again = row(stage, name, sharing, bytes, &shown)?;
                    Ok::<Row, String>(
                        again.note(format!("measured at the second try; the first: {first}")),
                    )
                });
                // What one size cannot have the next may.
                rows.push(
                    measured.unwrap_or_else(|why| Row::failed(&format!("{name}/{shown}"), why)),
                );
            }
        }
    }
    Ok(rows)
}

/// Says whether two regions of this size fit: ours and the bare program's.
fn fits(stage: &Stage, bytes: u64) -> Result<bool> {
    let memory = stage.gpu.backend().memory_info(stage.gpu.device())?;
    // Shared memory is everybody's, and its pages are made by who touches them: nobody does.
    let most = if stage.gpu.kind().in_host_memory() {
        2 << 30
    } else {
        u64::MAX
    };
    Ok(bytes <= most && memory.free_bytes / 10 * 9 >= 2 * bytes)
}

/// Memory of the bare program.
struct Bare(Gpu, gpu_ipc::backend::DevicePtr);

impl Drop for Bare {
    fn drop(&mut self) {
        // SAFETY: `free` asks for memory that came from `alloc`, is not freed, and that nobody has
        // open: the consumer has closed it, or ended. An error leaks it until this process ends.
        let _ = unsafe { self.0.backend().free(self.1) };
    }
}

fn row(stage: &Stage, name: &str, sharing: Sharing, bytes: u64, shown: &str) -> Result<Row> {
    let session = stage
        .builder()
        .sharing(sharing)
        .region_bytes(bytes)
        .open()?;
    let block = session.alloc(bytes)?;
    let backend = stage.gpu.backend();
    let memory = backend.alloc(stage.gpu.device(), bytes, sharing)?;
    let bare = Bare(stage.gpu.clone(), memory.base);
    let mut fd = None;
    let exported = if sharing == Sharing::Fd {
        let exported = backend.export_fd(memory.base)?;
        // The consumer inherits it.
        fcntl_setfd(&exported, FdFlags::empty()).map_err(|e| format!("fcntl: {e}"))?;
        Exported::Fd(fd.insert(exported).as_raw_fd(), memory.len)
    } else {
        Exported::Handle(backend.export_handle(memory.base)?.0.to_vec())
    };
    let mut consumer = stage.start(&session, &["--forgetful".into()])?.up()?;
    drop(fd);
    let mut pairs = Pairs::new(1);
    for round in 0..=stage.choose(12, 3) {
        let descriptor = block.share(To::Participant(consumer.id), After::Done)?;
        let nanos: Vec<u64> = consumer
            .child
            .ask(&Told::Map(descriptor.as_bytes().to_vec(), exported.clone()))?;
        until_released(&session, &block)?;
        // The first round of a process also makes what all later ones share.
        if round > 0 {
            pairs.add(&nanos);
        }
    }
    consumer.child.wait()?;
    drop((block, bare));
    stage.end(session, [])?;
    let what = "claim of a block whose region is not mapped";
    let floor_is = if sharing == Sharing::Fd {
        "raw import and map"
    } else {
        "raw open of the handle"
    };
    let row = Row::new(name, what, floor_is)
        .at(bytes, shown)
        .measured(pairs);
    Ok(if stage.gpu.kind().in_host_memory() {
        row
    } else {
        row.goal(Goal::Times(1.3, 100_000.0))
    })
}
