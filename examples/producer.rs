//! Shares numbered blocks with whoever connects: `producer SOCKET COUNT [host|cuda|hip]`, a descriptor a line on
//! standard output.

use std::time::Duration;

use gpu_ipc::{After, BackendKind, Session, Stream, To, detect};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(socket), Some(count)) = (args.next(), args.next()) else {
        return Err("usage: producer SOCKET COUNT [host|cuda|hip]".into());
    };
    let name = args.next().unwrap_or_else(|| "host".into());
    let kind = BackendKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or("no such backend")?;
    let gpu = detect()?.first(kind)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu.clone()).socket(socket).open()?;
    let consumer = session.wait_for_participants(1, Some(Duration::from_secs(60)))?[0];
    for number in 0..count.parse::<u64>()? {
        let block = session.alloc(1 << 16)?;
        let bytes = number.to_le_bytes();
        // SAFETY: `copy_to_device` asks for a live stream and for ranges that are valid until the copy is done: the
        // stream is synchronised before `bytes` goes, and the block is shared after the stream.
        unsafe { gpu.backend().copy_to_device(stream.raw(), block.ptr(), bytes.as_ptr(), bytes.len()) }?;
        let descriptor = block.share(To::Participant(consumer), After::Stream(&stream))?;
        stream.synchronize()?;
        println!("{}", descriptor.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        // Dropped here, while the consumer may still hold it: it waits in limbo.
    }
    let report = session.shutdown(Duration::from_secs(60));
    if report.clean { Ok(()) } else { Err(format!("still held: {:?}", report.holders).into()) }
}
