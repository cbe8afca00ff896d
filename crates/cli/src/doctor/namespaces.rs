//! Whether this user can make namespaces, which containers without root are made of.
//!
//! A process with threads cannot make a user namespace, and one that has tried is changed by it: so a child tries.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::thread::UnshareFlags;

use super::check::Check;
use lab::Outcome;
use lab::child::{self, poll};

const KINDS: [(&str, UnshareFlags); 3] =
    [("user", UnshareFlags::NEWUSER), ("pid", UnshareFlags::NEWPID), ("mount", UnshareFlags::NEWNS)];
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
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.arg("doctor-namespaces").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut tried = command.spawn().map_err(|e| e.to_string())?;
    let ended = poll(PATIENCE, || tried.try_wait()).map_err(|e| e.to_string())?;
    if ended.is_none() {
        // It is in the kernel; whether the signal reaches it or not, nobody waits for it.
        let _ = tried.kill();
        return Err(format!("the child that tries was silent for {} s", PATIENCE.as_secs()));
    }
    let mut text = String::new();
    let out = tried.stdout.as_mut().ok_or("the child has no output")?;
    out.read_to_string(&mut text).map_err(|e| e.to_string())?;
    match text.trim() {
        "ok" => Ok(None),
        refused if !refused.is_empty() => Ok(Some(refused.to_owned())),
        _ => Err("the child that tries said nothing".into()),
    }
}

/// The child: says `ok`, or what was refused first.
pub fn run() -> Outcome {
    child::die_with_parent();
    for (kind, flags) in KINDS {
        // SAFETY: `unshare_unsafe` asks that no descriptors are closed under somebody: the flags leave the table of
        // descriptors shared.
        if let Err(error) = unsafe { rustix::thread::unshare_unsafe(flags) } {
            let _ = child::line(&format!("no {kind} namespace: {error}"));
            return Outcome::Good;
        }
    }
    let _ = child::line("ok");
    Outcome::Good
}
