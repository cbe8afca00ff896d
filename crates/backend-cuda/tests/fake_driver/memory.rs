//! Memory: the order of the driver's calls, and what is left when one of them fails.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_api::groups::*;
use gpu_api::{Access, DeviceId, DevicePtr, Error, HostMemory, MemoryKind, Sharing};

use crate::fake::{self, GPU, Kind};
use crate::{Case, Library};

macro_rules! case {
    ($name:ident) => {
        Case {
            name: stringify!($name),
            library: Library::Whole,
            environment: &[],
            run: $name,
        }
    };
}

pub const CASES: &[Case] = &[
    case!(virtual_memory_is_built_and_taken_down_in_order),
    case!(a_failed_virtual_allocation_is_taken_down_in_reverse),
    case!(every_failure_of_an_allocation_leaves_nothing),
    case!(every_failure_of_an_opening_leaves_nothing),
    case!(every_failure_of_host_memory_leaves_nothing),
    case!(a_free_that_failed_is_never_tried_again),
    case!(a_call_that_waits_for_the_context_waits_for_our_streams_first),
    case!(lengths_and_addresses_are_checked),
    case!(out_of_memory_says_how_much_is_free),
    case!(a_code_of_no_header_stays_a_number),
    case!(an_import_is_checked_against_its_descriptor),
    case!(an_exported_descriptor_is_closed_on_exec),
    case!(only_the_base_of_own_memory_is_exported),
    case!(several_pieces_lie_side_by_side),
    case!(every_failure_of_a_piece_leaves_nothing),
    case!(a_handle_is_closed_as_often_as_it_was_opened),
    case!(every_kind_of_memory_is_told_and_refused_with_a_remedy),
    case!(an_address_inside_finds_its_base),
    case!(host_memory_is_zeroed_and_placed),
    Case {
        name: "a_peer_reaches_what_is_and_what_comes",
        library: Library::Whole,
        environment: &[("FAKE_DEVICES", "3")],
        run: a_peer_reaches_what_is_and_what_comes,
    },
    Case {
        name: "a_peer_is_given_nothing_that_is_being_unmapped",
        library: Library::Whole,
        environment: &[("FAKE_DEVICES", "2")],
        run: a_peer_is_given_nothing_that_is_being_unmapped,
    },
];

fn virtual_memory_is_built_and_taken_down_in_order() {
    let cuda = fake::cuda();
    fake::clear_trace();
    let allocation = cuda.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    assert_eq!(allocation.len, 0x20_0000);
    let built = [
        "cuMemGetAllocationGranularity",
        "cuDevicePrimaryCtxRetain",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemRelease",
    ];
    assert_eq!(fake::trace(), built);
    assert_eq!(fake::flags(Kind::Mapped, allocation.base.0), 3);

    fake::clear_trace();
    let fd = cuda
        .export_fd(allocation.base)
        .expect("it is virtual memory");
    assert_eq!(
        fake::trace(),
        [
            "cuMemRetainAllocationHandle",
            "cuMemExportToShareableHandle",
            "cuMemRelease"
        ]
    );

    fake::clear_trace();
    let mapped = cuda
        .import_fd(GPU, fd.as_fd(), allocation.len, Access::ReadOnly)
        .expect("it is all there");
    assert_ne!(mapped, allocation.base);
    assert_eq!(fake::flags(Kind::Mapped, mapped.0), 1);
    // SAFETY: `close`: imported above, and nothing uses it.
    unsafe { cuda.close(mapped) }.expect("it is mapped");

    fake::clear_trace();
    // SAFETY: `free`: allocated above, and nothing uses it.
    unsafe { cuda.free(allocation.base) }.expect("it is mapped");
    assert_eq!(fake::trace(), ["cuMemUnmap", "cuMemAddressFree"]);
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn a_failed_virtual_allocation_is_taken_down_in_reverse() {
    let cuda = fake::cuda();
    for (call, taken_down) in [
        ("cuMemCreate", &[][..]),
        ("cuMemAddressReserve", &["cuMemRelease"][..]),
        ("cuMemMap", &["cuMemAddressFree", "cuMemRelease"][..]),
        (
            "cuMemSetAccess",
            &["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"][..],
        ),
    ] {
        fake::clear_trace();
        fake::fail(call, 719);
        let error = cuda.alloc(GPU, 1, Sharing::Fd).expect_err("a call failed");
        assert_eq!(fake::code(&error), Some(719), "{call}");
        let trace = fake::trace();
        let at = trace
            .iter()
            .position(|name| name == call)
            .expect("the call was made");
        assert_eq!(trace[at + 1..], *taken_down, "{call}");
        assert_eq!(
            (fake::all_live(), fake::violations()),
            (vec![], 0),
            "{call}"
        );
    }
}

fn every_failure_of_an_allocation_leaves_nothing() {
    let cuda = fake::cuda();
    for sharing in [Sharing::Fd, Sharing::Handle] {
        fake::each_failure(
            || cuda.alloc(GPU, 1, sharing),
            |made| {
                // SAFETY: `free`: allocated by the attempt, and nothing uses it.
                unsafe { cuda.free(made.base) }.expect("no failure is left");
            },
        );
    }
    let allocation = cuda.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    fake::each_failure(|| cuda.export_fd(allocation.base), drop);
    let allocation = cuda.alloc(GPU, 1, Sharing::Handle).expect("there is room");
    fake::each_failure(|| cuda.export_handle(allocation.base), |_| ());
}

fn every_failure_of_an_opening_leaves_nothing() {
    let cuda = fake::cuda();
    let fd = fake::foreign_fd(0x40_0000);
    fake::each_failure(
        || cuda.import_fd(GPU, fd.as_fd(), 0x40_0000, Access::ReadWrite),
        |made| {
            // SAFETY: `close`: imported by the attempt, and nothing uses it.
            unsafe { cuda.close(made) }.expect("no failure is left");
        },
    );
    fake::each_failure(
        || cuda.open_handle(GPU, &fake::foreign_handle()),
        |made| {
            // SAFETY: `close`: opened by the attempt, and nothing uses it.
            unsafe { cuda.close(made) }.expect("no failure is left");
        },
    );
}

fn every_failure_of_host_memory_leaves_nothing() {
    let cuda = fake::cuda();
    fake::each_failure(
        || {
            cuda.host_alloc(
                GPU,
                100,
                HostMemory {
                    pinned: true,
                    numa_node: None,
                },
            )
        },
        |made| {
            // SAFETY: `host_free`: allocated by the attempt, and nothing uses it.
            unsafe { cuda.host_free(made) }.expect("no failure is left");
        },
    );
}

/// The driver waits under a lock that every other thread needs, so the waiting is done before.
fn a_call_that_waits_for_the_context_waits_for_our_streams_first() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream");
    let base = cuda
        .alloc(GPU, 1, Sharing::Handle)
        .expect("there is room")
        .base;
    let opened = cuda
        .open_handle(GPU, &fake::foreign_handle())
        .expect("it is another process'");
    let pinned = cuda
        .host_alloc(
            GPU,
            100,
            HostMemory {
                pinned: true,
                numa_node: None,
            },
        )
        .expect("there is room");
    let first_waits = |last: &str| {
        let trace = fake::trace();
        let at = |name: &str| {
            trace
                .iter()
                .position(|call| call == name)
                .unwrap_or_else(|| panic!("no {name}: {trace:?}"))
        };
        let order = [at("cuEventRecord"), at("cuEventQuery"), at(last)];
        assert!(order.is_sorted(), "{trace:?}");
        fake::clear_trace();
        trace.iter().any(|call| call == "cuEventCreate")
    };
    fake::clear_trace();
    // SAFETY: `free`: allocated above, and nothing uses it.
    unsafe { cuda.free(base) }.expect("it was allocated");
    assert!(first_waits("cuMemFree_v2"), "the first wait makes an event");
    // SAFETY: `close`: opened above, and nothing uses it.
    unsafe { cuda.close(opened) }.expect("it was opened");
    assert!(!first_waits("cuIpcCloseMemHandle"), "it is recorded again");
    // SAFETY: `host_free`: allocated above, and nothing uses it.
    unsafe { cuda.host_free(pinned) }.expect("it was allocated");
    assert!(!first_waits("cuMemFreeHost"), "it is recorded again");
    // SAFETY: `destroy_stream`: made above, and nothing uses it.
    unsafe { cuda.destroy_stream(stream) }.expect("it was made");
    drop(cuda);
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn a_free_that_failed_is_never_tried_again() {
    let cuda = fake::cuda();
    for (sharing, call) in [
        (Sharing::Handle, "cuMemFree_v2"),
        (Sharing::Fd, "cuMemUnmap"),
        (Sharing::Fd, "cuMemAddressFree"),
    ] {
        let base = cuda.alloc(GPU, 1, sharing).expect("there is room").base;
        fake::fail(call, 999);
        // SAFETY: `free`: allocated above, and nothing uses it.
        let error = unsafe { cuda.free(base) }.expect_err("the driver failed");
        assert_eq!(fake::code(&error), Some(999));
        fake::clear_trace();
        // SAFETY: `free`: refused before the driver is asked: that is what is tested.
        let error = unsafe { cuda.free(base) }.expect_err("it leaked");
        assert!(
            matches!(&error, Error::Invalid { got, .. } if got.contains("leaked")),
            "{error:?}"
        );
        assert!(fake::trace().is_empty());
    }
    let opened = cuda
        .open_handle(GPU, &fake::foreign_handle())
        .expect("it is another process'");
    fake::fail("cuIpcCloseMemHandle", 999);
    // SAFETY: `close`: opened above, and nothing uses it.
    assert!(unsafe { cuda.close(opened) }.is_err());
    assert!(matches!(
        // SAFETY: `close`: refused before the driver is asked: that is what is tested.
        unsafe { cuda.close(opened) },
        Err(Error::Invalid { .. })
    ));
    drop(cuda);
    assert_eq!(fake::retained(0), 1, "what leaked keeps its context");
}

fn lengths_and_addresses_are_checked() {
    let cuda = fake::cuda();
    for sharing in [Sharing::Fd, Sharing::Handle] {
        for len in [0, u64::MAX, 1 << 63] {
            assert!(
                matches!(cuda.alloc(GPU, len, sharing), Err(Error::Invalid { .. })),
                "{sharing:?} {len}"
            );
        }
    }
    assert!(matches!(
        cuda.host_alloc(GPU, 0, HostMemory::default()),
        Err(Error::Invalid { .. })
    ));
    assert!(matches!(
        cuda.alloc(DeviceId(1), 1, Sharing::Fd),
        Err(Error::Invalid { .. })
    ));
    assert!(matches!(
        cuda.alloc(DeviceId(1), 1, Sharing::Handle),
        Err(Error::Invalid { .. })
    ));
    assert!(matches!(
        cuda.address_range(DevicePtr(0x10)),
        Err(Error::Invalid { .. })
    ));
    let base = cuda.alloc(GPU, 1, Sharing::Fd).expect("there is room").base;
    assert!(matches!(
        // SAFETY: `close`: refused: it is no other process' memory.
        unsafe { cuda.close(base) },
        Err(Error::Invalid { .. })
    ));
    assert!(matches!(
        // SAFETY: `free`: refused: it is no base.
        unsafe { cuda.free(base.offset(64)) },
        Err(Error::Invalid { .. })
    ));
    assert!(matches!(
        // SAFETY: `host_free`: refused: it is no host memory.
        unsafe { cuda.host_free(gpu_api::HostPtr(base.0 as usize)) },
        Err(Error::Invalid { .. })
    ));
    assert_eq!(fake::violations(), 0);
}

fn out_of_memory_says_how_much_is_free() {
    let cuda = fake::cuda();
    for (sharing, call) in [
        (Sharing::Handle, "cuMemAlloc_v2"),
        (Sharing::Fd, "cuMemCreate"),
        (Sharing::Fd, "cuMemAddressReserve"),
    ] {
        fake::fail(call, 2);
        let error = cuda
            .alloc(GPU, 4096, sharing)
            .expect_err("there is no room");
        assert!(
            matches!(
                error,
                Error::OutOfMemory {
                    device: GPU,
                    free: 12345,
                    ..
                }
            ),
            "{error:?}"
        );
        assert!(fake::all_live().is_empty());
    }
}

fn a_code_of_no_header_stays_a_number() {
    let cuda = fake::cuda();
    for code in [919, 100_000, u32::MAX] {
        fake::fail("cuMemAlloc_v2", code);
        let error = cuda
            .alloc(GPU, 1, Sharing::Handle)
            .expect_err("the driver failed");
        assert_eq!(fake::code(&error), Some(code));
        let source = std::error::Error::source(&error)
            .expect("the driver's code is the cause")
            .to_string();
        assert!(
            source.contains(&code.to_string()) && source.contains("does not name"),
            "{source}"
        );
        assert!(!format!("{error:?}").is_empty());
    }
}

fn an_import_is_checked_against_its_descriptor() {
    let cuda = fake::cuda();
    let fd = fake::foreign_fd(0x20_0000);
    let larger = fake::foreign_fd(0x40_0000);
    let invalid = |result: gpu_api::Result<DevicePtr>| {
        let error = result.expect_err("it does not fit");
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert!(fake::all_live().is_empty());
    };
    invalid(cuda.import_fd(GPU, fd.as_fd(), 0x20_0001, Access::ReadWrite));
    invalid(cuda.import_fd(GPU, larger.as_fd(), 0x20_0000, Access::ReadWrite));
    invalid(cuda.import_fd(GPU, fd.as_fd(), 0, Access::ReadWrite));
    invalid(cuda.import_fd(GPU, fd.as_fd(), u64::MAX, Access::ReadWrite));
    let file = File::open("/dev/null").expect("it is always there");
    invalid(cuda.import_fd(GPU, file.as_fd(), 0x20_0000, Access::ReadWrite));
    assert!(
        cuda.import_fd(GPU, fd.as_fd(), 5, Access::ReadWrite)
            .is_ok()
    );
    assert!(
        rustix::fs::fstat(&fd).is_ok(),
        "the descriptor stays the caller's"
    );
}

fn an_exported_descriptor_is_closed_on_exec() {
    let cuda = fake::cuda();
    let own = cuda.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    let fd = cuda.export_fd(own.base).expect("it is virtual memory");
    let flags = rustix::io::fcntl_getfd(&fd).expect("it is open");
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "{flags:?}");
}

fn only_the_base_of_own_memory_is_exported() {
    let cuda = fake::cuda();
    let refused = |base, expected: &str| {
        fake::clear_trace();
        for error in [cuda.export_handle(base).err(), cuda.export_fd(base).err()] {
            let Some(Error::Unsupported { why, .. }) = error else {
                panic!("{error:?}")
            };
            assert!(why.contains(expected), "{why}");
        }
        let asked = fake::trace();
        assert!(
            !asked
                .iter()
                .any(|call| call.contains("Export") || call.contains("IpcGet")),
            "{asked:?}"
        );
    };
    for sharing in [Sharing::Fd, Sharing::Handle] {
        let own = cuda.alloc(GPU, 1, sharing).expect("there is room");
        refused(own.base.offset(4096), "not the first address");
    }
    let fd = fake::foreign_fd(0x20_0000);
    refused(
        cuda.import_fd(GPU, fd.as_fd(), 0x20_0000, Access::ReadWrite)
            .expect("it fits"),
        "from another one",
    );
    refused(
        cuda.open_handle(GPU, &fake::foreign_handle())
            .expect("it is another process'"),
        "from another one",
    );
}

const PIECE: u64 = 0x20_0000;

/// Descriptors of pieces, made when they are asked for; those after the first `good` are too long.
fn pieces(
    count: usize,
    good: usize,
) -> impl ExactSizeIterator<Item = gpu_api::Result<std::os::fd::OwnedFd>> {
    (0..count).map(move |number| {
        Ok(fake::foreign_fd(if number < good {
            PIECE
        } else {
            2 * PIECE
        }))
    })
}

fn several_pieces_lie_side_by_side() {
    let cuda = fake::cuda();
    fake::clear_trace();
    let base = cuda
        .import_fds(GPU, &mut pieces(3, 3), PIECE, Access::ReadOnly)
        .expect("they fit");
    let piece = [
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemMap",
    ];
    let mut built = vec![
        "cuMemGetAllocationGranularity",
        "cuDevicePrimaryCtxRetain",
        "cuMemAddressReserve",
    ];
    built.extend(piece.into_iter().cycle().take(9));
    built.extend([
        "cuMemSetAccess",
        "cuMemRelease",
        "cuMemRelease",
        "cuMemRelease",
    ]);
    assert_eq!(fake::trace(), built);
    for number in 0..3 {
        assert_eq!(fake::flags(Kind::Mapped, base.offset(number * PIECE).0), 1);
    }
    let range = cuda
        .address_range(base.offset(3 * PIECE - 1))
        .expect("it is inside");
    assert_eq!((range.base, range.len), (base, 3 * PIECE));
    fake::clear_trace();
    // SAFETY: `close`: imported above, and nothing uses it.
    unsafe { cuda.close(base) }.expect("it is mapped");
    assert_eq!(
        fake::trace(),
        ["cuMemUnmap", "cuMemUnmap", "cuMemUnmap", "cuMemAddressFree"]
    );
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));

    for (len, mut fds) in [
        (PIECE, pieces(3, 2)),
        (PIECE, pieces(0, 0)),
        (PIECE + 1, pieces(1, 0)),
        (0, pieces(1, 1)),
    ] {
        let error = cuda
            .import_fds(GPU, &mut fds, len, Access::ReadWrite)
            .expect_err("they do not fit");
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
    }
    let mut torn = pieces(2, 2).map(|fd| fd.and(Err(Error::Deadline { what: "a piece" })));
    let error = cuda
        .import_fds(GPU, &mut torn, PIECE, Access::ReadWrite)
        .expect_err("there is no descriptor");
    assert!(matches!(error, Error::Deadline { .. }), "{error:?}");
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn every_failure_of_a_piece_leaves_nothing() {
    let cuda = fake::cuda();
    fake::each_failure(
        || cuda.import_fds(GPU, &mut pieces(2, 2), PIECE, Access::ReadWrite),
        |made| {
            // SAFETY: `close`: imported by the attempt, and nothing uses it.
            unsafe { cuda.close(made) }.expect("no failure is left");
        },
    );
    // One that cannot be taken down stays, and all that it rests on.
    let base = cuda
        .import_fds(GPU, &mut pieces(2, 2), PIECE, Access::ReadWrite)
        .expect("they fit");
    fake::fail("cuMemUnmap", 999);
    assert_eq!(
        // SAFETY: `close`: imported above, and nothing uses it.
        unsafe { cuda.close(base) }
            .err()
            .as_ref()
            .and_then(fake::code),
        Some(999)
    );
    assert!(matches!(
        // SAFETY: `close`: refused before the driver is asked: that is what is tested.
        unsafe { cuda.close(base) },
        Err(Error::Invalid { .. })
    ));
    assert_eq!(
        (
            fake::live(Kind::Mapped),
            fake::live(Kind::Reserved),
            fake::violations()
        ),
        (2, 1, 0)
    );
}

fn a_handle_is_closed_as_often_as_it_was_opened() {
    let cuda = fake::cuda();
    let first = cuda
        .open_handle(GPU, &fake::foreign_handle())
        .expect("it is another process'");
    let second = cuda
        .open_handle(GPU, &fake::foreign_handle())
        .expect("it is another process'");
    assert_eq!(first, second);
    assert_eq!(
        cuda.address_range(first).expect("it is open").len,
        0x40_0000
    );
    for _ in 0..2 {
        assert_eq!(fake::live(Kind::Opened), 1);
        // SAFETY: `close`: opened twice above, and nothing uses it.
        unsafe { cuda.close(first) }.expect("it was opened twice");
    }
    assert_eq!(fake::live(Kind::Opened), 0);
    assert!(matches!(
        // SAFETY: `close`: refused: it is not open.
        unsafe { cuda.close(first) },
        Err(Error::Invalid { .. })
    ));

    let own = cuda
        .alloc(GPU, 1, Sharing::Handle)
        .expect("there is room")
        .base;
    let handle = cuda.export_handle(own).expect("it is plain memory");
    let error = cuda
        .open_handle(GPU, &handle)
        .expect_err("a process cannot open its own");
    assert_eq!(fake::code(&error), Some(201));
    assert_eq!(fake::violations(), 0);
}

fn every_kind_of_memory_is_told_and_refused_with_a_remedy() {
    let cuda = fake::cuda();
    for (kind, exportable, expected, sharing) in [
        (Kind::Plain, true, MemoryKind::Plain, Some(Sharing::Handle)),
        (Kind::Mapped, true, MemoryKind::Virtual, Some(Sharing::Fd)),
        (Kind::Mapped, false, MemoryKind::Virtual, None),
        (Kind::Pool, false, MemoryKind::Pool, None),
        (Kind::Managed, false, MemoryKind::Managed, None),
        (Kind::Pinned, false, MemoryKind::Host, None),
        (Kind::Foreign, false, MemoryKind::Imported, None),
    ] {
        let base = DevicePtr(fake::add(kind, exportable));
        let info = cuda
            .classify(base.offset(100))
            .expect("every address has an answer");
        assert_eq!((info.kind, info.sharing), (expected, sharing), "{kind:?}");
        assert_eq!(
            info.range.map(|range| (range.base, range.len)),
            Some((base, 0x20_0000)),
            "{kind:?}"
        );
        if sharing != Some(Sharing::Handle) {
            let error = cuda.export_handle(base).expect_err("it has no handle");
            assert!(
                matches!(error, Error::Unsupported { .. }),
                "{kind:?}: {error:?}"
            );
        }
        if sharing != Some(Sharing::Fd) {
            let error = cuda.export_fd(base).expect_err("it has no descriptor");
            assert!(
                matches!(error, Error::Unsupported { .. }),
                "{kind:?}: {error:?}"
            );
        }
    }
    let pool = cuda
        .export_handle(DevicePtr(fake::add(Kind::Pool, false)))
        .expect_err("a pool's")
        .to_string();
    assert!(
        pool.contains("cudaMallocAsync") && pool.contains("cuMemAlloc"),
        "{pool}"
    );
    let unknown = cuda
        .classify(DevicePtr(0x10))
        .expect("every address has an answer");
    assert_eq!(
        (unknown.kind, unknown.range, unknown.sharing),
        (MemoryKind::Unknown, None, None)
    );
    assert_eq!(fake::violations(), 0);
}

fn an_address_inside_finds_its_base() {
    let cuda = fake::cuda();
    let own = cuda.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    let range = cuda
        .address_range(own.base.offset(own.len - 1))
        .expect("it is inside");
    assert_eq!((range.base, range.len), (own.base, own.len));
    assert!(cuda.address_range(own.base.offset(own.len)).is_err());
    let foreign = DevicePtr(fake::add(Kind::Plain, true));
    assert_eq!(
        cuda.address_range(foreign.offset(7))
            .expect("the driver knows it")
            .base,
        foreign
    );
}

fn host_memory_is_zeroed_and_placed() {
    let cuda = fake::cuda();
    for memory in [
        HostMemory {
            pinned: true,
            numa_node: None,
        },
        HostMemory {
            pinned: false,
            numa_node: None,
        },
    ] {
        let ptr = cuda.host_alloc(GPU, 10_000, memory).expect("there is room");
        assert!(ptr.0.is_multiple_of(64));
        // SAFETY: `slice::from_raw_parts`: as many bytes were allocated above.
        let bytes = unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(ptr.0), 10_000)
        };
        assert!(bytes.iter().all(|&byte| byte == 0), "{memory:?}");
        // SAFETY: `host_free`: allocated above, and nothing uses it.
        unsafe { cuda.host_free(ptr) }.expect("it was allocated");
    }
    // A kernel without that node, or a container without the right to ask, refuses; then nothing
    // may be left.
    match cuda.host_alloc(
        GPU,
        10_000,
        HostMemory {
            pinned: true,
            numa_node: Some(0),
        },
    ) {
        Ok(ptr) => {
            assert_eq!(fake::flags(Kind::Registered, ptr.0 as u64), 3);
            fake::clear_trace();
            // SAFETY: `host_free`: allocated above, and nothing uses it.
            unsafe { cuda.host_free(ptr) }.expect("it was allocated");
            assert_eq!(fake::trace(), ["cuMemHostUnregister"]);
        }
        Err(error) => assert!(
            matches!(error, Error::System { call: "mbind", .. }),
            "{error:?}"
        ),
    }
    let absent = cuda.host_alloc(
        GPU,
        1,
        HostMemory {
            pinned: true,
            numa_node: Some(1023),
        },
    );
    assert!(
        matches!(absent, Err(Error::System { call: "mbind", .. })),
        "{absent:?}"
    );
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn a_peer_is_given_nothing_that_is_being_unmapped() {
    let cuda = fake::cuda();
    let (owner, reader) = (DeviceId(0), DeviceId(1));
    // Looked at first, so that what is listed last has time to go.
    let stays = [(); 50].map(|()| cuda.alloc(owner, 1, Sharing::Fd).expect("there is room"));
    let gone = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..3000 {
                let own = cuda.alloc(owner, 1, Sharing::Fd).expect("there is room");
                // SAFETY: `free`: allocated above, and nothing uses it.
                unsafe { cuda.free(own.base) }.expect("it was allocated");
            }
            gone.store(true, Ordering::Relaxed);
        });
        while !gone.load(Ordering::Relaxed) {
            fake::clear_trace();
            cuda.enable_peer_access(reader, owner)
                .expect("what is listed is mapped");
        }
    });
    for own in stays {
        // SAFETY: `free`: allocated above, and nothing uses it.
        unsafe { cuda.free(own.base) }.expect("it was allocated");
    }
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn a_peer_reaches_what_is_and_what_comes() {
    let cuda = fake::cuda();
    let (owner, reader, apart) = (DeviceId(0), DeviceId(1), DeviceId(2));
    let own = cuda.alloc(owner, 1, Sharing::Fd).expect("there is room");
    assert_eq!(fake::last_access_count(), 1);
    let fd = cuda.export_fd(own.base).expect("it is exportable");
    let import = |access| {
        cuda.import_fd(owner, fd.as_fd(), own.len, access)
            .expect("it is memory")
    };
    let before = import(Access::ReadOnly);
    let allowed = fake::flags(Kind::Mapped, before.0);
    fake::clear_trace();
    cuda.enable_peer_access(reader, owner)
        .expect("they reach each other");
    let trace = fake::trace();
    assert!(
        trace.ends_with(
            &["cuCtxEnablePeerAccess", "cuMemSetAccess", "cuMemSetAccess"].map(str::to_owned)
        ),
        "{trace:?}"
    );
    assert_eq!(
        fake::flags(Kind::Mapped, before.0),
        allowed,
        "a peer may do no more than the owner of the mapping"
    );
    import(Access::ReadWrite);
    assert_eq!(fake::last_access_count(), 2);
    cuda.import_fds(owner, &mut pieces(2, 2), PIECE, Access::ReadWrite)
        .expect("they fit");
    assert_eq!(fake::last_access_count(), 2);
    cuda.enable_peer_access(reader, owner)
        .expect("once more is no error");
    assert!(cuda.alloc(owner, 1, Sharing::Fd).is_ok());
    assert_eq!(fake::last_access_count(), 2);
    assert!(cuda.alloc(reader, 1, Sharing::Fd).is_ok());
    assert_eq!(fake::last_access_count(), 1);
    assert!(cuda.enable_peer_access(owner, owner).is_ok());
    assert!(matches!(
        cuda.enable_peer_access(apart, owner),
        Err(Error::Unsupported { .. })
    ));
    assert_eq!((fake::depth(), fake::violations()), (0, 0));
}
