//! What an object is filled with: files, and pipes read to their ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gpu_ipc::broker::{PartSpec, Writer};
use indicatif::ProgressBar;
use safetensors::tensor::Metadata;

use super::origin::Original;
use super::{PIECE, dtype};
use crate::device::explain;

/// The longest header of a file of tensors that the format allows.
const MOST_HEADER: u64 = 100_000_000;

/// A file of known length.
#[derive(Debug)]
pub struct Input {
    path: PathBuf,
    name: String,
    file: File,
    /// Its length and its time when it was opened.
    seen: (u64, Option<SystemTime>),
    sources: Vec<Source>,
    /// It is a file of tensors, with this metadata.
    tensors: Option<BTreeMap<String, String>>,
}

/// A piece of a file that becomes a part.
#[derive(Debug)]
struct Source {
    offset: u64,
    spec: PartSpec,
}

impl Input {
    /// Opens a file, or reads a pipe to its end, and finds its parts. A file of tensors is known by
    /// its name, or is said to be one.
    ///
    /// # Errors
    ///
    /// The path, what is wrong, and what to do.
    pub fn open(path: &Path, is_tensors: bool) -> Result<Input, String> {
        let failed = |why: String| format!("{}: {why}", path.display());
        Self::read(path, is_tensors).map_err(failed)
    }

    fn read(path: &Path, is_tensors: bool) -> Result<Input, String> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or("its name is not UTF-8")?.to_owned();
        let file = sized(File::open(path).map_err(text)?)?;
        let mut input = Input {
            path: path.into(),
            name,
            seen: seen(&file)?,
            file,
            sources: Vec::new(),
            tensors: None,
        };
        if is_tensors || path.extension().is_some_and(|of| of == "safetensors") {
            input.find_tensors()?;
        } else {
            let spec = PartSpec::bytes(&*input.name, input.seen.0);
            let spec = spec.map_err(|error| explain(&error))?;
            input.sources.push(Source { offset: 0, spec });
        }
        Ok(input)
    }

    /// Reads the header of a file of tensors: its length, then JSON.
    fn find_tensors(&mut self) -> Result<(), String> {
        let total = self.seen.0;
        let mut word = [0; 8];
        if total < 8 {
            return Err(format!(
                "a file of tensors begins with 8 bytes, this one has {total}"
            ));
        }
        self.file.read_exact_at(&mut word, 0).map_err(text)?;
        let len = u64::from_le_bytes(word);
        if len > MOST_HEADER || len + 8 > total {
            return Err(format!(
                "its header says {len} bytes, of {total} in the file"
            ));
        }
        let mut header = vec![0; len as usize];
        self.file.read_exact_at(&mut header, 8).map_err(text)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| e.to_string())?;
        let (there, mut end) = (total - 8 - len, 0);
        for (name, tensor) in metadata.tensors() {
            let shape: Vec<u64> = tensor.shape.iter().map(|&extent| extent as u64).collect();
            let spec = PartSpec::contiguous(&name, dtype::of_file(tensor.dtype)?, &shape)
                .map_err(|error| explain(&error))?;
            let (from, to) = (tensor.data_offsets.0 as u64, tensor.data_offsets.1 as u64);
            if to.checked_sub(from) != Some(spec.len) {
                return Err(format!(
                    "{name} lies at {from} to {to}, but its shape needs {} bytes",
                    spec.len
                ));
            }
            if to > there {
                return Err(format!(
                    "{name} lies at {from} to {to}, but the file has {there} bytes of tensors; copy it again, it is cut"
                ));
            }
            end = end.max(to);
            self.sources.push(Source {
                offset: 8 + len + from,
                spec,
            });
        }
        if end < there {
            return Err(format!(
                "it has {there} bytes of tensors, and its header knows of {end}; write it anew, no tensor has the rest"
            ));
        }
        // Tensors without a byte lie where others do.
        let place = |source: &Source| (source.offset, source.spec.len);
        let by_name = |a: &Source, b: &Source| a.spec.name.cmp(&b.spec.name);
        self.sources
            .sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| by_name(a, b)));
        let of_file = metadata.metadata().clone().unwrap_or_default();
        self.tensors = Some(of_file.into_iter().collect());
        Ok(())
    }

    /// Lists its parts.
    pub fn specs(&self) -> impl Iterator<Item = &PartSpec> {
        self.sources.iter().map(|source| &source.spec)
    }

    /// Says what is noted of it.
    pub fn origin(&self) -> Original {
        Original {
            name: self.name.clone(),
            parts: self.specs().map(|spec| spec.name.clone()).collect(),
            tensors: self.tensors.clone(),
        }
    }

    /// Fills its parts, and refuses a file that changed meanwhile.
    ///
    /// # Errors
    ///
    /// The path, and what is wrong.
    pub fn fill(&self, writer: &mut Writer, bar: &ProgressBar) -> Result<(), String> {
        let failed = |why: String| format!("{}: {why}", self.path.display());
        for source in &self.sources {
            self.fill_part(source, writer, bar).map_err(failed)?;
        }
        let now = seen(&self.file).map_err(failed)?;
        if now != self.seen {
            return Err(failed(format!(
                "it changed while it was read, from {} to {} bytes; put it again when nothing writes to it",
                self.seen.0, now.0
            )));
        }
        Ok(())
    }

    fn fill_part(
        &self,
        source: &Source,
        writer: &mut Writer,
        bar: &ProgressBar,
    ) -> Result<(), String> {
        let len = source.spec.len;
        let mut buffer = vec![0; PIECE.min(len) as usize];
        let mut at = 0;
        while at < len {
            let piece = &mut buffer[..PIECE.min(len - at) as usize];
            let read = self.file.read_exact_at(piece, source.offset + at);
            read.map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    "it became shorter while it was read; put it again when nothing writes to it"
                        .into()
                }
                _ => error.to_string(),
            })?;
            writer
                .write_part(&source.spec.name, at, piece)
                .map_err(|error| explain(&error))?;
            at += piece.len() as u64;
            bar.inc(piece.len() as u64);
        }
        Ok(())
    }
}

fn text(error: io::Error) -> String {
    error.to_string()
}

fn seen(file: &File) -> Result<(u64, Option<SystemTime>), String> {
    let metadata = file.metadata().map_err(text)?;
    Ok((metadata.len(), metadata.modified().ok()))
}

/// Returns a file of known length with what another contains: itself, or a copy without a name of
/// what can be read only once.
fn sized(mut file: File) -> Result<File, String> {
    let metadata = file.metadata().map_err(text)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err("it is a directory; name the files in it".into());
    }
    if kind.is_char_device() || kind.is_block_device() {
        return Err(
            "it is a device, which has no end; put what is wanted of it into a file or a pipe"
                .into(),
        );
    }
    // A file of the kernel's says that it has no byte, and has some.
    let has_more = kind.is_file() && metadata.len() == 0 && file.read(&mut [0]).map_err(text)? > 0;
    if kind.is_file() && !has_more {
        return Ok(file);
    }
    if has_more {
        file.rewind().map_err(text)?;
    }
    let mut copy = tempfile::tempfile().map_err(text)?;
    io::copy(&mut file, &mut copy).map_err(|error| {
        let dir = std::env::temp_dir();
        format!(
            "it is read to its end into a file in {}: {error}; set TMPDIR to where there is room",
            dir.display()
        )
    })?;
    Ok(copy)
}
