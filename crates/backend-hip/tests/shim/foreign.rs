//! Another process: this program again, which exports memory and does what it is told with it.

use std::env;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use gpu_api::groups::*;
use gpu_api::{MemHandle, Sharing};
use harness::{Child, say};
use serde::{Deserialize, Serialize};

use crate::GPU;

/// What this program can be started as, beside a case.
#[derive(Serialize, Deserialize)]
enum Role {
    /// Exports memory, under these faults; with the disposition of SIGPIPE that a C program has.
    Exporter { faults: String },
    /// Has the name of another process's server.
    Namesake { of: u32 },
}

/// What an exporter is asked.
#[derive(Serialize, Deserialize)]
enum Ask {
    /// Whether the handle opens now.
    Served,
}

/// Memory of another process, until it is dropped.
pub struct Exporter {
    process: Child<Ask, Vec<u8>>,
    pub handle: MemHandle,
}

impl Exporter {
    pub fn start() -> Exporter {
        Exporter::with(&env::var("GPU_IPC_SHIM_INJECT").unwrap_or_default())
    }

    /// Starts one whose runtime has these faults.
    pub fn with(faults: &str) -> Exporter {
        let faults = faults.into();
        let mut process = Child::start(&Role::Exporter { faults });
        let handle: Vec<u8> = process.answer().expect("it exports");
        Exporter {
            process,
            handle: MemHandle(handle.try_into().expect("64 bytes")),
        }
    }

    /// Says whether the handle opens now.
    pub fn is_served(&mut self) -> bool {
        self.process.ask(&Ask::Served) == [1]
    }

    /// Returns the name of the socket on which its runtime hands memory out.
    pub fn server(&self) -> SocketAddr {
        server_of(self.process.pid())
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub fn kill(&mut self) {
        self.process.kill();
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.process.end();
        }
    }
}

fn server_of(pid: u32) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("hsa{pid}")).expect("it is short")
}

/// Starts a process that has the name of this one's server.
pub fn namesake() -> Child<(), ()> {
    let of = std::process::id();
    let mut process = Child::start(&Role::Namesake { of });
    process.answer().expect("it has the name");
    process
}

/// Is that process, if it was started as such.
pub fn run_if_asked() -> bool {
    match harness::role() {
        Some(Role::Exporter { faults }) => {
            // SAFETY: `set_var` asks that no other thread reads the environment: this is the only
            // thread.
            unsafe { env::set_var("GPU_IPC_SHIM_INJECT", faults) };
            // SAFETY: `signal` sets a disposition of this program, which asks for nothing else.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            export();
            true
        }
        Some(Role::Namesake { of }) => {
            let _listener = UnixListener::bind_addr(&server_of(of)).expect("the name is free");
            say(&());
            harness::next::<()>();
            true
        }
        None => false,
    }
}

fn export() {
    let hip = crate::hip();
    let memory = hip
        .alloc(GPU, 1 << 20, Sharing::Handle)
        .expect("there is room");
    let handle = hip.export_handle(memory.base).expect("it has a handle");
    say(&handle.0.to_vec());
    // Until the test lets it go.
    while let Some(Ask::Served) = harness::next() {
        let served = hip.is_served(memory.base).expect("it can be asked");
        say(&vec![u8::from(served)]);
    }
    // SAFETY: `free` asks for memory that nobody uses or has open: the other process said so.
    unsafe { hip.free(memory.base) }.expect("it frees");
}
