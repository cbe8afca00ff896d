//! Small requests for plain host memory cost what the program's own allocator costs: no mapping
//! each.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::thread;

use allocators::*;
use gpu_api::Error;

const MANY: usize = 10_000;
const PAGE: u64 = 4096;

/// Every allocator of plain host memory that takes requests as they come.
fn subjects() -> Vec<(&'static str, Arc<dyn Allocator>)> {
    vec![
        ("basic", Arc::new(BasicCpu::new(None).expect("memory"))),
        (
            "a process state's",
            ProcessState::new([])
                .host_allocator(None, None)
                .expect("it needs no device"),
        ),
    ]
}

/// The control: a mapping for each request.
fn mapped() -> Direct<NodePages> {
    Direct::new("mapped", NodePages::new(0).expect("pages"))
}

/// Has every `mmap` of the calling thread fail, for good.
fn forbid_mappings() -> io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let jump = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let mut program = [
        // The call's number, which `seccomp_data` begins with.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: jump,
            jt: 0,
            jf: 1,
            k: libc::SYS_mmap as u32,
        },
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | libc::ENOMEM.cast_unsigned(),
        ),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: `prctl(PR_SET_NO_NEW_PRIVS)` asks for no memory.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `seccomp(SECCOMP_SET_MODE_FILTER)` asks for a program that lives during the call: it
    // is on this frame.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const filter,
        )
    };
    if done != 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[test]
fn small_requests_map_nothing() {
    let without_mappings = || {
        let (subjects, control) = (subjects(), mapped());
        let possible = control.alloc(Request::new(100)).expect("a mapping");
        forbid_mappings().expect("a thread may filter itself");
        for (name, allocator) in &subjects {
            // Up to a page, all of them in use at a time.
            let take = |at: usize| allocator.alloc(Request::new(1 + at as u64 % PAGE));
            let held: Vec<u64> = (0..MANY)
                .map(|at| {
                    take(at)
                        .unwrap_or_else(|error| panic!("{name}: {error}"))
                        .address
                })
                .collect();
            held.into_iter()
                .for_each(|address| allocator.free(address).expect("in use"));
        }
        let error = control.alloc(Request::new(100)).expect_err("it has to map");
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        control.free(possible.address).expect("in use");
    };
    // The filter is its thread's alone.
    thread::spawn(without_mappings).join().expect("no panic");
}

/// Takes 100 bytes many times, and counts the pages that they lie in.
fn pages_of(allocator: &dyn Allocator, many: usize) -> usize {
    let held: Vec<u64> = (0..many)
        .map(|_| allocator.alloc(Request::new(100)).expect("room").address)
        .collect();
    let pages: BTreeSet<u64> = held.iter().map(|address| address / PAGE).collect();
    held.into_iter()
        .for_each(|address| allocator.free(address).expect("in use"));
    pages.len()
}

#[test]
fn small_requests_share_pages() {
    let of_a_node = (
        "of a node",
        Arc::new(BasicCpu::new(Some(0)).expect("memory")) as Arc<dyn Allocator>,
    );
    for (name, allocator) in subjects().into_iter().chain([of_a_node]) {
        let pages = pages_of(&*allocator, MANY);
        // Of 256 bytes each they are 625.
        assert!(pages < MANY / 10, "{name}: {pages} pages");
    }
    assert_eq!(pages_of(&mapped(), 1000), 1000, "the control maps each");
}
