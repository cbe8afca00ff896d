//! Default streams: shared after, waited on and dropped from threads that know nothing of the
//! stream's device.

use std::sync::Arc;
use std::thread;

use gpu_ipc::backend::{DeviceId, RawStream};
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Error, Gpu, Participant, ReceivedBlock, SentBlock, State, Stream, To, Wait};

use libloading::Library;

use crate::device::{is_host, open_gpu};
use crate::gate::Gate;
use crate::{Case, Producer, wait_until};

pub const CASES: &[Case] = &[
    (
        "default_stream::orders_and_ends_whatever_device_is_current",
        whatever_is_current,
    ),
    (
        "default_stream::of_a_thread_orders_what_that_thread_queued",
        of_a_thread,
    ),
    (
        "default_stream::of_a_thread_waits_for_the_producer",
        of_a_thread_waits,
    ),
    (
        "default_stream::of_a_thread_is_refused_where_a_later_moment_counts",
        refused_later,
    ),
];

/// A session on the first of several devices, if there are several, and a participant of this
/// process.
struct Both {
    producer: Producer,
    participant: Participant,
}

impl Both {
    fn new() -> Both {
        let gpu = if is_host() {
            let backend =
                HostBackend::new(HostConfig::default().devices(3)).expect("shared memory");
            Gpu::new(backend, DeviceId(0)).expect("there are three")
        } else {
            open_gpu()
        };
        let producer = Producer::on(gpu, |builder| builder);
        let participant =
            Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
        Both {
            producer,
            participant: participant.expect("connected"),
        }
    }

    fn share(&self, block: &SentBlock, stream: &Stream) -> gpu_ipc::Descriptor {
        block
            .share(
                To::Participant(self.participant.id()),
                After::Stream(stream),
            )
            .expect("shared")
    }

    fn claim(&self, descriptor: &gpu_ipc::Descriptor, wait: Wait<'_>) -> ReceivedBlock {
        self.participant
            .claim(descriptor.as_bytes(), wait, None)
            .expect("claimed")
    }

    /// Runs `body` on a thread without a current device, and on threads with each of them current.
    fn on_threads(&self, body: impl Fn() + Sync) {
        let devices = self
            .producer
            .gpu
            .backend()
            .device_count()
            .expect("it counts");
        for current in [None]
            .into_iter()
            .chain((0..devices).map(|device| Some(DeviceId(device))))
        {
            thread::scope(|scope| {
                let there = scope.spawn(|| {
                    let _application = current.map(make_current);
                    body();
                });
                there.join().expect("it holds on every thread");
            });
        }
    }

    fn is_clean(&self) -> bool {
        self.producer.session.collect();
        let stats = self.producer.session.stats();
        assert_eq!(stats.leaked_blocks, 0, "a drop leaked its block");
        stats.limbo_blocks == 0
    }
}

/// Makes a device current on the calling thread, as an application does.
fn make_current(device: DeviceId) -> Box<dyn std::any::Any> {
    if is_host() {
        HostBackend::set_current_device(Some(device));
        return Box::new(());
    }
    if let Ok(runtime) = std::env::var("GPU_IPC_HIP_LIBRARY") {
        // SAFETY: `Library::new` runs the initialisers of the library: the backend has loaded it
        // already.
        let hip = unsafe { Library::new(runtime) }.expect("the backend has loaded it");
        // SAFETY: `Library::get`: the function has this type in AMD's header.
        let set = unsafe { hip.get::<unsafe extern "C" fn(i32) -> u32>(b"hipSetDevice") }
            .expect("it has it");
        // SAFETY: `hipSetDevice` refuses what is no device.
        assert_eq!(unsafe { set(device.0.cast_signed()) }, 0);
        return Box::new(hip);
    }
    let cuda = backend_cuda::CudaBackend::load().expect("the backend that is tested is CUDA");
    Box::new(backend_cuda::launch::Application::begin(&cuda, device).expect("a context"))
}

fn per_thread(gpu: &Gpu) -> Stream {
    // SAFETY: `borrow` asks for a stream that lives as long as its keeper, and that nobody
    // captures: a default stream lives as long as its device, and no case captures.
    unsafe { Stream::borrow(gpu, RawStream::PER_THREAD, Arc::new(())) }
        .expect("every thread has one")
}

fn whatever_is_current() {
    let both = Both::new();
    let gpu = &both.producer.gpu;
    both.on_threads(|| {
        let stream = Stream::default_of(gpu).expect("every device has one");
        let block = both.producer.session.alloc(4096).expect("there is room");
        let go = Gate::close(gpu, &stream);
        let descriptor = both.share(&block, &stream);
        let seen = both.claim(&descriptor, Wait::None);
        assert_eq!(
            seen.state(),
            State::Pending,
            "the share was queued on a stream that is idle"
        );
        drop(go);
        wait_until("the producer's work", || seen.state() == State::Ready);
        stream.synchronize().expect("it runs");
        // Dropped while the stream is held up: the lease and the block wait for it.
        let go = Gate::close(gpu, &stream);
        seen.used_on(&stream)
            .expect("it is one stream on every thread");
        drop(seen);
        for _ in 0..100 {
            both.producer.session.collect();
            assert_eq!(
                block.outstanding(),
                1,
                "the drop was queued on a stream that is idle"
            );
        }
        drop(block);
        drop(go);
        wait_until("the lease and the block to end", || both.is_clean());
    });
    assert_eq!(both.participant.kept_leases(), 0);
}

fn of_a_thread() {
    let both = Both::new();
    let gpu = &both.producer.gpu;
    let stream = per_thread(gpu);
    let block = both.producer.session.alloc(4096).expect("there is room");
    let go = Gate::close(gpu, &stream);
    let held = both.share(&block, &stream);
    let seen = both.claim(&held, Wait::None);
    // Another thread's stream of the same name has nothing before it; ours is still held up.
    thread::scope(|scope| {
        let idle = scope.spawn(|| {
            let other = both.producer.session.alloc(4096).expect("there is room");
            let descriptor = both.share(&other, &per_thread(gpu));
            let seen = both.claim(&descriptor, Wait::Host);
            assert_eq!(seen.state(), State::Ready);
        });
        idle.join().expect("it waits for nobody");
        assert_eq!(seen.state(), State::Pending);
        drop(seen);
        // The block is dropped on a thread whose own stream is idle, and waits for ours.
        scope
            .spawn(|| drop(block))
            .join()
            .expect("a drop never blocks");
    });
    let limbo = || {
        both.producer.session.collect();
        both.producer.session.stats().limbo_blocks
    };
    wait_until("the other block to end", || limbo() <= 1);
    for _ in 0..100 {
        assert_eq!(limbo(), 1, "freed under the work of another thread");
    }
    drop(go);
    wait_until("the block to end", || both.is_clean());
}

fn of_a_thread_waits() {
    let both = Both::new();
    let gpu = &both.producer.gpu;
    let (stream, writer) = (per_thread(gpu), Stream::create(gpu).expect("a stream"));
    let block = both.producer.session.alloc(4096).expect("there is room");
    let go = Gate::close(gpu, &writer);
    let descriptor = both.share(&block, &writer);
    if !gpu.caps().stream_waits {
        // The thread waits in its claim, so another one lets the producer go on.
        thread::scope(|scope| {
            let claims = scope.spawn(|| {
                both.claim(&descriptor, Wait::Stream(&per_thread(gpu)))
                    .state()
            });
            for _ in 0..100 {
                assert!(!claims.is_finished(), "the claim did not wait");
                thread::yield_now();
            }
            drop(go);
            assert_eq!(claims.join().expect("claimed"), State::Ready);
        });
        drop(block);
        return wait_until("the lease and the block to end", || both.is_clean());
    }
    let seen = both.claim(&descriptor, Wait::Stream(&stream));
    // SAFETY: `query_stream` asks for a live stream: a default stream is.
    let idle = unsafe { gpu.backend().query_stream(stream.raw()) };
    assert!(
        !idle.expect("it tells"),
        "the thread's stream does not wait"
    );
    thread::scope(|scope| {
        scope
            .spawn(|| drop(seen))
            .join()
            .expect("a drop never blocks")
    });
    drop(go);
    stream.synchronize().expect("it runs");
    drop(block);
    wait_until("the lease and the block to end", || both.is_clean());
    assert_eq!(both.participant.kept_leases(), 0);
}

fn refused_later() {
    let both = Both::new();
    let stream = per_thread(&both.producer.gpu);
    let block = both.producer.block(1);
    let descriptor = block
        .share(To::Participant(both.participant.id()), After::Done)
        .expect("shared");
    let seen = both.claim(&descriptor, Wait::Host);
    let graph = gpu_ipc::participant::GraphBlocks::new();
    for refused in [
        block.used_on(&stream),
        seen.used_on(&stream),
        graph.launched_on(&stream),
    ] {
        let error = refused.expect_err("another thread would mean another stream");
        assert!(
            matches!(
                error,
                Error::Invalid {
                    what: "the stream",
                    ..
                }
            ),
            "{error:?}"
        );
        assert!(
            error.to_string().contains("a stream of its own"),
            "no remedy: {error}"
        );
    }
}
