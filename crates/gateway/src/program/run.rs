//! `gpu-ipc-gateway run`: serves this host's objects, and follows removals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;

use super::args::RunOptions;
use super::pulls;
use super::state::{Held, State};
use crate::error::{Error, Result};
use crate::local::Local;
use crate::message::Incarnation;
use crate::net::key::Gateway;
use crate::net::live::Live;
use crate::origin::Limits;
use crate::origin::serve::Server;
use crate::replica::follow;

/// How often removals are looked for.
const FOLLOW: Duration = Duration::from_secs(2);
/// How often the state is written.
const WRITE: Duration = Duration::from_millis(500);

/// Runs until the process is killed.
///
/// # Errors
///
/// What keeps it from serving.
pub fn run(options: &RunOptions) -> Result<()> {
    pulls::end_with_the_parent();
    let _log = options.log.start().map_err(|why| Error::Unavailable {
        what: "the log".into(),
        why,
        remedy: "correct RUST_LOG, or raise RLIMIT_NPROC",
    })?;
    let network = options.net.network(Some(options.listen))?;
    let (host, dir) = (options.place.host(), options.place.dir()?);
    let local = Local::connect(
        &host,
        options.place.broker.as_deref(),
        options.place.device.as_deref(),
    )?;
    let transport = options
        .net
        .carrier(network.own_address(), false, local.place())?;
    let session = network.open()?;
    session.speaks_for(&host)?;
    let gateway = Gateway {
        host: host.clone(),
        incarnation: Incarnation::random()?,
    };
    let held = Held::create(&dir, &gateway.incarnation.to_string())?;
    let limits = Limits {
        leases: options.leases,
        of_host: options.leases_per_host,
        of_object: options.leases_per_object,
        time: Duration::from_millis(options.lease_ms),
        ..Limits::default()
    };
    let (followed, over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
    let live = Live::listen(&session)?;
    let follower = {
        let (local, session, followed, over) = (
            local.clone(),
            session.clone(),
            followed.clone(),
            over.clone(),
        );
        let follow = move || {
            while !over.load(Ordering::Relaxed) {
                match follow::look(&local, &session, &live) {
                    Ok(gone) => drop(followed.fetch_add(gone, Ordering::Relaxed)),
                    Err(error) => tracing::warn!(%error, "removals were not followed"),
                }
                std::thread::sleep(FOLLOW);
            }
        };
        thread::start("gateway-follows", follow)
    };
    follower.map_err(|e| Error::Unavailable {
        what: "a thread".into(),
        why: e.to_string(),
        remedy: "raise RLIMIT_NPROC",
    })?;
    let mut state = State {
        host: host.clone(),
        incarnation: gateway.incarnation.to_string(),
        pid: std::process::id(),
        listen: options.listen.to_string(),
        peers: options.net.peers.iter().map(ToString::to_string).collect(),
        tls: options.net.tls.clone(),
        transport: transport.kind().into(),
        link_gbit: options.net.link_gbit,
        figures: serde_json::Value::Null,
        leases: serde_json::Value::Null,
        followed: 0,
        paths: Vec::new(),
    };
    tracing::info!(
        host,
        listen = %options.listen,
        broker = ?options.place.broker,
        carrier = %transport.kind(),
        incarnation = %gateway.incarnation,
        "the gateway serves"
    );
    println!(
        "gateway of {host} at {}, carried by {}",
        options.listen,
        transport.kind()
    );
    if !options.no_pulls {
        pulls::keep()?;
    }
    let mut written: Option<Instant> = None;
    let slots = options.rings()?;
    let server = Server::new(
        gateway,
        local,
        transport,
        session,
        limits,
        options.net.pace(),
        slots,
    )?;
    let served = server.run(|figures, leases| {
        if written.is_none_or(|at| at.elapsed() >= WRITE) {
            written = Some(Instant::now());
            state.figures = serde_json::to_value(figures).unwrap_or_default();
            state.leases = serde_json::to_value(leases).unwrap_or_default();
            state.followed = followed.load(Ordering::Relaxed);
            held.write(&state);
        }
        true
    });
    over.store(true, Ordering::Relaxed);
    served
}
