//! Weight hot-swap: a trainer publishes generation after generation of weights, and readers go over
//! to each as it comes.
//!
//! ```text
//! cargo run --example weights -- [--backend host|cuda|hip] [--rounds 20]
//! ```
//!
//! A generation is one block, shared with one ticket that any participant may claim (a broadcast),
//! so the trainer needs no list of its readers. A reader claims the new generation while it still
//! holds the one before, checks it, and lets the old one go. In each tenth round a reader is killed
//! in the middle of its swap and another takes its place. Memory stays flat.

mod shared;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use gpu_ipc::{After, Claims, Participant, ReceivedBlock, SentBlock, Session, Stream, To, Wait};
use harness::{Child, next, say, wait_until};
use serde::{Deserialize, Serialize};
use shared::{Options, PATIENCE, check, end, open, shut_down, words};

/// Bytes of a generation, each word of which is its number.
const WEIGHTS: usize = 256 << 10;
const READERS: usize = 4;
const KILL_EVERY: u64 = 10;

/// A reader: this program in another process.
#[derive(Serialize, Deserialize)]
struct Reader {
    backend: String,
    socket: PathBuf,
}

/// What the trainer announces. The reader answers with the generation when it uses it.
#[derive(Serialize, Deserialize)]
struct News {
    generation: u64,
    ticket: Vec<u8>,
}

fn main() -> ExitCode {
    let done = match harness::role() {
        Some(reader) => read(&reader),
        None => Options::parse("weights", 20).and_then(|options| train(&options)),
    };
    end("weights", done)
}

fn train(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    // At the most two generations exist at once, so one region holds them all.
    let session = Session::builder(gpu)
        .region_bytes(2 * WEIGHTS as u64)
        .open()?;
    let role = Reader {
        backend: options.backend.clone(),
        socket: session.socket_path().into(),
    };
    let mut readers: Vec<Child<News, u64>> = (0..READERS).map(|_| Child::start(&role)).collect();
    let (mut killed, mut reserved) = (0, 0);
    let mut current: Option<SentBlock> = None;
    for generation in 1..=options.rounds {
        let block = session.alloc(WEIGHTS as u64)?;
        // This waits for the copy; a kernel that computes the weights in place needs no wait.
        stream.write(&block, &words(generation, WEIGHTS))?;
        let ticket = block.share(To::Ticket(Claims::Unlimited), After::Stream(&stream))?;
        let news = News {
            generation,
            ticket: ticket.as_bytes().to_vec(),
        };
        readers.iter_mut().for_each(|reader| reader.tell(&news));
        if generation % KILL_EVERY == 0 {
            // It has the generation before, and may have claimed this one.
            let victim = &mut readers[killed % READERS];
            victim.kill();
            *victim = Child::start(&role);
            victim.tell(&news);
            killed += 1;
        }
        for reader in &mut readers {
            if reader.answer() != Some(generation) {
                return Err(format!("a reader failed in generation {generation}").into());
            }
        }
        // What a dead reader held comes back once its death is proven and its quarantine is over.
        if let Some(old) = current.replace(block) {
            old.wait_released(Some(PATIENCE))?;
        }
        wait_until("the old generation to be free", || {
            session.collect();
            session.stats().source.in_use == WEIGHTS as u64
        });
        let now = session.stats().source.reserved;
        if generation > 1 && now > reserved {
            return Err(format!("{now} bytes are reserved in generation {generation}").into());
        }
        reserved = now;
    }
    drop((current, readers));
    shut_down(&session)?;
    println!(
        "weights: {} generations of 256 KiB to {READERS} readers, {killed} killed and replaced; \
         {} KiB reserved from first to last",
        options.rounds,
        reserved >> 10
    );
    Ok(())
}

fn read(reader: &Reader) -> Result<(), Box<dyn Error>> {
    let gpu = open(&reader.backend)?;
    let stream = Stream::create(&gpu)?;
    let trainer = Participant::builder(gpu).connect(&reader.socket)?;
    let mut current: Option<(u64, ReceivedBlock)> = None;
    while let Some(News { generation, ticket }) = next() {
        let block = trainer.claim(&ticket, Wait::Stream(&stream), Some(PATIENCE))?;
        check(&stream, &block, generation)?;
        // Until here a real reader serves from the old one, which was not touched meanwhile.
        if let Some((old, block)) = current.replace((generation, block)) {
            check(&stream, &block, old)?;
        }
        say(&generation);
    }
    Ok(())
}
