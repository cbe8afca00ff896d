//! Devices: what there is, and what it says it can do.

use gpu_ipc::backend::{DeviceId, EventKind, Sharing, StreamOp};
use gpu_ipc::{Error, Gpu};

use crate::Case;
use crate::queue::Queue;
use crate::word::Words;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "device::is_found_again_by_its_uuid",
        run: found_again,
    },
    Case {
        name: "device::one_that_is_not_there_is_an_error",
        run: not_there,
    },
    Case {
        name: "device::free_memory_is_at_most_all_of_it",
        run: memory_info,
    },
    Case {
        name: "device::what_its_capabilities_deny_is_refused",
        run: denied,
    },
    Case {
        name: "device::peer_access_is_granted_or_refused_with_a_reason",
        run: peer_access,
    },
    Case {
        name: "device::names_the_files_that_keep_its_work_alive",
        run: device_files,
    },
];

fn found_again(gpu: &Gpu) {
    let again = Gpu::with_uuid(gpu.backend().clone(), gpu.uuid()).expect("it is there");
    assert_eq!(again.device(), gpu.device());
    let mut other = gpu.uuid();
    other.0[0] ^= 0xff;
    assert!(matches!(
        Gpu::with_uuid(gpu.backend().clone(), other),
        Err(Error::NoDevice { .. })
    ));
}

fn not_there(gpu: &Gpu) {
    let count = gpu.backend().device_count().expect("it counts");
    assert!(count > gpu.device().0);
    assert!(gpu.backend().device_info(DeviceId(count)).is_err());
    assert!(
        gpu.backend().memory_info(DeviceId(count)).is_err()
            && gpu_ipc::backend::Caps::of(&**gpu.backend(), DeviceId(count)).is_err()
    );
    for sharing in [Sharing::Fd, Sharing::Handle] {
        assert!(
            gpu.backend().alloc(DeviceId(count), 4096, sharing).is_err(),
            "{sharing:?}"
        );
    }
    assert!(gpu.backend().create_stream(DeviceId(count)).is_err());
    assert!(
        gpu.backend()
            .create_event(DeviceId(count), EventKind::Local)
            .is_err()
    );
}

fn memory_info(gpu: &Gpu) {
    let info = gpu.backend().memory_info(gpu.device()).expect("it tells");
    assert!(info.free_bytes <= info.total_bytes && info.total_bytes > 0);
    assert!(gpu.caps().granularity.is_power_of_two());
}

fn denied(gpu: &Gpu) {
    let (backend, caps) = (gpu.backend(), gpu.caps());
    for (can, sharing) in [(caps.handle, Sharing::Handle), (caps.fd, Sharing::Fd)] {
        let made = backend.alloc(gpu.device(), 4096, sharing);
        assert_eq!(made.is_ok(), can, "{sharing:?}: {made:?}");
        match made {
            // SAFETY: `free` asks for an allocation that nobody uses: just made.
            Ok(made) => unsafe { backend.free(made.base) }.expect("it frees"),
            Err(error) => assert!(matches!(error, Error::Unsupported { .. }), "{error}"),
        }
    }
    let event = backend.create_event(gpu.device(), EventKind::Interprocess);
    assert_eq!(event.is_ok(), caps.event_ipc, "{event:?}");
    if let Ok(event) = event {
        // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: just made.
        unsafe { backend.destroy_event(event) }.expect("it goes");
    }
    let (queue, words) = (Queue::new(gpu), Words::new(gpu));
    let (write, wait) = (
        StreamOp::Write {
            word: words.ptr(0),
            value: 1,
        },
        StreamOp::WaitGeq {
            word: words.ptr(1),
            value: 0,
        },
    );
    for (can, op) in [(caps.stream_writes, write), (caps.stream_waits, wait)] {
        // SAFETY: `stream_batch` asks for a live stream and registered words: `queue` and `words`
        // outlive it.
        let queued = unsafe { backend.stream_batch(queue.raw(), &[op]) };
        assert_eq!(queued.is_ok(), can, "{op:?}: {queued:?}");
    }
    queue.synchronize();
}

fn peer_access(gpu: &Gpu) {
    let count = gpu.backend().device_count().expect("it counts");
    for peer in (0..count)
        .map(DeviceId)
        .filter(|peer| *peer != gpu.device())
    {
        for _ in 0..2 {
            match gpu.backend().enable_peer_access(gpu.device(), peer) {
                Ok(()) => {}
                Err(error) => assert!(matches!(error, Error::Unsupported { .. }), "{error}"),
            }
        }
    }
    assert!(
        gpu.backend()
            .enable_peer_access(gpu.device(), DeviceId(count))
            .is_err()
    );
    assert!(
        gpu.backend()
            .enable_peer_access(DeviceId(count), gpu.device())
            .is_err()
    );
}

fn device_files(gpu: &Gpu) {
    let files = gpu.backend().device_files();
    assert!(
        !files.is_empty() && files.iter().all(|prefix| prefix.starts_with('/')),
        "{files:?}"
    );
    let open = std::fs::read_dir("/proc/self/fd")
        .expect("there is a proc")
        .flatten();
    let links: Vec<String> = open
        .filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.display().to_string()))
        .collect();
    let holds = links
        .iter()
        .any(|link| files.iter().any(|prefix| link.starts_with(prefix)));
    assert!(
        holds,
        "a process with the backend open holds none of {files:?}: {links:?}"
    );
}
