//! Another process: this program again, which exports memory and waits.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, Command, Stdio};

use gpu_api::groups::*;
use gpu_api::{MemHandle, Sharing};

use crate::GPU;

const EXPORTER: &str = "HIP_SHIM_EXPORTER";

/// Memory of another process, until it is dropped.
pub struct Exporter {
    child: Child,
    /// Its end tells the process to end.
    input: Option<ChildStdin>,
    pub handle: MemHandle,
}

impl Exporter {
    pub fn start() -> Exporter {
        let mut child = Command::new(env::current_exe().expect("a program has a path"))
            .env(EXPORTER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it can be started again");
        let input = child.stdin.take();
        let mut line = String::new();
        let out = child.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("it writes");
        let bytes: Vec<u8> = line.split_whitespace().map(|word| word.parse().expect("a byte")).collect();
        Exporter { child, input, handle: MemHandle(bytes.try_into().expect("64 bytes")) }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// Is that process, if it was started as such.
pub fn run_if_asked() -> bool {
    if env::var_os(EXPORTER).is_none() {
        return false;
    }
    let hip = crate::hip();
    let memory = hip.alloc(GPU, 1 << 20, Sharing::Handle).expect("there is room");
    let handle = hip.export_handle(memory.base).expect("it has a handle");
    println!("{}", handle.0.map(|byte| byte.to_string()).join(" "));
    std::io::stdin().read_to_end(&mut Vec::new()).expect("a pipe can be read");
    // SAFETY: `free` asks for memory that nobody uses or has open: the other process said so.
    unsafe { hip.free(memory.base) }.expect("it frees");
    true
}
