//! `gpu-ipc get`: bytes of an object on standard output, or in files.

use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;

use clap::Args as Arguments;
use gpu_ipc::broker::{Epoch, Reader, Selector};
use indicatif::ProgressBar;

use super::{Asked, PIECE, dtype, files, progress};
use crate::choice::BackendChoice;
use crate::device::{choose, explain};
use crate::{Outcome, output};

/// Options of `get`.
#[derive(Arguments, Debug)]
pub struct GetOptions {
    /// The name
    pub name: String,
    /// This epoch instead of the latest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub epoch: Option<u64>,
    /// The part; needed only if the object has several
    #[arg(long, value_name = "P", group = "what")]
    pub part: Option<String>,
    /// List the parts instead of writing one
    #[arg(long, group = "what")]
    pub parts: bool,
    /// Write all files that it was filled with into this directory; an object of another program
    /// has a file for each part
    #[arg(long, value_name = "DIR", group = "what")]
    pub all: Option<PathBuf>,
    /// Write all parts into one file of tensors, with the metadata of those that it was filled with
    #[arg(long, value_name = "FILE", group = "what")]
    pub safetensors: Option<PathBuf>,
    /// Device of the object
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendChoice,
    /// Which broker.
    #[command(flatten)]
    pub asked: Asked,
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
        .asked
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
    if let Some(dir) = &options.all {
        return files::write_all(&reader, dir);
    }
    if let Some(path) = &options.safetensors {
        return files::write_tensors(&reader, path);
    }
    let part = match (&options.part, reader.layout().parts()) {
        (Some(part), _) => part.clone(),
        (None, [one]) => one.spec.name.clone(),
        (None, parts) => {
            return Err(format!(
                "{} has {} parts; name one with --part, or write all with --all DIR",
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
        let dtype = dtype::name(part.spec.dtype);
        let (name, bytes, shape) = (&part.spec.name, part.spec.len, shape.join("x"));
        text.push_str(&format!("{name}\t{bytes}\t{dtype}\t[{shape}]\n"));
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
    let bar = progress(part.spec.len);
    let written = copy(reader, name, &mut io::stdout().lock(), &bar);
    bar.finish_and_clear();
    match written {
        // A reader that went away is none of our business.
        Err(Stopped::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|stopped| stopped.explain("standard output")),
    }
}

/// Why a copy ended early.
#[derive(Debug)]
pub enum Stopped {
    /// The bytes cannot be read.
    Object(String),
    /// They cannot be written.
    Output(io::Error),
}

impl Stopped {
    /// Says why, of an output by name.
    pub fn explain(self, output: &str) -> String {
        match self {
            Stopped::Object(why) => why,
            Stopped::Output(error) => format!("{output}: {error}"),
        }
    }
}

/// Copies the bytes of a part.
pub fn copy(
    reader: &Reader,
    name: &str,
    out: &mut impl Write,
    bar: &ProgressBar,
) -> Result<(), Stopped> {
    let len = reader.layout().part(name).map_or(0, |part| part.spec.len);
    let mut buffer = vec![0; PIECE.min(len) as usize];
    let mut at = 0;
    while at < len {
        let piece = &mut buffer[..PIECE.min(len - at) as usize];
        reader
            .read_at(name, at, piece)
            .map_err(|error| Stopped::Object(explain(&error)))?;
        out.write_all(piece).map_err(Stopped::Output)?;
        at += piece.len() as u64;
        bar.inc(piece.len() as u64);
    }
    out.flush().map_err(Stopped::Output)
}
