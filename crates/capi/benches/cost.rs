//! What the way through C adds to share, claim and close, on the host backend, both in one run:
//! `cargo bench --profile dist -p gpu-ipc-capi`.
//!
//! `cost rust 1000` and `cost c 1000` run this many cycles of one way and print nothing, for
//! counters of instructions: the difference of two counts is that of the cycles (`valgrind
//! --tool=callgrind`).

use std::ffi::CString;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::time::Instant;

use gpu_ipc::{After, BackendKind, Participant, SentBlock, Session, To, Wait, detect};
use gpu_ipc_c::*;

/// Cycles between two looks at the clock: few, so that most looks end before the system gives the
/// core to others.
const CYCLES: u32 = 200;
/// Looks for each way, in turn; the least of them is told, which a loaded machine disturbs least.
const LOOKS: usize = 10_000;
/// Calls of a cycle: share, claim, close.
const CALLS: f64 = 3.0;

struct Rust {
    block: SentBlock,
    participant: Participant,
    _session: Session,
}

impl Rust {
    fn new(dir: &std::path::Path) -> gpu_ipc::Result<Rust> {
        let gpu = detect()?.first(BackendKind::Host)?;
        let session = Session::builder(gpu.clone())
            .socket(dir.join("rust"))
            .open()?;
        let participant = Participant::builder(gpu).connect(session.socket_path())?;
        Ok(Rust {
            block: session.alloc(4096)?,
            participant,
            _session: session,
        })
    }

    fn cycles(&self, count: u32) {
        let to = To::Participant(self.participant.id());
        for _ in 0..count {
            let descriptor = self.block.share(to, After::Done).expect("a lease");
            drop(
                self.participant
                    .claim(black_box(descriptor.as_bytes()), Wait::Host, None)
                    .expect("a block"),
            );
        }
    }
}

struct C {
    block: *mut gpu_ipc_block,
    participant: *mut gpu_ipc_participant,
}

fn made<T>(open: impl FnOnce(&mut MaybeUninit<*mut T>) -> i32) -> *mut T {
    let mut handle = MaybeUninit::new(null_mut());
    assert_eq!(open(&mut handle), GPU_IPC_OK);
    // SAFETY: `assume_init` asks for a value: null from the start.
    unsafe { handle.assume_init() }
}

impl C {
    fn new(dir: &std::path::Path) -> C {
        let path = CString::new(dir.join("c").to_str().expect("UTF-8")).expect("no zero byte");
        let options = gpu_ipc_session_options {
            size: size_of::<gpu_ipc_session_options>(),
            socket: path.as_ptr(),
            uids: null(),
            uid_count: 0,
            region_bytes: 0,
            time_to_live_ns: 0,
            quarantine_ns: 0,
            max_leases: 0,
            grows_in_place: 0,
        };
        let device = made(|device| gpu_ipc_device_open(GPU_IPC_HOST, 0, Some(device)));
        // SAFETY: `gpu_ipc_session_open` asks for options with their size and good pointers.
        let session = made(|session| unsafe {
            gpu_ipc_session_open(device, &raw const options, Some(session))
        });
        // SAFETY: `gpu_ipc_connect` asks for a path with a zero byte, and options or null.
        let participant = made(|participant| unsafe {
            gpu_ipc_connect(device, path.as_ptr(), null(), Some(participant))
        });
        C {
            block: made(|block| gpu_ipc_alloc(session, 4096, 0, Some(block))),
            participant,
        }
    }

    fn cycles(&self, count: u32) {
        // As a program has them: addresses that the loader found.
        let (share, claim, close) = black_box((
            gpu_ipc_share as Share,
            gpu_ipc_claim as Claim,
            gpu_ipc_received_close,
        ));
        let id = gpu_ipc_participant_id(self.participant);
        for _ in 0..count {
            let mut descriptor = MaybeUninit::uninit();
            // SAFETY: `gpu_ipc_share` asks for options or null.
            let code = unsafe { share(self.block, id, null_mut(), null(), Some(&mut descriptor)) };
            assert_eq!(code, GPU_IPC_OK);
            // SAFETY: `assume_init` asks for a value: the call has succeeded.
            let bytes = black_box(unsafe { descriptor.assume_init() }.bytes);
            let received = made(|received| {
                let (bytes, len) = (bytes.as_ptr().cast(), bytes.len());
                // SAFETY: `gpu_ipc_claim` asks for this many bytes.
                unsafe {
                    claim(
                        self.participant,
                        bytes,
                        len,
                        GPU_IPC_WAIT,
                        null_mut(),
                        -1,
                        Some(received),
                    )
                }
            });
            assert_eq!(close(received), GPU_IPC_OK);
        }
    }
}

type Share = unsafe extern "C" fn(
    *mut gpu_ipc_block,
    u64,
    *mut gpu_ipc_stream,
    *const gpu_ipc_share_options,
    Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32;
type Claim = unsafe extern "C" fn(
    *mut gpu_ipc_participant,
    *const std::ffi::c_void,
    usize,
    u32,
    *mut gpu_ipc_stream,
    i64,
    Option<&mut MaybeUninit<*mut gpu_ipc_received>>,
) -> i32;

/// Returns the nanoseconds of a cycle.
fn time(cycles: impl FnOnce(u32)) -> f64 {
    let start = Instant::now();
    cycles(CYCLES);
    start.elapsed().as_nanos() as f64 / f64::from(CYCLES)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let (rust, c) = (Rust::new(dir.path())?, C::new(dir.path()));
    // `cargo bench` adds one of its own.
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    if let [way, count] = &args[..] {
        let count = count.parse()?;
        if way == "rust" {
            rust.cycles(count)
        } else {
            c.cycles(count)
        }
        return Ok(());
    }
    let (mut least_rust, mut least_c) = (f64::MAX, f64::MAX);
    for _ in 0..LOOKS {
        least_rust = least_rust.min(time(|count| rust.cycles(count)));
        least_c = least_c.min(time(|count| c.cycles(count)));
    }
    println!(
        "share, claim and close: {least_rust:.1} ns in Rust, {least_c:.1} ns through C, {:.2} times",
        least_c / least_rust
    );
    println!(
        "a call through C: {:.1} ns more",
        (least_c - least_rust) / CALLS
    );
    Ok(())
}
