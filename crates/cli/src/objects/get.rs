//! `gpu-ipc get`: bytes of an object on standard output.

use std::io::{ErrorKind, Write};

use clap::Args as Arguments;
use gpu_ipc::broker::{Epoch, Reader, Selector};

use super::BrokerDir;
use crate::choice::BackendChoice;
use crate::device::{choose, explain};
use crate::{Outcome, output};

/// Bytes copied from the device at a time.
const PIECE: u64 = 16 << 20;

/// Options of `get`.
#[derive(Arguments, Debug)]
pub struct GetOptions {
    /// The name
    pub name: String,
    /// This epoch instead of the latest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub epoch: Option<u64>,
    /// The part; needed only if the object has several
    #[arg(long, value_name = "P", conflicts_with = "parts")]
    pub part: Option<String>,
    /// List the parts instead of writing one
    #[arg(long)]
    pub parts: bool,
    /// Device of the object
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendChoice,
    /// Which broker.
    #[command(flatten)]
    pub place: BrokerDir,
}

/// Writes the bytes.
pub fn run(options: &GetOptions) -> Outcome {
    match get(options) {
        Ok(()) => Outcome::Good,
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn get(options: &GetOptions) -> Result<(), String> {
    let client = options
        .place
        .connect(choose(options.backend)?, "gpu-ipc get")?;
    let name = options.name.clone();
    let selector = match options.epoch {
        Some(epoch) => Selector::Epoch(name, Epoch(epoch)),
        None => Selector::Latest(name),
    };
    let reader = client
        .open_one(&selector)
        .map_err(|error| explain(&error))?;
    if options.parts {
        return list(&reader);
    }
    let part = match (&options.part, reader.layout().parts()) {
        (Some(part), _) => part.clone(),
        (None, [one]) => one.spec.name.clone(),
        (None, parts) => {
            return Err(format!(
                "{} has {} parts; name one with --part",
                options.name,
                parts.len()
            ));
        }
    };
    write(&reader, &part)
}

fn list(reader: &Reader) -> Result<(), String> {
    let mut text = String::new();
    for part in reader.layout().parts() {
        let shape: Vec<String> = part
            .spec
            .dimensions
            .iter()
            .map(|dimension| dimension.extent.to_string())
            .collect();
        let dtype = part.spec.dtype;
        let (name, bytes, shape) = (&part.spec.name, part.spec.len, shape.join("x"));
        text.push_str(&format!(
            "{name}\t{bytes}\ttype {}/{}/{}\t[{shape}]\n",
            dtype.code, dtype.bits, dtype.lanes
        ));
    }
    output::print(text.trim_end())
}

fn write(reader: &Reader, name: &str) -> Result<(), String> {
    let Some(part) = reader.layout().part(name) else {
        return Err(format!(
            "{} has no part {name}; list them with --parts",
            reader.name()
        ));
    };
    let mut out = std::io::stdout().lock();
    let mut buffer = vec![0; PIECE.min(part.spec.len) as usize];
    let mut at = 0;
    while at < part.spec.len {
        let piece = &mut buffer[..PIECE.min(part.spec.len - at) as usize];
        reader
            .read_at(name, at, piece)
            .map_err(|error| explain(&error))?;
        match out.write_all(piece) {
            // A reader that went away is none of our business.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            done => done.map_err(|error| format!("standard output: {error}"))?,
        }
        at += piece.len() as u64;
    }
    out.flush()
        .map_err(|error| format!("standard output: {error}"))
}
