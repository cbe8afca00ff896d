//! KV hand-off: an engine fills the KV cache of sequences and hands it to a decoder; the engine is
//! killed and restarted.
//!
//! ```text
//! cargo run --example kv_handoff -- [--backend host|cuda|hip] [--rounds 10]
//! ```
//!
//! The decoder is this process; it outlives every engine. In each round it takes a batch of
//! sequences over from an engine, and one more whose KV the engine's GPU is still computing. Then
//! the engine is killed. The decoder gets a notice, keeps the KV that is finished, finds the last
//! one poisoned, and asks the next engine for it again.

mod shared;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::channel;

use gpu_ipc::participant::Notice;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, ClaimError, Gpu, Participant, Session, State, Stream, To, Wait};
use harness::{Child, next, say, wait_until};
use serde::{Deserialize, Serialize};
use shared::{Options, PATIENCE, check, end, open, words};

/// Bytes of a sequence's KV, each word of which is the sequence's number.
const KV: usize = 64 << 10;
/// Sequences that an engine finishes before it dies.
const BATCH: u64 = 6;

/// An engine: this program in another process. It is told the first sequence.
#[derive(Serialize, Deserialize)]
struct Engine {
    backend: String,
}

/// What an engine says.
#[derive(Serialize, Deserialize)]
enum Said {
    Listens(PathBuf),
    Finished(Vec<Vec<u8>>),
    Begun(Vec<u8>),
}

fn main() -> ExitCode {
    let done = match harness::role::<Engine>() {
        Some(engine) => compute(&engine.backend),
        None => Options::parse("kv_handoff", 10).and_then(|options| decode(&options)),
    };
    end("kv_handoff", done)
}

fn decode(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    let engine = Engine {
        backend: options.backend.clone(),
    };
    for round in 0..options.rounds {
        take_over(&engine, &gpu, &stream, round * BATCH)?;
    }
    println!(
        "kv_handoff: {0} engines killed; {1} sequences of 64 KiB decoded, {0} poisoned and asked \
         for again; nothing is mapped",
        options.rounds,
        options.rounds * BATCH
    );
    Ok(())
}

/// Lives through one engine: takes a batch of sequences over from it.
fn take_over(role: &Engine, gpu: &Gpu, stream: &Stream, first: u64) -> Result<(), Box<dyn Error>> {
    let mut engine: Child<u64, Said> = Child::start(role);
    let Some(Said::Listens(socket)) = engine.answer() else {
        return Err("the engine does not listen".into());
    };
    let participant = Participant::builder(gpu.clone()).connect(socket)?;
    let (Said::Finished(finished), Some(Said::Begun(begun))) =
        (engine.ask(&first), engine.answer())
    else {
        return Err("the engine did not compute".into());
    };
    let claims = participant.claim_many(&finished, Wait::Stream(stream), Some(PATIENCE));
    let mut kv = claims.into_iter().collect::<Result<Vec<_>, _>>()?;
    for (block, sequence) in kv.iter().zip(first..) {
        check(stream, block, sequence)?;
    }
    // Half of them are decoded to the end; the drop hands the memory back to the engine.
    kv.truncate(kv.len() / 2);

    // The claim does not wait for the engine's GPU; what is queued on `stream` from here on does.
    let unfinished = participant.claim(&begun, Wait::Stream(stream), Some(PATIENCE))?;
    if unfinished.state() != State::Pending {
        return Err(format!("unfinished KV is {:?}", unfinished.state()).into());
    }
    engine.kill();
    wait_until("the notice that the producer is gone", || {
        participant.next_notice() == Some(Notice::ProducerGone)
    });
    // The stream goes on, and what it waited for is marked.
    stream.synchronize()?;
    if unfinished.state() != State::Poisoned {
        return Err(format!("the KV of a killed engine is {:?}", unfinished.state()).into());
    }
    // What was finished is as good as before: the memory lives as long as this process maps it.
    for (block, sequence) in kv.iter().zip(first..) {
        check(stream, block, sequence)?;
        if block.state() != State::ReadyProducerGone {
            return Err(format!("finished KV is {:?}", block.state()).into());
        }
    }
    let late = participant.claim(&finished[0], Wait::Host, Some(PATIENCE));
    if !matches!(late, Err(ClaimError::ProducerGone)) {
        return Err("a claim from a dead engine did not say so".into());
    }
    // With the last block of a region its mapping goes, without any other call.
    drop((kv, unfinished));
    wait_until("the mappings to go", || participant.mappings() == 0);
    Ok(())
}

fn compute(backend: &str) -> Result<(), Box<dyn Error>> {
    let gpu = open(backend)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu).region_bytes(4 * KV as u64).open()?;
    say(&Said::Listens(session.socket_path().into()));
    let first: u64 = next().ok_or("no first sequence was named")?;
    let decoder = To::Participant(session.wait_for_participants(1, Some(PATIENCE))?[0]);
    let mut blocks = Vec::new();
    for sequence in first..first + BATCH {
        let block = session.alloc(KV as u64)?;
        stream.write(&block, &words(sequence, KV))?;
        blocks.push(block);
    }
    // The whole batch costs one fence.
    let grants: Vec<_> = blocks.iter().map(|block| (block, decoder)).collect();
    let shared = session.share_many(&grants, After::Stream(&stream), &ShareOptions::default())?;
    let bytes = shared
        .iter()
        .map(|descriptor| descriptor.as_bytes().to_vec());
    say(&Said::Finished(bytes.collect()));

    // A kernel that takes longer than the engine lives.
    let (end, ended) = channel::<()>();
    stream.host_function(move || {
        let _ = ended.recv();
    })?;
    let unfinished = session.alloc(KV as u64)?;
    let begun = unfinished.share(decoder, After::Stream(&stream))?;
    say(&Said::Begun(begun.as_bytes().to_vec()));
    // The engine is killed here; if the decoder failed, its input ends.
    let _ = next::<u64>();
    drop(end);
    Ok(stream.synchronize()?)
}
