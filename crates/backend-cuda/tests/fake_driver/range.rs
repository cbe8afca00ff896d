//! Memory apart from addresses: without a context, and given back whatever fails.

use std::os::fd::AsFd;

use gpu_api::groups::*;
use gpu_api::{Access, DeviceId, DevicePtr, Error, RawMemory, Sharing};

use crate::fake::{self, GPU, Kind};
use crate::{Case, Library};

macro_rules! case {
    ($name:ident, $library:ident) => {
        Case {
            name: stringify!($name),
            library: Library::$library,
            environment: &[("FAKE_DEVICES", "2")],
            run: $name,
        }
    };
}

pub const CASES: &[Case] = &[
    case!(a_store_needs_no_context, Whole),
    case!(a_wanted_address_is_had_or_refused, Whole),
    case!(every_failure_of_a_store_leaves_nothing, Whole),
    case!(every_failure_of_a_range_leaves_nothing, Whole),
    case!(a_peer_reaches_pieces_too, Whole),
    case!(
        a_piece_that_could_not_be_unmapped_is_never_tried_again,
        Whole
    ),
    case!(an_old_driver_has_no_ranges, Old),
];

const PIECE: u64 = 0x20_0000;

fn release(cuda: &impl GpuStore, memory: RawMemory) {
    // SAFETY: `release_memory`: the cases release what they made, once.
    unsafe { cuda.release_memory(memory) }.expect("it was made");
}

fn a_store_needs_no_context() {
    let cuda = fake::cuda();
    let device = DeviceId(1);
    let made = cuda.create_memory(device, 1).expect("room");
    assert_eq!((made.device, made.len), (device, PIECE));
    // SAFETY: `export_memory`: made above.
    let fd = unsafe { cuda.export_memory(made) }.expect("it exports");
    assert!(
        rustix::io::fcntl_getfd(&fd)
            .is_ok_and(|flags| flags.contains(rustix::io::FdFlags::CLOEXEC))
    );
    let again = cuda
        .import_memory(device, fd.as_fd(), PIECE)
        .expect("it imports");
    release(&*cuda, made);
    release(&*cuda, again);
    fake::fail("cuMemCreate", 2);
    let full = cuda
        .create_memory(device, 5 * PIECE)
        .expect_err("the driver says so");
    assert!(
        matches!(full, Error::OutOfMemory { device: named, asked, .. } if named == device && asked == 5 * PIECE),
        "{full:?}"
    );
    assert_eq!(
        (fake::retained(0), fake::retained(1)),
        (0, 0),
        "a context costs half a gigabyte"
    );
    assert!(
        !fake::trace()
            .iter()
            .any(|call| call == "cuDevicePrimaryCtxRetain")
    );
    assert_eq!(
        (
            fake::all_live(),
            fake::violations(),
            fake::depth(),
            fake::mode()
        ),
        (vec![], 0, 0, 0)
    );
}

fn a_wanted_address_is_had_or_refused() {
    let cuda = fake::cuda();
    let first = cuda.reserve_range(GPU, 4 * PIECE, None).expect("addresses");
    let inside = first.base.offset(PIECE);
    let refused = cuda
        .reserve_range(GPU, PIECE, Some(inside))
        .expect_err("it is taken");
    assert!(
        matches!(
            refused,
            Error::Invalid {
                what: "the wanted address",
                ..
            }
        ),
        "{refused:?}"
    );
    assert_eq!(
        fake::live(Kind::Reserved),
        1,
        "what was had in its place is given back"
    );
    // SAFETY: `release_range`: reserved above, and nothing was mapped.
    unsafe { cuda.release_range(first) }.expect("it was reserved");
    let again = cuda
        .reserve_range(GPU, PIECE, Some(inside))
        .expect("it is free");
    assert_eq!((again.base, again.len), (inside, PIECE));
    // SAFETY: `release_range`: as above.
    unsafe { cuda.release_range(again) }.expect("it was reserved");
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn every_failure_of_a_store_leaves_nothing() {
    let cuda = fake::cuda();
    fake::each_failure(|| cuda.create_memory(GPU, 1), |made| release(&*cuda, made));
    let fd = fake::foreign_fd(PIECE);
    fake::each_failure(
        || cuda.import_memory(GPU, fd.as_fd(), PIECE),
        |made| release(&*cuda, made),
    );
    let made = cuda.create_memory(GPU, 1).expect("room");
    // SAFETY: `export_memory`: made above.
    fake::each_failure(|| unsafe { cuda.export_memory(made) }, drop);
    release(&*cuda, made);
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn every_failure_of_a_range_leaves_nothing() {
    let cuda = fake::cuda();
    // The context is made by the first call; what it costs is not the calls' that are looked at.
    cuda.context(GPU).expect("a context");
    fake::each_failure(
        || cuda.reserve_range(GPU, 2 * PIECE, None),
        // SAFETY: `release_range`: reserved just now.
        |range| unsafe { cuda.release_range(range) }.expect("it was reserved"),
    );
    let (range, made) = (
        cuda.reserve_range(GPU, 2 * PIECE, None),
        cuda.create_memory(GPU, 1),
    );
    let (range, made) = (range.expect("addresses"), made.expect("room"));
    let at = range.base.offset(PIECE);
    fake::each_failure(
        // SAFETY: `map_memory`: made and reserved above, and mapped nowhere else.
        || unsafe { cuda.map_memory(at, made, Access::ReadOnly) },
        // SAFETY: `unmap_memory`: mapped just now.
        |()| unsafe { cuda.unmap_memory(at) }.expect("it was mapped"),
    );
    release(&*cuda, made);
    // SAFETY: `release_range`: reserved above, and nothing is mapped.
    unsafe { cuda.release_range(range) }.expect("it was reserved");
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn a_peer_reaches_pieces_too() {
    let cuda = fake::cuda();
    let range = cuda.reserve_range(GPU, 2 * PIECE, None).expect("addresses");
    let made = [(); 2].map(|()| cuda.create_memory(GPU, 1).expect("room"));
    let at = |number: u64| range.base.offset(number * PIECE);
    // SAFETY: `map_memory`: made and reserved above, and mapped nowhere else.
    unsafe { cuda.map_memory(at(0), made[0], Access::ReadWrite) }.expect("it maps");
    assert_eq!(fake::last_access_count(), 1);
    fake::clear_trace();
    cuda.enable_peer_access(DeviceId(1), GPU)
        .expect("the fake devices reach each other");
    assert_eq!(
        fake::trace()
            .iter()
            .filter(|call| *call == "cuMemSetAccess")
            .count(),
        1,
        "what is mapped is opened"
    );
    // SAFETY: `map_memory`: as above.
    unsafe { cuda.map_memory(at(1), made[1], Access::ReadWrite) }.expect("it maps");
    assert_eq!(
        fake::last_access_count(),
        2,
        "what is mapped later is opened for both"
    );
    for number in [0, 1] {
        // SAFETY: `unmap_memory`: mapped above.
        unsafe { cuda.unmap_memory(at(number)) }.expect("it was mapped");
        release(&*cuda, made[number as usize]);
    }
    // SAFETY: `release_range`: reserved above, and nothing is mapped.
    unsafe { cuda.release_range(range) }.expect("it was reserved");
    assert_eq!((fake::all_live(), fake::violations()), (vec![], 0));
}

fn a_piece_that_could_not_be_unmapped_is_never_tried_again() {
    let cuda = fake::cuda();
    let (range, made) = (
        cuda.reserve_range(GPU, PIECE, None),
        cuda.create_memory(GPU, 1),
    );
    let (range, made) = (range.expect("addresses"), made.expect("room"));
    // SAFETY: `map_memory`: made and reserved above, and mapped nowhere else.
    unsafe { cuda.map_memory(range.base, made, Access::ReadWrite) }.expect("it maps");
    let other = cuda.alloc(GPU, 1, Sharing::Fd).expect("room").base;
    // SAFETY: `unmap_memory`: refused by the table.
    let refused = unsafe { cuda.unmap_memory(other) }.expect_err("it is an allocation");
    assert!(matches!(refused, Error::Invalid { .. }), "{refused:?}");
    // SAFETY: `unmap_memory`: refused by the table.
    assert!(unsafe { cuda.unmap_memory(DevicePtr(8)) }.is_err());
    fake::fail("cuMemUnmap", 719);
    assert_eq!(
        // SAFETY: `unmap_memory`: mapped above.
        fake::code(&unsafe { cuda.unmap_memory(range.base) }.expect_err("it failed")),
        Some(719)
    );
    // SAFETY: `unmap_memory`: refused by the table, because it leaked.
    let refused = unsafe { cuda.unmap_memory(range.base) }.expect_err("nobody knows what is there");
    assert!(matches!(refused, Error::Invalid { .. }), "{refused:?}");
    assert_eq!((fake::live(Kind::Mapped), fake::violations()), (2, 0));
}

fn an_old_driver_has_no_ranges() {
    let cuda = fake::cuda();
    assert!(!cuda.caps(GPU).expect("it tells").ranges);
    let refused = cuda.create_memory(GPU, 1).expect_err("CUDA 10 has none");
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused:?}");
    let refused = cuda
        .reserve_range(GPU, 1, None)
        .expect_err("CUDA 10 has none");
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused:?}");
}
