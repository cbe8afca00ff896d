//! `gpu-ipc-gateway objects --all-hosts`: what all hosts announce.

use std::time::Duration;

use serde::Serialize;
use zenoh::Wait;

use super::args::ObjectsOptions;
use super::pull::network_of;
use crate::error::Result;
use crate::host::fetch::announced;
use crate::net::key::{Announced, Gateway};

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
/// What keeps it from asking.
pub fn run(options: &ObjectsOptions) -> Result<()> {
    let (network, _) = network_of(&options.place, &options.net)?;
    let session = network.open()?;
    let all = announced(&session, Duration::from_secs(5));
    let _ = session.close().wait();
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
