//! Claims what a producer shares: a descriptor a line on standard input, as `examples/producer.rs`
//! prints them.
//!
//! Takes the path of the producer's socket, and perhaps a backend: host, cuda or hip.

use std::error::Error;
use std::io::BufRead;
use std::process::ExitCode;
use std::time::Duration;

use gpu_ipc::{BackendKind, Participant, Stream, Wait, detect};

fn main() -> ExitCode {
    match consume() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("consumer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn consume() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (socket, backend) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [socket] if !socket.starts_with('-') => (socket, "host"),
        [socket, backend] if !socket.starts_with('-') => (socket, backend),
        _ => return Err("usage: consumer SOCKET [host|cuda|hip]".into()),
    };
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == backend);
    let gpu = detect()?.first(kind.ok_or_else(|| format!("no backend is named {backend}"))?)?;
    let stream = Stream::create(&gpu)?;
    let producer = Participant::builder(gpu).connect(socket)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let byte = |at| u8::from_str_radix(line.get(at..at + 2).unwrap_or("?"), 16);
        let descriptor: Result<Vec<u8>, _> = (0..line.len()).step_by(2).map(byte).collect();
        let descriptor = descriptor
            .map_err(|_| format!("{line:?} is not a descriptor in hexadecimal digits"))?;
        let block = producer.claim(
            &descriptor,
            Wait::Stream(&stream),
            Some(Duration::from_secs(60)),
        )?;
        let mut number = [0; 8];
        stream.read(&block, &mut number)?;
        println!("{}", u64::from_le_bytes(number));
    }
    Ok(())
}
