//! Blocks across pieces of memory that grows in place: PyTorch opens each as an expandable segment
//! of several chunks.

use gpu_ipc::backend::Sharing;
use gpu_ipc::torch::{Collected, Dtype, Layout, Sender};
use gpu_ipc::{Gpu, Session, Stream};

use super::wire::{Checks, PATIENCE, Result, pattern};
use super::{Consumer, Options, Producer, emptied, let_go};

/// The bytes of a piece: the least that CUDA maps.
const PIECE: u64 = 2 << 20;
/// Those of a block that lies in three of them.
const ACROSS: u64 = PIECE / 2 * 5;

/// Checks such blocks, in a session of their own.
pub fn check(gpu: &Gpu, options: &Options, checks: &mut Checks) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .sharing(Sharing::Fd);
    let session = session.region_bytes(PIECE).grows_in_place(true).open()?;
    let (sender, stream) = (Sender::new(gpu.clone()), Stream::create(gpu)?);
    let producer = Producer {
        gpu: gpu.clone(),
        session,
        sender,
        stream,
    };
    checks.note(
        "a block across three chunks, and one in memory that grew since",
        grows_while_held(&producer, options),
    );
    checks.note(
        "a killed consumer's block across three chunks comes back",
        killed(&producer, options),
    );
    Ok(())
}

fn grows_while_held(producer: &Producer, options: &Options) -> Result<()> {
    let mut consumer = Consumer::start(options)?;
    for (seed, pieces) in [(1, 3), (2, 6)] {
        hold(producer, &mut consumer, seed, pieces)?;
        consumer.wire.send("again")?;
        consumer.wire.agreed()?;
    }
    let_go(producer, &mut consumer, 2)?;
    consumer.end()?;
    all_gone(producer)
}

fn killed(producer: &Producer, options: &Options) -> Result<()> {
    let mut consumer = Consumer::start(options)?;
    hold(producer, &mut consumer, 3, 3)?;
    if producer.sender.collect() != Collected::default() {
        return Err("something came back while the consumer lived".into());
    }
    consumer.kill()?;
    if !producer.sender.wait_released(PATIENCE) {
        return Err("what a dead consumer held does not come back".into());
    }
    all_gone(producer)
}

/// Has memory grow to this number of pieces, and the consumer hold a block across three of them.
fn hold(producer: &Producer, consumer: &mut Consumer, seed: u64, pieces: u64) -> Result<()> {
    let mut grown = Vec::new();
    while producer.session.stats().source.regions < pieces {
        grown.push(producer.session.alloc(PIECE)?);
    }
    drop(grown);
    let block = producer.block(&pattern(Dtype::U8, ACROSS as usize, seed))?;
    let (lies_in, there) = (
        block.regions().len(),
        producer.session.stats().source.regions,
    );
    if (lies_in, there) != (3, pieces) {
        return Err(format!(
            "the block lies in {lies_in} pieces, not 3, and there are {there}, not {pieces}"
        )
        .into());
    }
    let layout = Layout::contiguous(Dtype::U8, &[ACROSS]);
    consumer.wire.send(format!("hold {seed}"))?;
    consumer
        .wire
        .send(producer.message(&block, &consumer.to, &layout)?.1)?;
    consumer.wire.agreed()
}

/// Gives all pieces back to the driver.
fn all_gone(producer: &Producer) -> Result<()> {
    emptied(&producer.session)?;
    producer.session.trim()?;
    match producer.session.stats().source.reserved {
        0 => Ok(()),
        left => Err(format!("{left} bytes stay reserved").into()),
    }
}
