//! The program `gpu-ipc`: everything is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpu_ipc_cli::run()
}
