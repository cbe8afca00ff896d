//! Whether this user can make namespaces, which containers without root are made of.
//!
//! A process with threads cannot make a user namespace, and one that has tried is changed by it: so
//! a child tries.

use std::time::Duration;

use rustix::thread::UnshareFlags;

use super::check::Check;
use crate::Outcome;
use crate::child::{self, Child};

const KINDS: [(&str, UnshareFlags); 3] = [
    ("user", UnshareFlags::NEWUSER),
    ("pid", UnshareFlags::NEWPID),
    ("mount", UnshareFlags::NEWNS),
];
const PATIENCE: Duration = Duration::from_secs(20);

/// Tries, in a child.
pub fn check() -> Check {
    let name = "namespaces";
    match ask() {
        Ok(None) => Check::ok(name, "user, pid and mount namespaces can be made"),
        Ok(Some(refused)) => {
            Check::absent(name, refused).why("needed only for rootless containers, not by gpu-ipc itself").remedy(
                "see user.max_user_namespaces, kernel.unprivileged_userns_clone and \
                 kernel.apparmor_restrict_unprivileged_userns in sysctl, and the container's seccomp profile",
            )
        }
        Err(why) => Check::warning(name, "not known").why(why).remedy("run the doctor again"),
    }
}

/// Returns what was refused.
fn ask() -> Result<Option<String>, String> {
    Child::<()>::start(["doctor-process", "namespaces"], PATIENCE)?.answer()
}

/// The child: says nothing, or what was refused first.
pub fn run() -> Outcome {
    child::live(|| {
        let refused = KINDS.into_iter().find_map(|(kind, flags)| {
            // SAFETY: `unshare_unsafe` asks that no descriptors are closed under somebody: the
            // flags leave the table of descriptors shared.
            let refused = unsafe { rustix::thread::unshare_unsafe(flags) };
            refused
                .err()
                .map(|error| format!("no {kind} namespace: {error}"))
        });
        child::reply(&refused)
    })
}
