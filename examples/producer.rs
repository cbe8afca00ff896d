//! Shares numbered blocks with each process that connects, and prints a descriptor a line on
//! standard output.
//!
//! ```text
//! cargo build --examples && cd target/debug/examples
//! ./producer /tmp/numbers 5 | (until [ -S /tmp/numbers ]; do sleep 0.1; done; ./consumer /tmp/numbers)
//! ```
//!
//! Takes a path for its socket, a number of blocks, and perhaps a backend: host, cuda or hip.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use gpu_ipc::{After, BackendKind, Session, Stream, To, detect};

fn main() -> ExitCode {
    match produce() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("producer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn produce() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (socket, count, backend) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [socket, count] if !socket.starts_with('-') => (socket, count, "host"),
        [socket, count, backend] if !socket.starts_with('-') => (socket, count, backend),
        _ => return Err("usage: producer SOCKET COUNT [host|cuda|hip]".into()),
    };
    let count: u64 = count
        .parse()
        .map_err(|_| format!("{count} is not a number of blocks"))?;
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == backend);
    let gpu = detect()?.first(kind.ok_or_else(|| format!("no backend is named {backend}"))?)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu).socket(socket).open()?;
    let consumer = session.wait_for_participants(1, Some(Duration::from_secs(60)))?[0];
    for number in 0..count {
        let block = session.alloc(1 << 16)?;
        stream.write(&block, &number.to_le_bytes())?;
        let descriptor = block.share(To::Participant(consumer), After::Stream(&stream))?;
        println!(
            "{}",
            descriptor
                .as_bytes()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
        );
        // Dropped here, while the consumer may still hold it: it waits in limbo.
    }
    let report = session.shutdown(Duration::from_secs(60));
    if report.clean {
        Ok(())
    } else {
        Err(format!("still held: {:?}", report.holders).into())
    }
}
