//! Network namespaces without a name, each joined to this process' own by a pair of interfaces;
//! this one forwards.
//!
//! ```text
//! host 1: eth0 10.W.1.2 ── hW.1 10.W.1.1 ┐
//! host 2: eth0 10.W.2.2 ── hW.2 10.W.2.1 ┴ this process' namespace
//! ```

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use harness::program::try_output;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::watch::until;

/// Bytes that a connection may have under way: few, so that a read is cut in its middle and not in
/// a buffer.
const BUFFERS: &str = "4096 65536 131072";

/// A network namespace, which lives as long as this value and the processes in it.
#[derive(Clone, Debug)]
pub struct Network {
    namespace: Arc<File>,
    /// The interface's name in this process' namespace.
    outside: String,
    address: Ipv4Addr,
}

/// Lets this process' own namespace forward, and a relay in it hold no more of a read than
/// connections do.
///
/// # Errors
///
/// What this machine forbids.
pub fn prepare() -> Result<(), String> {
    ip(&["link", "set", "lo", "up"])?;
    set("tcp_rmem", BUFFERS)?;
    set("tcp_wmem", BUFFERS)?;
    set("ip_forward", "1")
}

/// Gives this process' own namespace the address of a host, so that all others find it there, or
/// takes it back.
///
/// # Errors
///
/// What `ip` says.
pub fn own_address(host: Ipv4Addr, own: bool) -> Result<(), String> {
    ip(&[
        "address",
        if own { "add" } else { "delete" },
        &format!("{host}/32"),
        "dev",
        "lo",
    ])
}

impl Network {
    /// Makes the network of a host of a world.
    ///
    /// # Errors
    ///
    /// What this machine forbids.
    pub fn create(world: u8, host: u8) -> Result<Network, String> {
        let made = std::thread::spawn(|| {
            // SAFETY: `unshare_unsafe` asks that no file descriptors are shared that others rely
            // on: `FILES` is not given.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.map_err(|e| e.to_string())?;
            set("tcp_rmem", BUFFERS)?;
            set("tcp_wmem", BUFFERS)?;
            File::open("/proc/thread-self/ns/net").map_err(|e| e.to_string())
        });
        let namespace = made
            .join()
            .map_err(|_| "a thread panicked")?
            .map_err(|e| format!("a network: {e}"))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), namespace.as_raw_fd());
        let outside = format!("h{world}.{host}");
        ip(&[
            "link", "add", &outside, "type", "veth", "peer", "name", "eth0", "netns", &path,
        ])?;
        let address = Ipv4Addr::new(10, world, host, 2);
        let gate = Ipv4Addr::new(10, world, host, 1);
        ip(&["address", "add", &format!("{gate}/24"), "dev", &outside])?;
        ip(&["link", "set", &outside, "up"])?;
        let network = Network {
            namespace: Arc::new(namespace),
            outside,
            address,
        };
        for line in [
            vec!["link", "set", "lo", "up"],
            vec!["address", "add", &format!("{address}/24"), "dev", "eth0"],
            vec!["link", "set", "eth0", "up"],
            vec!["route", "add", "default", "via", &gate.to_string()],
        ] {
            call(network.enter(Command::new("ip").args(line)))?;
        }
        network.runs()?;
        Ok(network)
    }

    /// Returns the host's address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Lets a command run in this network.
    pub fn enter<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let namespace = self.namespace.clone();
        let enter = move || {
            Ok(move_into_link_name_space(
                namespace.as_fd(),
                Some(LinkNameSpaceType::Network),
            )?)
        };
        // SAFETY: `pre_exec` asks that nothing is done after the fork that is not safe in a signal
        // handler: one system call is.
        unsafe { command.pre_exec(enter) }
    }

    /// Does something in this network, on a thread of its own: sockets that it makes stay in it.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, String> {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .map_err(|e| format!("the network of {}: {e}", self.address))?;
                Ok(work())
            });
            inside.join().map_err(|_| "a thread panicked".to_owned())?
        })
    }

    /// Takes the cable out, or puts it in.
    ///
    /// # Errors
    ///
    /// What `ip` says.
    pub fn link(&self, up: bool) -> Result<(), String> {
        ip(&["link", "set", &self.outside, if up { "up" } else { "down" }])?;
        if up { self.runs() } else { Ok(()) }
    }

    /// Waits until the interface runs. The kernel notes the carrier a while after both ends are up,
    /// and UCX says until then that there is no such device.
    fn runs(&self) -> Result<(), String> {
        until(&format!("the carrier of {}", self.outside), || {
            let mut show = Command::new("ip");
            show.args(["-oneline", "link", "show", "dev", "eth0"]);
            let out = try_output(self.enter(&mut show)).ok()?;
            String::from_utf8_lossy(&out.stdout)
                .contains("state UP")
                .then_some(())
        })
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if Arc::strong_count(&self.namespace) == 1 {
            let _ = ip(&["link", "delete", &self.outside]);
        }
    }
}

fn set(name: &str, value: &str) -> Result<(), String> {
    std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value).map_err(|e| format!("{name}: {e}"))
}

fn ip(line: &[&str]) -> Result<(), String> {
    call(Command::new("ip").args(line))
}

fn call(command: &mut Command) -> Result<(), String> {
    let out = try_output(command).map_err(|e| format!("{command:?}: {e}; install iproute2"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!(
        "{command:?}: {}",
        String::from_utf8_lossy(&out.stderr).trim()
    ))
}
