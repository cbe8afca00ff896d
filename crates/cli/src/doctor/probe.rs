//! The process that asks one driver: its devices, what they can do, and whether a block can really
//! be shared.
//!
//! It writes what it found so far before each step, so that a step that never ends costs no more
//! than itself.

use gpu_ipc::backend::{Access, Sharing, detect_only};
use gpu_ipc::{BackendKind, Error, Gpu};

use super::backend::{Backend, Caps, Device, Progress};
use super::check::{Check, CheckState};
use super::trial;
use crate::choice::Vendor;
use crate::{Outcome, child, device, size};

/// What is tried on a device that can: how memory is handed over, and how it is mapped.
const TRIALS: [(Sharing, Access); 3] = [
    (Sharing::Fd, Access::ReadWrite),
    (Sharing::Fd, Access::ReadOnly),
    (Sharing::Handle, Access::ReadWrite),
];

/// Asks, and writes what it found to standard output.
pub fn run(vendor: Vendor) -> Outcome {
    child::die_with_parent();
    match probe(vendor.kind()) {
        Ok(()) => Outcome::Good,
        Err(_) => Outcome::Finding,
    }
}

fn probe(kind: BackendKind) -> Result<(), String> {
    let mut backend = Backend::new(kind);
    say(&backend, Some("starting the driver"))?;
    match detect_only(kind) {
        Ok(found) if found.gpus().is_empty() => match found.missing().first() {
            Some((_, error)) => explain(&mut backend, error),
            None => found
                .first(kind)
                .map_or_else(|error| explain(&mut backend, &error), drop),
        },
        Ok(found) => {
            backend.state = CheckState::Ok;
            for gpu in found.gpus() {
                look_at(&mut backend, gpu)?;
            }
            #[cfg(feature = "hip")]
            if kind.needs_proof() {
                let so_far = backend.clone();
                backend.checks = super::hip::checks(|doing| say(&so_far, Some(doing)))?;
            }
        }
        Err(error) => {
            explain(&mut backend, &error);
            backend.state = CheckState::Failed;
        }
    }
    say(&backend, None)
}

fn explain(backend: &mut Backend, error: &Error) {
    let (why, remedy) = device::remedy_of(error);
    (backend.why, backend.remedy) = (Some(why), remedy);
    if let Error::NotCompiled { backend: kind } = error {
        backend.remedy = Some(format!("build with the feature `{kind}`"));
    }
}

fn say(backend: &Backend, doing: Option<&str>) -> Result<(), String> {
    let progress = Progress {
        doing: doing.map(str::to_owned),
        backend: backend.clone(),
    };
    child::reply(&progress)
}

fn look_at(backend: &mut Backend, gpu: &Gpu) -> Result<(), String> {
    let (info, caps) = (gpu.info(), gpu.caps());
    let caps = Caps {
        handle: caps.handle,
        fd: caps.fd,
        read_only: caps.read_only,
        event_ipc: caps.event_ipc,
        stream_writes: caps.stream_writes,
        stream_waits: caps.stream_waits,
        ranges: caps.ranges,
        shared_context: caps.shared_context,
        granularity: caps.granularity,
    };
    let number = info.device.0;
    say(
        backend,
        Some(&format!("asking device {number} for its free memory")),
    )?;
    let free_bytes = gpu
        .backend()
        .memory_info(info.device)
        .ok()
        .map(|memory| memory.free_bytes);
    backend.devices.push(Device {
        number,
        uuid: info.uuid.to_string(),
        name: info.name.clone(),
        total_bytes: info.total_bytes,
        free_bytes,
        caps,
        works: false,
        checks: in_words(&caps),
    });
    let mut works = caps.fd || caps.handle;
    for (sharing, access) in TRIALS {
        let can = match (sharing, access) {
            (Sharing::Handle, _) => caps.handle,
            (_, Access::ReadWrite) => caps.fd,
            (_, Access::ReadOnly) => caps.fd && caps.read_only,
        };
        if can {
            let name = trial::name(sharing, access);
            say(backend, Some(&format!("on device {number}: {name}")))?;
            let check = trial::run(gpu, sharing, access);
            works &= check.state == CheckState::Ok;
            if let Some(device) = backend.devices.last_mut() {
                device.checks.push(check);
            }
        }
    }
    if let Some(device) = backend.devices.last_mut() {
        device.works = works;
    }
    if !works {
        backend.state = CheckState::Failed;
    }
    Ok(())
}

/// Puts what a device can do into words.
fn in_words(caps: &Caps) -> Vec<Check> {
    let yes_or = |can: bool, name: &str, yes: &str, no: fn(&str) -> Check| {
        if can { Check::ok(name, yes) } else { no(name) }
    };
    let mut checks = vec![
        yes_or(
            caps.fd,
            "file descriptors",
            "memory is shared by them",
            |name| {
                Check::absent(name, "memory cannot be shared by them")
                .why("the driver or the device has no virtual memory management with POSIX file descriptors")
                .remedy("update the driver; until then memory is shared by 64-byte handle, where there is one")
            },
        ),
        yes_or(
            caps.handle,
            "64-byte handles",
            "memory is shared by them too",
            |name| {
                Check::absent(name, "memory cannot be shared by them")
                    .why("memory that a framework allocated plainly cannot be adopted")
                    .remedy(
                        "allocate from the session, which shares by file descriptor where it can",
                    )
            },
        ),
        yes_or(
            caps.read_only,
            "read-only mapping",
            "a consumer can do without the right to write",
            |name| {
                Check::absent(name, "every consumer can write to what it maps")
                    .why("only memory shared by file descriptor can be mapped read-only")
                    .remedy("share with consumers that are trusted not to write")
            },
        ),
        yes_or(
            caps.event_ipc,
            "interprocess events",
            "other processes can open them",
            |name| {
                Check::absent(name, "other processes cannot open them")
                    .why("gpu-ipc orders by words in shared memory instead")
                    .remedy("nothing, if words below are ok")
            },
        ),
        yes_or(
            caps.stream_writes,
            "words written by streams",
            "ends of leases are told by them",
            |name| {
                Check::warning(name, "streams cannot write words in shared memory")
                    .why("ends of leases are noticed by asking the driver")
                    .remedy("update the driver (NVIDIA: 64-bit stream memory operations)")
            },
        ),
        yes_or(
            caps.stream_waits,
            "words awaited by streams",
            "a claim need not wait",
            |name| {
                Check::warning(name, "streams cannot wait for words in shared memory")
                    .why("a claim waits on the host")
                    .remedy("update the driver (NVIDIA: 64-bit stream memory operations)")
            },
        ),
        yes_or(
            caps.ranges,
            "ranges",
            "memory is mapped at addresses of the caller's choice",
            |name| {
                Check::absent(name, "memory has the address that the driver gives it")
                    .why("regions do not grow in place, and objects have no fixed addresses")
                    .remedy("nothing, if blocks alone are shared; else choose another device")
            },
        ),
        yes_or(
            !caps.shared_context,
            "own context",
            "each process has its own",
            |name| {
                Check::warning(name, "processes share one context of the driver (MPS)")
                .why("the death of a process does not prove that its GPU work ended: its blocks are never reused")
                .remedy("run producer and consumers without MPS, where processes may die")
            },
        ),
        Check::ok(
            "granularity",
            format!(
                "allocations are multiples of {}",
                size::show(caps.granularity)
            ),
        ),
    ];
    if !caps.fd && !caps.handle {
        checks.push(
            Check::failed("sharing", "the device shares memory in no way")
                .why(
                    "it exports neither file descriptors nor handles (a slice of a GPU, or a driver for another \
                     system)",
                )
                .remedy("choose another device, or update the driver"),
        );
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Caps = Caps {
        handle: true,
        fd: true,
        read_only: true,
        event_ipc: true,
        stream_writes: true,
        stream_waits: true,
        ranges: true,
        shared_context: false,
        granularity: 4096,
    };

    #[test]
    fn a_device_that_can_everything_gives_no_cause_for_words() {
        let checks = in_words(&ALL);
        assert_eq!(checks.len(), 9, "a row for each field");
        assert!(
            checks.iter().all(|check| check.state == CheckState::Ok),
            "{checks:?}"
        );
    }

    #[test]
    fn each_lack_has_a_reason_and_a_remedy() {
        let lacks = [
            Caps {
                handle: false,
                ..ALL
            },
            Caps { fd: false, ..ALL },
            Caps {
                read_only: false,
                ..ALL
            },
            Caps {
                event_ipc: false,
                ..ALL
            },
            Caps {
                stream_writes: false,
                ..ALL
            },
            Caps {
                stream_waits: false,
                ..ALL
            },
            Caps {
                ranges: false,
                ..ALL
            },
            Caps {
                shared_context: true,
                ..ALL
            },
            Caps {
                fd: false,
                handle: false,
                ..ALL
            },
        ];
        for caps in lacks {
            let checks = in_words(&caps);
            let mut lacking = checks
                .iter()
                .filter(|check| check.state != CheckState::Ok)
                .peekable();
            assert!(lacking.peek().is_some(), "{caps:?} goes unsaid");
            assert!(
                lacking.all(|check| check.why.is_some() && check.remedy.is_some()),
                "{checks:?}"
            );
        }
    }
}
