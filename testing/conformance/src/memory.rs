//! Memory: allocations, addresses, and what can be exported.

use crate::can;
use gpu_ipc::backend::{Access, DevicePtr, HostMemory, MemoryKind, Sharing};
use gpu_ipc::{Error, Gpu};
use std::os::fd::AsFd;

use crate::Case;
use crate::queue::{Queue, alloc, free};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "memory::live_allocations_do_not_overlap",
        run: no_overlap,
    },
    Case {
        name: "memory::no_bytes_is_an_error",
        run: no_bytes,
    },
    Case {
        name: "memory::lengths_are_rounded_up_to_the_granularity",
        run: rounded,
    },
    Case {
        name: "memory::an_interior_pointer_leads_to_its_allocation",
        run: interior,
    },
    Case {
        name: "memory::every_address_is_classified",
        run: classified,
    },
    Case {
        name: "memory::more_than_there_is_is_an_error_and_the_device_goes_on",
        run: too_much,
    },
    Case {
        name: "memory::is_exported_only_as_it_was_made",
        run: exported_as_made,
    },
    Case {
        name: "memory::a_handle_is_refused_where_it_was_made",
        run: refused_at_home,
    },
    Case {
        name: "memory::what_is_no_device_memory_is_not_imported",
        run: not_imported,
    },
    Case {
        name: "memory::host_memory_is_zeroed_and_writable",
        run: host_memory,
    },
    Case {
        name: "memory::freeing_what_is_not_there_is_an_error",
        run: free_nothing,
    },
    Case {
        name: "memory::what_was_freed_can_be_allocated_again",
        run: freed_comes_back,
    },
    Case {
        name: "memory::a_descriptor_is_closed_on_exec",
        run: closed_on_exec,
    },
];

fn no_overlap(gpu: &Gpu) {
    let mut all: Vec<_> = (1..12u64).map(|n| alloc(gpu, n * 10_000)).collect();
    all.sort_by_key(|allocation| allocation.base);
    for pair in all.windows(2) {
        assert!(pair[0].base.0 + pair[0].len <= pair[1].base.0, "{pair:?}");
    }
    all.into_iter().for_each(|allocation| free(gpu, allocation));
}

fn no_bytes(gpu: &Gpu) {
    let sharing = gpu.default_sharing().expect("the device shares");
    let error = gpu
        .backend()
        .alloc(gpu.device(), 0, sharing)
        .expect_err("no bytes");
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    let host = gpu
        .backend()
        .host_alloc(gpu.device(), 0, HostMemory::default())
        .expect_err("no bytes");
    assert!(matches!(host, Error::Invalid { .. }), "{host}");
}

fn rounded(gpu: &Gpu) {
    for len in [1, gpu.caps().granularity, gpu.caps().granularity + 1] {
        let allocation = alloc(gpu, len);
        assert!(
            allocation.len >= len && allocation.len.is_multiple_of(gpu.caps().granularity),
            "{allocation:?}"
        );
        free(gpu, allocation);
    }
}

fn interior(gpu: &Gpu) {
    let allocation = alloc(gpu, 1 << 20);
    for offset in [0, 1, 4096, (1 << 20) - 1] {
        let range = gpu
            .backend()
            .address_range(allocation.base.offset(offset))
            .expect("it is inside");
        assert_eq!(range.base, allocation.base);
        assert_eq!(range.len, allocation.len);
    }
    // What lies behind it may be another allocation's.
    let behind = gpu
        .backend()
        .address_range(allocation.base.offset(allocation.len));
    assert!(behind.is_err() || behind.is_ok_and(|range| range.base != allocation.base));
    free(gpu, allocation);
    assert!(gpu.backend().address_range(DevicePtr(0x10)).is_err());
}

fn classified(gpu: &Gpu) {
    let backend = gpu.backend();
    for (can, sharing) in [
        (gpu.caps().fd, Sharing::Fd),
        (gpu.caps().handle, Sharing::Handle),
    ] {
        if crate::can(can, way(sharing)) {
            let allocation = backend
                .alloc(gpu.device(), 1 << 16, sharing)
                .expect("there is room");
            let info = backend
                .classify(allocation.base.offset(100))
                .expect("it tells");
            assert_eq!(info.sharing, Some(sharing), "{info:?}");
            let range = info.range.expect("the range of its own memory");
            assert_eq!((range.base, range.len), (allocation.base, allocation.len));
            assert_eq!(info.device, Some(gpu.device()));
            free(gpu, allocation);
        }
    }
    let info = backend
        .classify(DevicePtr(0x10))
        .expect("an unknown address is an answer");
    assert_eq!((info.kind, info.sharing), (MemoryKind::Unknown, None));
    let host = backend
        .host_alloc(
            gpu.device(),
            4096,
            HostMemory {
                pinned: true,
                numa_node: None,
            },
        )
        .expect("room");
    let info = backend
        .classify(DevicePtr(host.0 as u64))
        .expect("it tells");
    assert_eq!((info.kind, info.sharing), (MemoryKind::Host, None));
    // SAFETY: `host_free` asks for host memory that nobody uses: just made.
    unsafe { backend.host_free(host) }.expect("it frees");
}

fn too_much(gpu: &Gpu) {
    let sharing = gpu.default_sharing().expect("the device shares");
    let total = gpu.info().total_bytes;
    for len in [total * 2, u64::MAX] {
        let error = gpu
            .backend()
            .alloc(gpu.device(), len, sharing)
            .expect_err("more than there is");
        assert!(
            matches!(error, Error::OutOfMemory { .. } | Error::Invalid { .. }),
            "{error}"
        );
    }
    free(gpu, alloc(gpu, 4096));
}

fn exported_as_made(gpu: &Gpu) {
    let backend = gpu.backend();
    for (can, sharing) in [
        (gpu.caps().fd, Sharing::Fd),
        (gpu.caps().handle, Sharing::Handle),
    ] {
        if !crate::can(can, way(sharing)) {
            continue;
        }
        let allocation = backend
            .alloc(gpu.device(), 1 << 16, sharing)
            .expect("there is room");
        let (fd, handle) = (
            backend.export_fd(allocation.base),
            backend.export_handle(allocation.base),
        );
        assert_eq!(
            (fd.is_ok(), handle.is_ok()),
            (sharing == Sharing::Fd, sharing == Sharing::Handle)
        );
        for error in [fd.err(), handle.err()].into_iter().flatten() {
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        }
        // A handle says nothing of an offset: the process that opens it would take the base for
        // this address.
        let inside = allocation.base.offset(4096);
        assert!(backend.export_fd(inside).is_err() && backend.export_handle(inside).is_err());
        free(gpu, allocation);
    }
    assert!(
        backend.export_fd(DevicePtr(0x10)).is_err()
            && backend.export_handle(DevicePtr(0x10)).is_err()
    );
}

fn refused_at_home(gpu: &Gpu) {
    if !can(gpu.caps().handle, "handles") {
        return;
    }
    let allocation = gpu
        .backend()
        .alloc(gpu.device(), 1 << 16, Sharing::Handle)
        .expect("there is room");
    let handle = gpu
        .backend()
        .export_handle(allocation.base)
        .expect("it has one");
    let error = gpu
        .backend()
        .open_handle(gpu.device(), &handle)
        .expect_err("opened where it was made");
    assert!(
        matches!(&error, Error::Driver { source, .. } if source.code == 201),
        "{error:?}"
    );
    free(gpu, allocation);
}

fn not_imported(gpu: &Gpu) {
    if !can(gpu.caps().fd, "file descriptors") {
        return;
    }
    let (file, _other) = std::os::unix::net::UnixStream::pair().expect("two descriptors");
    let import = |file, len| {
        gpu.backend()
            .import_fd(gpu.device(), file, len, Access::ReadWrite)
    };
    assert!(import(file.as_fd(), 4096).is_err(), "a socket was imported");
    let memory =
        rustix::fs::memfd_create("conformance", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    let len = gpu.caps().granularity;
    rustix::fs::ftruncate(&memory, len).expect("memory");
    assert!(
        import(memory.as_fd(), len).is_err(),
        "host memory was imported"
    );
}

fn host_memory(gpu: &Gpu) {
    for pinned in [false, true] {
        let host = gpu.backend().host_alloc(
            gpu.device(),
            10_000,
            HostMemory {
                pinned,
                numa_node: None,
            },
        );
        let host = host.expect("there is room");
        assert_eq!(host.0 % 64, 0);
        let bytes = host.0 as *mut u8;
        // SAFETY: `from_raw_parts_mut` asks for 10,000 bytes that nothing else touches: just
        // allocated.
        let bytes = unsafe { std::slice::from_raw_parts_mut(bytes, 10_000) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        bytes[9_999] = 1;
        // SAFETY: `host_free` asks for host memory that nobody uses: `bytes` is not used any more.
        unsafe { gpu.backend().host_free(host) }.expect("it frees");
    }
}

fn free_nothing(gpu: &Gpu) {
    let queue = Queue::new(gpu);
    // SAFETY: `free` asks for an allocation: an address in none is refused by every backend's
    // table.
    assert!(unsafe { gpu.backend().free(DevicePtr(0x10)) }.is_err());
    // SAFETY: `close` asks for a mapping: an address in none is refused by every backend's table.
    assert!(unsafe { gpu.backend().close(DevicePtr(0x10)) }.is_err());
    let allocation = alloc(gpu, 1 << 16);
    // SAFETY: `free` asks for the base of an allocation: an address inside is refused by every
    // backend's table.
    assert!(unsafe { gpu.backend().free(allocation.base.offset(64)) }.is_err());
    // SAFETY: `close` asks for a mapping: memory of this process' own is refused by every backend's
    // table.
    assert!(unsafe { gpu.backend().close(allocation.base) }.is_err());
    free(gpu, allocation);
    assert!(
        // SAFETY: `free` asks for an allocation that is not yet freed: any other is refused by every
        // backend's table.
        unsafe { gpu.backend().free(allocation.base) }.is_err(),
        "freed twice"
    );
    queue.synchronize();
}

fn freed_comes_back(gpu: &Gpu) {
    let half = gpu
        .backend()
        .memory_info(gpu.device())
        .expect("it tells")
        .free_bytes
        / 2;
    for _ in 0..4 {
        free(gpu, alloc(gpu, half));
    }
}

fn closed_on_exec(gpu: &Gpu) {
    if !can(gpu.caps().fd, "file descriptors") {
        return;
    }
    let allocation = gpu
        .backend()
        .alloc(gpu.device(), 1 << 16, Sharing::Fd)
        .expect("there is room");
    let fd = gpu
        .backend()
        .export_fd(allocation.base)
        .expect("it has a descriptor");
    // A program started beside it would keep the memory for as long as it runs.
    let flags = rustix::io::fcntl_getfd(&fd).expect("it is open");
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "{flags:?}");
    free(gpu, allocation);
}

/// Names a way of sharing.
fn way(sharing: Sharing) -> &'static str {
    match sharing {
        Sharing::Handle => "handles",
        _ => "file descriptors",
    }
}
