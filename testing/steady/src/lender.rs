//! A session in another process, whose regions the process under watch maps and unmaps.
//!
//! It answers with the path of its socket; and whenever it is told a participant's number, with the
//! descriptor of a block that it has dropped, with the contents that `STAMP` makes.

use clap::Args as Group;
use gpu_ipc::{After, ParticipantId, Session, To};

use gpu_ipc_cli::choice::Vendor;
use gpu_ipc_cli::copier::Copier;
use gpu_ipc_cli::device::{self, explain};
use gpu_ipc_cli::{Outcome, child};

/// Bytes of a block that is lent.
const BLOCK: u64 = 4096;
/// What it contains.
pub const STAMP: u64 = 7;

/// Options of the lender.
#[derive(Group, Debug)]
pub struct SteadyLenderOptions {
    /// Which backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
    /// Which device
    #[arg(long)]
    pub device: String,
}

/// Lends until its input ends.
pub fn run(options: &SteadyLenderOptions) -> Outcome {
    child::live(|| -> Result<(), String> {
        let gpu = device::find(options.backend.kind(), &options.device)?;
        let session = Session::builder(gpu.clone())
            .region_bytes(1 << 20)
            .open()
            .map_err(|e| explain(&e))?;
        let mut copier = Copier::new(&gpu).map_err(|e| explain(&e))?;
        child::reply(&session.socket_path())?;
        while let Some(participant) = child::next()? {
            let block = session.alloc(BLOCK).map_err(|e| explain(&e))?;
            copier
                .write(&block, STAMP)
                .and_then(|()| copier.settle())
                .map_err(|e| explain(&e))?;
            let to = To::Participant(ParticipantId(participant));
            let descriptor = block.share(to, After::Done).map_err(|e| explain(&e))?;
            child::reply(&descriptor.as_bytes().to_vec())?;
        }
        Ok(())
    })
}
