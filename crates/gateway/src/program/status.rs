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
    let dir = options.place.dir()?;
    let (mut all, paths) = (state::all(&dir), state::paths(&dir));
    all.iter_mut()
        .for_each(|state| state.paths.clone_from(&paths));
    if options.json {
        println!("{}", serde_json::to_string(&all).unwrap_or_default());
        return Ok(());
    }
    for state in &all {
        let state::State {
            host,
            pid,
            listen,
            transport,
            figures,
            ..
        } = state;
        println!("{host}  process {pid} at {listen}, carried by {transport}: {figures}");
    }
    for state::Path {
        from,
        transport,
        way,
        gb_s,
        ways,
        ..
    } in &paths
    {
        let tried: Vec<String> = ways.iter().map(ToString::to_string).collect();
        println!(
            "from {from} by {transport}: {way}, {gb_s:.2} GB/s (tried: {})",
            tried.join("; ")
        );
    }
    if all.is_empty() {
        println!("no gateway runs for this broker");
    }
    Ok(())
}
