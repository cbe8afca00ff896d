//! Another process: this program again, which exports memory and waits.

use gpu_api::groups::*;
use gpu_api::{MemHandle, Sharing};
use harness::{Child, say};
use serde::{Deserialize, Serialize};

use crate::GPU;

/// What this program can be started as, beside a case.
#[derive(Serialize, Deserialize)]
enum Role {
    Exporter,
}

/// Memory of another process, until it is dropped.
pub struct Exporter {
    process: Child<(), Vec<u8>>,
    pub handle: MemHandle,
}

impl Exporter {
    pub fn start() -> Exporter {
        let mut process = Child::<(), Vec<u8>>::start(&Role::Exporter);
        let handle = process.answer().expect("it exports");
        Exporter {
            process,
            handle: MemHandle(handle.try_into().expect("64 bytes")),
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.process.end();
        }
    }
}

/// Is that process, if it was started as such.
pub fn run_if_asked() -> bool {
    let Some(Role::Exporter) = harness::role() else {
        return false;
    };
    let hip = crate::hip();
    let memory = hip
        .alloc(GPU, 1 << 20, Sharing::Handle)
        .expect("there is room");
    let handle = hip.export_handle(memory.base).expect("it has a handle");
    say(&handle.0.to_vec());
    // Until the test lets it go.
    harness::next::<()>();
    // SAFETY: `free` asks for memory that nobody uses or has open: the other process said so.
    unsafe { hip.free(memory.base) }.expect("it frees");
    true
}
