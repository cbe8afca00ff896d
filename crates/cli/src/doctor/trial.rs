//! A trial: a block is allocated, shared with a child process, looked at there, and comes back.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use gpu_ipc::backend::{Access, Sharing};
use gpu_ipc::{After, Error, Gpu, ParticipantId, Session, To};

use super::check::Check;
use super::consumer::Told;
use crate::child::Child;
use crate::copier::Copier;
use crate::{device, pattern};

/// Bytes of the block: less than a page of any device, and more than one of the host.
const BYTES: u64 = 64 << 10;
/// How long the child may be silent, and the block may take to come back.
const PATIENCE: Duration = Duration::from_secs(60);
/// What is said of an error that says nothing itself.
const REMEDY: &str =
    "repair what fails above, look for other programs on the device, and read docs/TOOLS.md";

/// Names a trial: the same in every version.
pub fn name(sharing: Sharing, access: Access) -> &'static str {
    match (sharing, access) {
        (Sharing::Fd, Access::ReadWrite) => "share by fd",
        (Sharing::Fd, Access::ReadOnly) => "share by fd, read-only",
        _ => "share by handle",
    }
}

/// Tries, and says how it went.
pub fn run(gpu: &Gpu, sharing: Sharing, access: Access) -> Check {
    let name = name(sharing, access);
    let start = Instant::now();
    match try_it(gpu, sharing, access, start) {
        Ok(()) => {
            let seen = if access == Access::ReadOnly {
                "mapped it read-only and read it"
            } else {
                "read it and answered in it"
            };
            Check::ok(
                name,
                format!("a child {seen} ({} ms)", start.elapsed().as_millis()),
            )
        }
        Err(Trouble { why, remedy }) => Check::failed(name, why).remedy(remedy),
    }
}

/// What went wrong and what to do.
struct Trouble {
    why: String,
    remedy: String,
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        let (why, remedy) = device::remedy_of(&error);
        Trouble {
            why,
            remedy: remedy.unwrap_or_else(|| REMEDY.into()),
        }
    }
}

impl From<String> for Trouble {
    fn from(why: String) -> Trouble {
        Trouble {
            why,
            remedy: REMEDY.into(),
        }
    }
}

fn try_it(gpu: &Gpu, sharing: Sharing, access: Access, start: Instant) -> Result<(), Trouble> {
    let session = Session::builder(gpu.clone())
        .sharing(sharing)
        .region_bytes(BYTES)
        .open()?;
    let mut copier = Copier::new(gpu)?;
    let mut consumer = start_consumer(gpu, &session, access)?;
    let id = ParticipantId(consumer.answer()?);

    let stamp = pattern::stamp(
        u64::from(std::process::id()),
        start.elapsed().subsec_nanos(),
    );
    let block = session.alloc(BYTES)?;
    copier.write(&block, stamp)?;
    let descriptor = block.share(To::Participant(id), After::Stream(copier.stream()))?;
    if !consumer.ask::<bool>(&Told {
        descriptor: descriptor.as_bytes().to_vec(),
        stamp,
    })? {
        return Err("the child found other contents than were written"
            .to_owned()
            .into());
    }
    block.wait_released(Some(PATIENCE))?;
    let expected = if access == Access::ReadOnly {
        stamp
    } else {
        pattern::reply(stamp)
    };
    if !copier.holds(&block, expected)? {
        return Err("what the child wrote is not in the block".to_owned().into());
    }
    drop(block);
    consumer.wait()?;
    let report = session.shutdown(PATIENCE);
    if report.clean {
        Ok(())
    } else {
        Err(format!(
            "{} bytes did not come back from a child that has ended",
            report.bytes
        )
        .into())
    }
}

fn start_consumer(gpu: &Gpu, session: &Session, access: Access) -> Result<Child<Told>, String> {
    let mut args: Vec<OsString> = [
        "doctor-process",
        "consumer",
        "--backend",
        gpu.kind().name(),
        "--device",
        &gpu.uuid().to_string(),
        "--socket",
    ]
    .map(OsString::from)
    .to_vec();
    args.push(session.socket_path().into());
    if access == Access::ReadOnly {
        args.push("--read-only".into());
    }
    Child::start(args, PATIENCE)
}
