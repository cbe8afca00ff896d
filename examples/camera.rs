//! Camera fan-out: a camera fills frames into a small pool of blocks; a fast and a slow subscriber
//! look at them.
//!
//! ```text
//! cargo run --example camera -- [--backend host|cuda|hip] [--rounds 20]
//! ```
//!
//! The fast subscriber looks at each frame and lets go; the slow one keeps every frame for four
//! ticks of the camera, and is killed in each tenth round. When the slow one has the whole pool, the
//! camera drops frames: it never waits, and never writes into a frame that another process may
//! still look at. Every pixel carries the number of its frame, and both subscribers compare all of
//! them, the slow one again before it lets go: no frame is torn.

mod shared;

use std::collections::VecDeque;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{
    After, Descriptor, Participant, ParticipantId, SentBlock, Session, Stream, To, Wait,
};
use harness::{Child, next, say};
use serde::{Deserialize, Serialize};
use shared::{Options, PATIENCE, check, end, open, pool, shut_down, words};

/// Bytes of a frame: pixels of eight bytes.
const FRAME: usize = 64 << 10;
/// Blocks for frames.
const POOL: usize = 6;
/// Pictures in a round.
const TICKS: u64 = 24;
/// Ticks between two frames that the slow subscriber lets go of.
const SLOWNESS: u64 = 4;
const KILL_EVERY: u64 = 10;
const KILL_AT: u64 = 3;

/// A subscriber with its backend and socket: this program in another process. It says its number as a participant, and then
/// answers everything with how many frames it has.
#[derive(Serialize, Deserialize)]
struct Subscriber(String, PathBuf);

#[derive(Serialize, Deserialize)]
enum Told {
    /// Looks at a frame, and keeps it.
    Look(Vec<u8>),
    /// Lets go of the oldest frame, if there is one.
    LetGo,
}

fn main() -> ExitCode {
    let done = match harness::role() {
        Some(subscriber) => subscribe(&subscriber),
        None => Options::parse("camera", 20).and_then(|options| film(&options)),
    };
    end("camera", done)
}

/// Starts a subscriber, and returns it with its number.
fn start(role: &Subscriber) -> Result<(Child<Told, u64>, To), Box<dyn Error>> {
    let mut child = Child::start(role);
    let id = child.answer().ok_or("a subscriber does not connect")?;
    Ok((child, To::Participant(ParticipantId(id))))
}

fn film(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu)
        .region_bytes((POOL * FRAME) as u64)
        .open()?;
    let pool = pool(&session, POOL, FRAME)?;
    let role = Subscriber(options.backend.clone(), session.socket_path().into());
    let (mut fast, mut slow) = (start(&role)?, start(&role)?);
    let (mut number, mut dropped, mut killed) = (0u64, 0, 0);
    for round in 1..=options.rounds {
        for tick in 0..TICKS {
            if round % KILL_EVERY == 0 && tick == KILL_AT {
                slow.0.kill();
                slow = start(&role)?;
                killed += 1;
            }
            if tick % SLOWNESS == SLOWNESS - 1 {
                slow.0.ask(&Told::LetGo);
            }
            // The question waits for nothing.
            let free = |block: &&SentBlock| block.wait_released(Some(Duration::ZERO)).is_ok();
            let Some(block) = pool.iter().find(free) else {
                dropped += 1;
                continue;
            };
            number += 1;
            // This waits for the copy; a device that renders into the block needs no wait.
            stream.write(block, &words(number, FRAME))?;
            // The frame's number travels in the descriptor.
            let mut user = [0; 64];
            user[..8].copy_from_slice(&number.to_le_bytes());
            let frames = session.share_many(
                &[(block, fast.1), (block, slow.1)],
                After::Stream(&stream),
                &ShareOptions::default().user(user),
            )?;
            for ((subscriber, _), frame) in [&mut fast, &mut slow].into_iter().zip(frames) {
                subscriber.ask(&Told::Look(frame.as_bytes().to_vec()));
            }
            fast.0.ask(&Told::LetGo);
        }
        // A camera need not wait; this one does, so that each round begins with a whole pool.
        for _ in 0..POOL {
            slow.0.ask(&Told::LetGo);
        }
        for block in &pool {
            block.wait_released(Some(PATIENCE))?;
        }
    }
    drop((pool, fast, slow));
    shut_down(&session)?;
    println!(
        "camera: {number} frames of 64 KiB from a pool of {POOL}, none torn; {dropped} dropped \
         rather than waited for; {killed} subscribers killed and replaced"
    );
    Ok(())
}

fn subscribe(role: &Subscriber) -> Result<(), Box<dyn Error>> {
    let gpu = open(&role.0)?;
    let stream = Stream::create(&gpu)?;
    let camera = Participant::builder(gpu).connect(&role.1)?;
    say(&camera.id().0);
    let mut kept = VecDeque::new();
    while let Some(told) = next() {
        match told {
            Told::Look(bytes) => {
                let user = *Descriptor::decode(&bytes)?.user();
                let number = u64::from_le_bytes(user[..8].try_into()?);
                let frame = camera.claim(&bytes, Wait::Stream(&stream), Some(PATIENCE))?;
                check(&stream, &frame, number)?;
                kept.push_back((number, frame));
            }
            Told::LetGo => {
                if let Some((number, frame)) = kept.pop_front() {
                    check(&stream, &frame, number)?;
                }
            }
        }
        say(&(kept.len() as u64));
    }
    Ok(())
}
