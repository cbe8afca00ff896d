//! `gpu-ipc-gateway status`: what the gateways of this host do.

use super::args::StatusOptions;
use super::state;
use crate::error::Result;

/// Prints it.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) for a directory that cannot be used.
pub fn run(options: &StatusOptions) -> Result<()> {
    let all = state::all(&options.place.dir()?);
    if options.json {
        println!("{}", serde_json::to_string(&all).unwrap_or_default());
        return Ok(());
    }
    for state in &all {
        let state::State { host, pid, listen, transport, figures, .. } = state;
        println!("{host}  process {pid} at {listen}, carried by {transport}: {figures}");
    }
    if all.is_empty() {
        println!("no gateway runs for this broker");
    }
    Ok(())
}
