//! The consumer of a trial: claims one block, looks at the contents, and answers in it where it may write.
//!
//! It is told `DESCRIPTOR STAMP` and answers whether the contents are the stamp's. A write to a read-only mapping is
//! not tried: on a GPU it would end this process' context and leave an error in the kernel's log.

use std::io::BufRead;
use std::time::Duration;

use gpu_ipc::{Participant, Wait};

use lab::args::ConsumerOptions;
use lab::copier::Copier;
use lab::{Outcome, child, device, hex, pattern};

/// Runs until the input ends.
pub fn run(options: &ConsumerOptions) -> Outcome {
    child::live(|| serve(options))
}

fn serve(options: &ConsumerOptions) -> Result<(), String> {
    let gpu = device::find(options.backend.kind(), &options.device)?;
    let mut copier = Copier::new(&gpu).map_err(|e| device::explain(&e))?;
    let mut builder = Participant::builder(gpu);
    if options.read_only {
        builder = builder.read_only();
    }
    let participant = builder.connect(&options.socket).map_err(|e| device::explain(&e))?;
    child::reply(&[participant.id().0])?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        let (descriptor, stamp) = line.split_once(' ').ok_or("not understood")?;
        let stamp = stamp.parse().map_err(|e| format!("{stamp}: {e}"))?;
        let bytes = hex::decode(descriptor).ok_or("the descriptor is not hexadecimal")?;
        let block = participant
            .claim(&bytes, Wait::Stream(copier.stream()), Some(Duration::from_secs(30)))
            .map_err(|e| device::explain(&e))?;
        let good = copier.holds(&block, stamp).map_err(|e| device::explain(&e))?;
        if !options.read_only {
            copier.write(&block, pattern::reply(stamp)).map_err(|e| device::explain(&e))?;
        }
        drop(block);
        child::reply(&[u64::from(good)])?;
    }
    Ok(())
}
