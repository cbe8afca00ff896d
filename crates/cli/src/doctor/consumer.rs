//! The consumer of a trial: claims one block, looks at the contents, and answers in it where it may
//! write.
//!
//! It is told a descriptor and a stamp, and answers whether the contents are the stamp's. A write
//! to a read-only mapping is not tried: on a GPU it would end this process' context and leave an
//! error in the kernel's log.

use std::time::Duration;

use gpu_ipc::{Participant, Wait};
use serde::{Deserialize, Serialize};

use crate::choice::ConsumerOptions;
use crate::copier::Copier;
use crate::{Outcome, child, device, pattern};

/// What it is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Told {
    /// The block's descriptor.
    pub descriptor: Vec<u8>,
    /// What its contents are made from.
    pub stamp: u64,
}

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
    let participant = builder
        .connect(&options.socket)
        .map_err(|e| device::explain(&e))?;
    child::reply(&participant.id().0)?;
    while let Some(Told { descriptor, stamp }) = child::next()? {
        let block = participant
            .claim(
                &descriptor,
                Wait::Stream(copier.stream()),
                Some(Duration::from_secs(30)),
            )
            .map_err(|e| device::explain(&e))?;
        let good = copier
            .holds(&block, stamp)
            .map_err(|e| device::explain(&e))?;
        if !options.read_only {
            copier
                .write(&block, pattern::reply(stamp))
                .map_err(|e| device::explain(&e))?;
        }
        drop(block);
        child::reply(&good)?;
    }
    Ok(())
}
