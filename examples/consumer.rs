//! Claims what a producer shares: `consumer SOCKET [host|cuda|hip]`, a descriptor a line on standard input.

use std::io::BufRead;
use std::time::Duration;

use gpu_ipc::{BackendKind, Participant, Stream, Wait, detect};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let socket = args.next().ok_or("usage: consumer SOCKET [host|cuda|hip]")?;
    let name = args.next().unwrap_or_else(|| "host".into());
    let kind = BackendKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or("no such backend")?;
    let gpu = detect()?.first(kind)?;
    let stream = Stream::create(&gpu)?;
    let producer = Participant::builder(gpu.clone()).connect(socket)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let byte = |at| u8::from_str_radix(line.get(at..at + 2).unwrap_or("?"), 16);
        let descriptor = (0..line.len()).step_by(2).map(byte).collect::<Result<Vec<u8>, _>>()?;
        let block = producer.claim(&descriptor, Wait::On(&stream), Some(Duration::from_secs(60)))?;
        let mut number = [0; 8];
        // SAFETY: `copy_to_host` asks for a live stream and for ranges that are valid until the copy is done: the
        // stream is synchronised before `number` is read, and the block is held.
        unsafe { gpu.backend().copy_to_host(stream.raw(), number.as_mut_ptr(), block.device_ptr(), 8) }?;
        stream.synchronize()?;
        println!("{}", u64::from_le_bytes(number));
    }
    Ok(())
}
