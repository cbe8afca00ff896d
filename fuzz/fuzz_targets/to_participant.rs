//! A message that a producer sent to a participant.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = ipc_rc::fuzz::to_participant(bytes);
});
