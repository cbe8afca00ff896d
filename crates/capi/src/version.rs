//! The version of the library, for the compiler and at run time.

/// The version of this header: `1000000 * major + 1000 * minor + patch`.
pub const GPU_IPC_VERSION: u32 =
    GPU_IPC_VERSION_MAJOR * 1000000 + GPU_IPC_VERSION_MINOR * 1000 + GPU_IPC_VERSION_PATCH;
/// Before 1 every minor version is another interface, with another soname.
pub const GPU_IPC_VERSION_MAJOR: u32 = 0;
/// Functions and fields may come.
pub const GPU_IPC_VERSION_MINOR: u32 = 3;
/// The interface is the same.
pub const GPU_IPC_VERSION_PATCH: u32 = 0;

const _: () = {
    assert!(GPU_IPC_VERSION_MAJOR == number(env!("CARGO_PKG_VERSION_MAJOR")));
    assert!(GPU_IPC_VERSION_MINOR == number(env!("CARGO_PKG_VERSION_MINOR")));
    assert!(GPU_IPC_VERSION_PATCH == number(env!("CARGO_PKG_VERSION_PATCH")));
};

const fn number(text: &str) -> u32 {
    let (mut at, mut number) = (0, 0);
    while at < text.len() {
        number = number * 10 + (text.as_bytes()[at] - b'0') as u32;
        at += 1;
    }
    number
}

/// Returns the version of the library that runs, in the form of `GPU_IPC_VERSION`, which is that of
/// the header.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_version() -> u32 {
    GPU_IPC_VERSION
}
