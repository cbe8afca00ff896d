//! Weights: an object of many parts, every byte of which is one stamp.

use std::error::Error;

use gpu_ipc::Stream;
use gpu_ipc::broker::{Client, Epoch, Layout, PartSpec, Writer};

use super::NAME;

/// Describes weights of this many bytes. The stamp travels beside the parts, so a reader knows what
/// it must find.
pub fn layout(bytes: u64, parts: u64, stamp: u8) -> Result<Layout, Box<dyn Error>> {
    // A multiple of a word, so that the last word of a part is whole.
    let each = bytes / parts / 8 * 8;
    let specs = (0..parts).map(|number| PartSpec::bytes(format!("layer.{number:05}"), each));
    Ok(Layout::pack(
        specs.collect::<Result<Vec<_>, _>>()?,
        &[stamp],
    )?)
}

/// Returns what every 64-bit word of weights with this stamp is.
pub fn word(stamp: u8) -> u64 {
    u64::from_le_bytes([stamp; 8])
}

/// Asks for memory for weights, and queues the filling of the first parts of it, as many as `share`
/// of all.
pub fn begin(
    client: &Client,
    (bytes, parts): (u64, u64),
    stamp: u8,
    stream: &Stream,
    share: f64,
) -> Result<Writer, Box<dyn Error>> {
    let mut writer = client.create(NAME, layout(bytes, parts, stamp)?)?;
    let filled = (parts as f64 * share).ceil() as usize;
    let names: Vec<_> = writer
        .layout()
        .parts()
        .iter()
        .take(filled)
        .map(|part| part.spec.name.clone())
        .collect();
    for name in names {
        writer.fill(&name, stamp, stream)?;
    }
    Ok(writer)
}

/// Puts weights: they are visible, whole, when this returns.
pub fn put(client: &Client, size: (u64, u64), stamp: u8) -> Result<Epoch, Box<dyn Error>> {
    let stream = Stream::create(client.gpu())?;
    Ok(begin(client, size, stamp, &stream, 1.0)?
        .commit(&[])?
        .wait()?)
}
