//! Which device lies below: the one that the settings name.

use std::sync::OnceLock;

use crate::cuda::Cuda;
use crate::host::Host;
use crate::machine::{Machine, Outcome};
use crate::settings::Settings;

/// Returns the device below, started on first use.
pub(crate) fn machine() -> Outcome<&'static dyn Machine> {
    static MACHINE: OnceLock<Outcome<Box<dyn Machine>>> = OnceLock::new();
    let made = MACHINE.get_or_init(|| -> Outcome<Box<dyn Machine>> {
        if Settings::get().host {
            Ok(Box::new(Host::start()?))
        } else {
            Ok(Box::new(Cuda::start()?))
        }
    });
    made.as_ref()
        .map(|machine| &**machine)
        .map_err(|code| *code)
}
