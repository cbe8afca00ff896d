//! Memory that is freed while a stream still works on it, on the host backend's asynchronous streams.

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
        let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
        let streams = [(); 2].map(|()| gpu.backend().create_stream(gpu.device()).expect("a stream"));
        Device { gpu, streams }
    }

    /// Lets a stream work until the sender is used or dropped.
    fn busy(&self, stream: RawStream) -> Sender<()> {
        let (end, ended) = channel::<()>();
        let work = Box::new(move || {
            let _ = ended.recv();
        });
        // SAFETY: `host_function` asks for a live stream that nobody captures: ours go with the device.
        unsafe { self.gpu.backend().host_function(stream, work) }.expect("it is queued");
        end
    }

    fn free_on(&self, allocator: &dyn Allocator, address: u64, stream: RawStream) -> gpu_api::Result<()> {
        // SAFETY: `free_on` asks for a live stream of the device: ours are destroyed with it.
        unsafe { Recorded::free_on(allocator, address, &self.gpu, stream) }
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
            // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: this is its owner's drop.
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
    assert!(matches!(bfc.alloc(device.request(other)), Err(Error::OutOfMemory { .. })));
    let again = bfc.alloc(device.request(own)).expect("its own order");
    assert_eq!(again.address, placed.address);
    device.free_on(&bfc, again.address, own).expect("in use");
    end.send(()).expect("the stream waits for it");
    let patient = device.request(other).wait_until(Instant::now() + Duration::from_secs(600));
    assert_eq!(bfc.alloc(patient).expect("the work has finished").address, placed.address);
}

#[test]
fn wrappers_that_need_not_look_hand_it_on_and_others_refuse() {
    let device = Device::new();
    let [own, _] = device.streams;
    let budget = Arc::new(Budget::new(MIB));
    let stack = Tracking::new(Limit::new(Log::new(device.bfc(), std::io::sink()), budget.clone()));
    let placed = stack.alloc(Request::new(MIB)).expect("room");
    let end = device.busy(own);
    device.free_on(&stack, placed.address, own).expect("in use");
    assert_eq!((stack.live().len(), budget.used()), (0, 0));
    assert!(stack.alloc(Request::new(MIB)).is_err(), "still worked on");
    drop(end);

    let guard = Guard::new(device.bfc()).expect("memory");
    let placed = guard.alloc(Request::new(100)).expect("room");
    let refused = device.free_on(&guard, placed.address, own).expect_err("it looks at the marks");
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    guard.free(placed.address).expect("nothing changed");
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
