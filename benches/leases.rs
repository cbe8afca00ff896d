//! What a lease costs without a GPU: `cargo bench --bench leases`.
//!
//! One thread, the public API, the host backend, `After::Done`: nothing here waits for a stream. Ratios hold from
//! machine to machine, absolute times do not.

use divan::Bencher;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, DeviceId, Gpu, Participant, ReceivedBlock, SentBlock, Session, To, Wait};

fn main() {
    divan::main();
}

struct Pair {
    session: Session,
    participant: Participant,
    dir: tempfile::TempDir,
}

fn pair() -> Pair {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
    let participant = Participant::builder(gpu).connect(session.socket_path()).expect("connected");
    Pair { session, participant, dir }
}

impl Pair {
    fn lease(&self, block: &SentBlock) -> ReceivedBlock {
        let descriptor = block.share(To::Participant(self.participant.id()), After::Done).expect("shared");
        self.participant.claim(descriptor.as_bytes(), Wait::None, None).expect("claimed")
    }

    /// Fills limbo with blocks that are held.
    fn fill(&self, count: usize) -> Vec<ReceivedBlock> {
        (0..count)
            .map(|_| {
                let block = self.session.alloc(256).expect("there is room");
                self.lease(&block)
            })
            .collect()
    }
}

/// Grant, claim, release, retire.
#[divan::bench(sample_count = 200, sample_size = 1_000)]
fn cycle(bencher: Bencher<'_, '_>) {
    let pair = pair();
    let block = pair.session.alloc(4096).expect("there is room");
    bencher.bench_local(|| {
        drop(pair.lease(&block));
        pair.session.collect()
    });
    assert!(pair.dir.path().exists());
}

#[divan::bench(sample_count = 200, sample_size = 1_000)]
fn share_and_cancel(bencher: Bencher<'_, '_>) {
    let pair = pair();
    let block = pair.session.alloc(4096).expect("there is room");
    let to = To::Participant(pair.participant.id());
    bencher.bench_local(|| {
        let descriptor = block.share(to, After::Done).expect("shared");
        block.cancel(&descriptor)
    });
}

/// One block more is allocated, shared, dropped and let go of, with so many in limbo.
#[divan::bench(args = [0, 1_000, 10_000, 100_000], sample_count = 200, sample_size = 256)]
fn drop_with_in_limbo(bencher: Bencher<'_, '_>, limbo: usize) {
    let pair = pair();
    let held = pair.fill(limbo);
    bencher
        .with_inputs(|| {
            let block = pair.session.alloc(256).expect("there is room");
            let received = pair.lease(&block);
            (block, received)
        })
        .bench_local_values(|(block, received)| {
            drop(block);
            received
        });
    drop(held);
}

/// Collect with so many leases held and none released.
#[divan::bench(args = [1_000, 10_000, 100_000], sample_count = 200, sample_size = 100)]
fn collect_with_held(bencher: Bencher<'_, '_>, held: usize) {
    let pair = pair();
    let block = pair.session.alloc(256).expect("there is room");
    let leases: Vec<ReceivedBlock> = (0..held).map(|_| pair.lease(&block)).collect();
    bencher.bench_local(|| pair.session.collect());
    drop(leases);
}
