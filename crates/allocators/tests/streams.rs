//! Memory that is freed while a stream still works on it, on the host backend's asynchronous
//! streams.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use allocators::*;
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu, RawStream};

const MIB: u64 = 1 << 20;

struct Device {
    gpu: Gpu,
    streams: [RawStream; 2],
}

impl Device {
    fn new() -> Device {
        let gpu = Gpu::new(
            HostBackend::new(HostConfig::default()).expect("it opens"),
            DeviceId(0),
        )
        .expect("a device");
        let streams =
            [(); 2].map(|()| gpu.backend().create_stream(gpu.device()).expect("a stream"));
        Device { gpu, streams }
    }

    /// Lets a stream work until the sender is used or dropped.
    fn busy(&self, stream: RawStream) -> Sender<()> {
        let (end, ended) = channel::<()>();
        let work = Box::new(move || {
            let _ = ended.recv();
        });
        // SAFETY: `host_function` asks for a live stream that nobody captures: ours go with the
        // device.
        unsafe { self.gpu.backend().host_function(stream, work) }.expect("it is queued");
        end
    }

    fn free_on(
        &self,
        allocator: &dyn Allocator,
        address: u64,
        stream: RawStream,
    ) -> gpu_api::Result<()> {
        // SAFETY: `free_on` asks for a live stream of the device: ours are destroyed with it.
        unsafe { Recorded::free_on(allocator, address, &self.gpu, &[stream]) }
    }

    fn request(&self, stream: RawStream) -> Request {
        // SAFETY: `stream_info` asks for a live stream: ours are destroyed with the device.
        let info = unsafe { self.gpu.backend().stream_info(stream) }.expect("a stream of ours");
        Request::new(MIB).on(info.identity)
    }

    fn bfc(&self) -> Arc<Bfc<DeviceMemory>> {
        let memory = DeviceMemory::new(self.gpu.clone()).expect("memory");
        Arc::new(Bfc::new(BfcOptions::new("bfc").limit(MIB), memory))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for stream in self.streams {
            // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: this is
            // its owner's drop.
            unsafe { self.gpu.backend().destroy_stream(stream) }.expect("it is alive");
        }
    }
}

#[test]
fn others_get_it_when_the_work_has_finished_and_its_own_stream_at_once() {
    let device = Device::new();
    let [own, other] = device.streams;
    let bfc = device.bfc();
    let placed = bfc.alloc(device.request(own)).expect("room");
    let end = device.busy(own);
    device.free_on(&bfc, placed.address, own).expect("in use");
    assert!(bfc.free(placed.address).is_err(), "it is freed already");
    assert!(matches!(
        bfc.alloc(device.request(other)),
        Err(Error::OutOfMemory { .. })
    ));
    let again = bfc.alloc(device.request(own)).expect("its own order");
    assert_eq!(again.address, placed.address);
    device.free_on(&bfc, again.address, own).expect("in use");
    end.send(()).expect("the stream waits for it");
    let patient = device
        .request(other)
        .wait_until(Instant::now() + Duration::from_secs(600));
    assert_eq!(
        bfc.alloc(patient).expect("the work has finished").address,
        placed.address
    );
}

#[test]
fn wrappers_hand_it_on() {
    let device = Device::new();
    let [own, _] = device.streams;
    let budget = Arc::new(Budget::new(MIB));
    let stack = Tracking::new(Limit::new(
        Log::new(device.bfc(), std::io::sink()),
        budget.clone(),
    ));
    let placed = stack.alloc(Request::new(MIB)).expect("room");
    let end = device.busy(own);
    device.free_on(&stack, placed.address, own).expect("in use");
    assert_eq!((stack.live().len(), budget.used()), (0, 0));
    assert!(stack.alloc(Request::new(MIB)).is_err(), "still worked on");
    drop(end);

    let pool = Pool::new(PoolOptions::new("pool"), device.bfc()).expect("a pool");
    let placed = pool.alloc(Request::new(MIB)).expect("room");
    let end = device.busy(own);
    device.free_on(&pool, placed.address, own).expect("in use");
    assert_eq!(pool.stats().bytes_in_use, 0);
    assert!(pool.alloc(Request::new(MIB)).is_err(), "still worked on");
    drop(end);
}

fn read(memory: &dyn Memory, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: `read` asks for a range of one allocation that nothing writes meanwhile: the tests
    // write nothing then.
    unsafe { memory.read(address, &mut bytes) }.expect("it is read");
    bytes
}

fn write(memory: &dyn Memory, address: u64, bytes: &[u8]) {
    // SAFETY: `write` asks for a range of one allocation that nothing else uses: it is the test's
    // own, or within what a guard took.
    unsafe { memory.write(address, bytes) }.expect("it is written");
}

#[test]
fn nothing_is_filled_or_marked_that_a_stream_still_works_on() {
    let device = Device::new();
    let [own, _] = device.streams;
    let bfc = device.bfc();
    let memory = bfc.upstream().memory().expect("memory");
    let placed = bfc.alloc(device.request(own)).expect("room");
    write(&*memory, placed.address, b"data");
    let end = device.busy(own);
    device.free_on(&bfc, placed.address, own).expect("in use");
    let fill = NanFill::new(bfc.clone()).expect("memory");
    let guard = Guard::new(bfc.clone()).expect("memory");
    let small = device.request(own);
    for allocator in [&fill as &dyn Allocator, &guard] {
        assert!(
            allocator.alloc(small).is_err(),
            "only memory that nothing works on can be written at once"
        );
    }
    assert_eq!(read(&*memory, placed.address, 4), b"data");
    drop(end);
    fill.alloc(small.wait_until(Instant::now() + Duration::from_secs(600)))
        .expect("the work is done");
    assert_ne!(read(&*memory, placed.address, 4), b"data");
}

#[test]
fn what_is_given_back_after_work_is_filled_after_it() {
    let device = Device::new();
    let [own, other] = device.streams;
    let bfc = device.bfc();
    let memory = bfc.upstream().memory().expect("memory");
    let fill = NanFill::new(bfc.clone()).expect("memory");
    let ends = [own, other].map(|stream| device.busy(stream));
    let placed = fill.alloc(Request::new(1000)).expect("room");
    write(&*memory, placed.address, b"data");
    // SAFETY: `work_on` asks for a live stream of the device: ours are destroyed with it.
    let work = unsafe { Recorded::work_on(&device.gpu, other) }.expect("it is recorded");
    fill.record_work(placed.address, work).expect("in use");
    device.free_on(&fill, placed.address, own).expect("in use");
    let [first, second] = ends;
    drop(first);
    until_done(&device, own);
    assert_eq!(
        (bfc.settle(), read(&*memory, placed.address, 4)),
        (0, b"data".to_vec()),
        "the other works on it"
    );
    drop(second);
    until_done(&device, other);
    assert_eq!(bfc.settle(), 1024);
    let bytes = read(&*memory, placed.address, 4);
    assert!(f32::from_ne_bytes(bytes.try_into().expect("four")).is_nan());
}

#[test]
fn who_writes_beyond_an_end_after_the_free_is_found_when_the_work_is_done() {
    let device = Device::new();
    let [own, _] = device.streams;
    let bfc = device.bfc();
    let memory = bfc.upstream().memory().expect("memory");
    let guard = Guard::new(bfc.clone()).expect("memory");
    let end = device.busy(own);
    let placed = guard.alloc(Request::new(100).tag("row")).expect("room");
    device.free_on(&guard, placed.address, own).expect("in use");
    write(&*memory, placed.address + 100, &[0]);
    assert_eq!(guard.check_all().expect("it can look"), []);
    drop(end);
    until_done(&device, own);
    assert!(bfc.settle() > 0);
    let damage = guard.check_all().expect("it can look");
    assert_eq!((damage.len(), damage[0].at, damage[0].found), (1, 100, 0));
}

/// Waits for a stream.
fn until_done(device: &Device, stream: RawStream) {
    // SAFETY: `synchronize_stream` asks for a live stream: ours are destroyed with the device.
    unsafe { device.gpu.backend().synchronize_stream(stream) }.expect("it works");
}

#[test]
fn an_error_changes_nothing() {
    let device = Device::new();
    let [own, _] = device.streams;
    let bfc = device.bfc();
    let placed = bfc.alloc(Request::new(MIB)).expect("room");
    assert!(device.free_on(&bfc, placed.address + 256, own).is_err());
    assert_eq!(bfc.get(placed.address), Some(placed));
}
