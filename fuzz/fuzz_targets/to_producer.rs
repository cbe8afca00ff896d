//! A message that a participant sent to its producer.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = ipc_rc::fuzz::to_producer(bytes);
});
