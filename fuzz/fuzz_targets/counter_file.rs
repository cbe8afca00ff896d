//! A participant that writes anything anywhere into its counter file while the producer goes on.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = ipc_rc::fuzz::counter_file(bytes);
});
