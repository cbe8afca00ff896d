//! A descriptor that somebody sent.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = ipc_rc::fuzz::descriptor(bytes);
});
