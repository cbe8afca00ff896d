//! `gpu-ipc-gateway objects --all-hosts`: what all hosts announce.

use std::time::{Duration, Instant};

use serde::Serialize;
use zenoh::Wait;

use super::args::ObjectsOptions;
use super::pull::network_of;
use crate::error::{Error, Result};
use crate::replica::driver::announced;
use crate::replica::follow::gateways;
use crate::net::key::{Announced, Gateway};

/// How long the first gateway may take to be reached.
const REACHED: Duration = Duration::from_secs(10);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    gateway: Gateway,
    #[serde(flatten)]
    object: Announced,
}

/// Lists them.
///
/// # Errors
///
/// What keeps it from asking, and [`Error::Unavailable`] where no gateway was reached: an empty list
/// would say that the hosts have no objects.
pub fn run(options: &ObjectsOptions) -> Result<()> {
    let (network, _) = network_of(&options.place, &options.net)?;
    let session = network.open()?;
    // Opening returns before a slow connection stands. A gateway announces itself with its objects.
    let until = Instant::now() + REACHED;
    let (reached, all) = loop {
        let reached = !gateways(&session, None).is_empty();
        let all = announced(&session, Duration::from_secs(5));
        if reached || !all.is_empty() || Instant::now() > until {
            break (reached, all);
        }
        std::thread::sleep(LOOK);
    };
    let _ = session.close().wait();
    if !reached && all.is_empty() {
        return Err(Error::Unavailable {
            what: "the list of objects".into(),
            why: format!("no gateway was reached within {} s", REACHED.as_secs()),
            remedy: "check `--peer` and `--tls`, and that a gateway runs there",
        });
    }
    if options.json {
        let rows: Vec<Row> = all
            .into_iter()
            .map(|(gateway, object)| Row { gateway, object })
            .collect();
        println!("{}", serde_json::to_string(&rows).unwrap_or_default());
        return Ok(());
    }
    for (gateway, object) in &all {
        let Announced {
            name,
            epoch,
            identity,
            bytes,
            home,
            ..
        } = object;
        let what = if *home == gateway.host {
            "home".to_owned()
        } else {
            format!("replica from {home}")
        };
        println!(
            "{}  {name}  epoch {epoch}  {bytes} bytes  {identity}  {what}",
            gateway.host
        );
    }
    if all.is_empty() {
        println!("no gateway announces an object");
    }
    Ok(())
}
