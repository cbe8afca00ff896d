//! Foreign memory, descriptors that do not fit, and mappings that may only be read.

use std::fs::File;
use std::os::fd::AsFd;
use std::ptr;

use backend_cuda::launch::Application;
use cudarc::driver::CudaContext;
use gpu_api::groups::*;
use gpu_api::{Access, DevicePtr, Error, HostMemory, MemoryKind, Result, Sharing};

use crate::{Case, GPU, case, cuda, wait_until, write_on};

pub const CASES: &[Case] = &[
    case!(every_kind_of_memory_is_told),
    case!(foreign_memory_is_exported_or_refused),
    case!(a_descriptor_that_does_not_fit_is_refused),
    case!(a_read_only_mapping_cannot_be_written),
    case!(out_of_memory_is_told_and_leaves_the_context_well),
    case!(what_is_freed_comes_back),
    case!(slices_of_cudarc_are_taken_or_refused),
    case!(host_memory_can_be_bound_to_a_node),
];

fn every_kind_of_memory_is_told() -> Result<()> {
    let cuda = cuda();
    let application = Application::begin(&cuda, GPU)?;
    let stream = cuda.create_stream(GPU)?;
    let plain = cuda.alloc(GPU, 1, Sharing::Handle)?;
    let own = cuda.alloc(GPU, 1, Sharing::Fd)?;
    let fd = cuda.export_fd(own.base)?;
    let imported = cuda.import_fd(GPU, fd.as_fd(), own.len, Access::ReadWrite)?;
    // SAFETY: `pool_alloc`: the stream was made above.
    let pool = unsafe { application.pool_alloc(stream, 1 << 20) }?;
    let pinned = cuda.host_alloc(
        GPU,
        4096,
        HostMemory {
            pinned: true,
            numa_node: None,
        },
    )?;
    for (ptr, kind, sharing) in [
        (plain.base, MemoryKind::Plain, Some(Sharing::Handle)),
        (own.base, MemoryKind::Virtual, Some(Sharing::Fd)),
        (imported, MemoryKind::Imported, None),
        (pool, MemoryKind::Pool, None),
        (DevicePtr(pinned.0 as u64), MemoryKind::Host, None),
        (DevicePtr(0x10), MemoryKind::Unknown, None),
    ] {
        let info = cuda.classify(ptr)?;
        assert_eq!((info.kind, info.sharing), (kind, sharing), "{info:?}");
    }
    // A second backend knows nothing of the first one's table: it has only the driver to ask.
    let other = crate::cuda();
    for (ptr, kind, sharing) in [
        (
            plain.base.offset(4096),
            MemoryKind::Plain,
            Some(Sharing::Handle),
        ),
        (
            own.base.offset(4096),
            MemoryKind::Virtual,
            Some(Sharing::Fd),
        ),
        (pool, MemoryKind::Pool, None),
    ] {
        let info = other.classify(ptr)?;
        assert_eq!(
            (info.kind, info.sharing, info.device),
            (kind, sharing, Some(GPU)),
            "{info:?}"
        );
    }
    for allocation in [plain, own] {
        let range = other.address_range(allocation.base.offset(allocation.len - 1))?;
        assert_eq!((range.base, range.len), (allocation.base, allocation.len));
    }
    assert!(matches!(
        other.address_range(DevicePtr(0x10)),
        Err(Error::Invalid { .. })
    ));
    Ok(())
}

fn foreign_memory_is_exported_or_refused() -> Result<()> {
    let cuda = cuda();
    let other = crate::cuda();
    let application = Application::begin(&cuda, GPU)?;
    let stream = cuda.create_stream(GPU)?;
    let (plain, own) = (
        cuda.alloc(GPU, 1, Sharing::Handle)?,
        cuda.alloc(GPU, 1, Sharing::Fd)?,
    );
    other.export_handle(plain.base)?;
    other.export_fd(own.base)?;
    // SAFETY: `pool_alloc`: the stream was made above.
    let pool = unsafe { application.pool_alloc(stream, 1 << 20) }?;
    for base in [own.base, pool, DevicePtr(0x10)] {
        let refused = other.export_handle(base);
        assert!(
            matches!(refused, Err(Error::Unsupported { .. })),
            "{base}: {refused:?}"
        );
    }
    for base in [plain.base, pool, DevicePtr(0x10)] {
        let refused = other.export_fd(base);
        assert!(
            matches!(refused, Err(Error::Unsupported { .. })),
            "{base}: {refused:?}"
        );
    }
    let handle = cuda.export_handle(plain.base)?;
    let own = cuda.open_handle(GPU, &handle);
    assert!(
        matches!(&own, Err(Error::Driver { source, .. }) if source.code == 201),
        "{own:?}"
    );
    Ok(())
}

fn a_descriptor_that_does_not_fit_is_refused() -> Result<()> {
    let cuda = cuda();
    let granularity = cuda.caps(GPU)?.granularity;
    let own = cuda.alloc(GPU, 2 * granularity, Sharing::Fd)?;
    let fd = cuda.export_fd(own.base)?;
    let null = File::open("/dev/null").expect("it is always there");
    let memory = rustix::fs::memfd_create("not-a-gpu", rustix::fs::MemfdFlags::CLOEXEC)
        .expect("it can be made");
    for (fd, len) in [
        (fd.as_fd(), own.len + 1),
        (fd.as_fd(), granularity),
        (fd.as_fd(), 0),
        (null.as_fd(), own.len),
        (memory.as_fd(), own.len),
    ] {
        let refused = cuda.import_fd(GPU, fd, len, Access::ReadWrite);
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    }
    // The context is none the worse for it.
    let mapped = cuda.import_fd(GPU, fd.as_fd(), own.len, Access::ReadWrite)?;
    // SAFETY: `close`: imported above, and nothing uses it.
    unsafe { cuda.close(mapped) }?;
    // SAFETY: `free`: allocated above, and nothing uses it.
    unsafe { cuda.free(own.base) }
}

fn a_read_only_mapping_cannot_be_written() -> Result<()> {
    let cuda = cuda();
    let application = Application::begin(&cuda, GPU)?;
    let kernel = write_on(&application)?;
    let stream = cuda.create_stream(GPU)?;
    let own = cuda.alloc(GPU, 1, Sharing::Fd)?;
    // SAFETY: `fill`: allocated and made above.
    unsafe { cuda.fill(stream, own.base, 7, own.len) }?;
    let fd = cuda.export_fd(own.base)?;
    let mapped = cuda.import_fd(GPU, fd.as_fd(), own.len, Access::ReadOnly)?;
    let mut seen = [0_u8; 16];
    // SAFETY: `copy_to_host`: `seen` has 16 bytes and lives until the stream is synchronised below.
    unsafe { cuda.copy_to_host(stream, seen.as_mut_ptr(), mapped, 16) }?;
    // SAFETY: `synchronize_stream`: made above.
    unsafe { cuda.synchronize_stream(stream) }?;
    assert_eq!(seen, [7; 16]);
    // SAFETY: `launch`: the kernel's four parameters; that it breaks the context is what is tested.
    unsafe { application.launch(&kernel, stream, (1, 1), &[mapped.0, 1, 1000, 0]) }?;
    // SAFETY: `synchronize_stream`: made above.
    let broken = unsafe { cuda.synchronize_stream(stream) }.expect_err("the mapping is read-only");
    assert!(matches!(broken, Error::Driver { .. }), "{broken:?}");
    Ok(())
}

fn out_of_memory_is_told_and_leaves_the_context_well() -> Result<()> {
    let cuda = cuda();
    for sharing in [Sharing::Handle, Sharing::Fd] {
        let total = cuda.memory_info(GPU)?.total_bytes;
        let refused = cuda.alloc(GPU, 2 * total, sharing);
        assert!(
            matches!(refused, Err(Error::OutOfMemory { free, .. }) if free > 0 && free <= total),
            "{refused:?}"
        );
        let small = cuda.alloc(GPU, 1, sharing)?;
        // SAFETY: `free`: allocated above, and nothing uses it.
        unsafe { cuda.free(small.base) }?;
    }
    Ok(())
}

fn what_is_freed_comes_back() -> Result<()> {
    let cuda = cuda();
    let len = 1 << 30;
    for sharing in [Sharing::Handle, Sharing::Fd] {
        // The first allocation of a context makes things that stay.
        let first = cuda.alloc(GPU, len, sharing)?;
        // SAFETY: `free`: allocated above, and nothing uses it.
        unsafe { cuda.free(first.base) }?;
        let before = cuda.memory_info(GPU)?.free_bytes;
        let own = cuda.alloc(GPU, len, sharing)?;
        let fd = (sharing == Sharing::Fd)
            .then(|| cuda.export_fd(own.base))
            .transpose()?;
        assert!(cuda.memory_info(GPU)?.free_bytes < before);
        // SAFETY: `free`: allocated above, and nothing uses it.
        unsafe { cuda.free(own.base) }?;
        if fd.is_some() {
            assert!(
                cuda.memory_info(GPU)?.free_bytes < before,
                "an open descriptor keeps the memory"
            );
        }
        drop(fd);
        // Other processes on the device come and go: what is asked is that it comes back at some
        // time.
        wait_until(|| Ok(cuda.memory_info(GPU)?.free_bytes >= before))?;
    }
    Ok(())
}

fn slices_of_cudarc_are_taken_or_refused() -> Result<()> {
    let cuda = cuda();
    let context = CudaContext::new(0).expect("the device is there");
    assert_eq!(backend_cuda::interop::device(&cuda, &context)?, GPU);
    assert_eq!(
        cuda.context(GPU)?,
        context.cu_ctx().expose_provenance() as u64
    );
    let stream = context.new_stream().expect("a stream can be made");
    let raw = backend_cuda::interop::stream(&cuda, &stream)?;
    // SAFETY: `stream_info`: `stream` is alive.
    let info = unsafe { cuda.stream_info(raw) }?;
    assert_eq!((info.device, info.context), (GPU, cuda.context(GPU)?));

    let pool = stream.alloc_zeros::<u32>(1000).expect("there is room");
    let refused =
        backend_cuda::interop::slice(&cuda, &pool, &stream).expect_err("it is of the pool");
    assert!(refused.to_string().contains("cudaMallocAsync"), "{refused}");

    let plain = cuda.alloc(GPU, 4000, Sharing::Handle)?;
    // SAFETY: `upgrade_device_ptr`: 4000 bytes were allocated above; they are leaked below, never
    // freed by cudarc.
    let slice = unsafe { stream.upgrade_device_ptr::<u32>(plain.base.0, 1000) };
    let range = backend_cuda::interop::slice(&cuda, &slice, &stream)?;
    assert_eq!((range.base, range.len), (plain.base, 4000));
    assert_eq!(slice.leak(), plain.base.0);
    // SAFETY: `free`: allocated above, and nothing uses it.
    unsafe { cuda.free(plain.base) }
}

fn host_memory_can_be_bound_to_a_node() -> Result<()> {
    let cuda = cuda();
    let stream = cuda.create_stream(GPU)?;
    let device = cuda.alloc(GPU, 1 << 20, Sharing::Fd)?;
    for memory in [
        HostMemory {
            pinned: true,
            numa_node: None,
        },
        HostMemory {
            pinned: false,
            numa_node: None,
        },
        HostMemory {
            pinned: true,
            numa_node: Some(0),
        },
    ] {
        let host = match cuda.host_alloc(GPU, 1 << 20, memory) {
            // Containers may forbid the call; then its error is all there is to see.
            Err(Error::System { call: "mbind", .. }) => continue,
            host => host?,
        };
        let bytes = ptr::with_exposed_provenance_mut::<u8>(host.0);
        // SAFETY: `fill`: made and allocated above.
        unsafe { cuda.fill(stream, device.base, 9, 1 << 20) }?;
        // SAFETY: `copy_to_host`: both have as many bytes, and live until the stream is
        // synchronised below.
        unsafe { cuda.copy_to_host(stream, bytes, device.base, 1 << 20) }?;
        // SAFETY: `synchronize_stream`: made above.
        unsafe { cuda.synchronize_stream(stream) }?;
        // SAFETY: `slice::from_raw_parts`: as many bytes were allocated, and nothing writes them
        // any more.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, 1 << 20) };
        assert!(bytes.iter().all(|&byte| byte == 9), "{memory:?}");
        // SAFETY: `host_free`: allocated above, and nothing uses it.
        unsafe { cuda.host_free(host) }?;
    }
    Ok(())
}
