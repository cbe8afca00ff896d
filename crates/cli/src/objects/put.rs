//! `gpu-ipc put`: files become an object.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use clap::Args as Arguments;
use gpu_ipc::broker::{CreateOptions, DType, Epoch, Layout, PartSpec, Readers, Writer};
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::BrokerDir;
use crate::choice::BackendChoice;
use crate::device::{choose, explain};
use crate::{Outcome, output};

/// Bytes copied to the device at a time.
const PIECE: u64 = 16 << 20;
/// The longest header of a file of tensors that the format allows.
const MOST_HEADER: u64 = 100_000_000;

/// Options of `put`.
#[derive(Arguments, Debug)]
pub struct PutOptions {
    /// The name
    pub name: String,
    /// Files: each becomes a part with the file's name, or a .safetensors file a part for each
    /// tensor
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Commit only if this is the name's latest epoch; 0: only if it has none
    #[arg(long, value_name = "N")]
    pub expect: Option<u64>,
    /// Remove the name's old epochs first, if there is no room for two
    #[arg(long)]
    pub replace: bool,
    /// A user that may open the object, and so could write to it; repeatable
    #[arg(long, value_name = "UID")]
    pub reader: Vec<u32>,
    /// Device of the object
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendChoice,
    /// Which broker.
    #[command(flatten)]
    pub place: BrokerDir,
}

/// A piece of a file that becomes a part.
struct Source {
    file: usize,
    offset: u64,
    spec: PartSpec,
}

/// Puts the files, and prints the epoch.
pub fn run(options: &PutOptions) -> Outcome {
    match put(options) {
        Ok(epoch) => output::conclude(&epoch.to_string(), Outcome::Good),
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn put(options: &PutOptions) -> Result<Epoch, String> {
    let mut files = Vec::new();
    let mut sources = Vec::new();
    for (number, path) in options.files.iter().enumerate() {
        let failed = |why: String| format!("{}: {why}", path.display());
        let file = File::open(path).map_err(|error| failed(error.to_string()))?;
        let of_file = if path
            .extension()
            .is_some_and(|ending| ending == "safetensors")
        {
            tensors(&file, number)
        } else {
            whole(&file, number, path)
        };
        sources.extend(of_file.map_err(failed)?);
        files.push(file);
    }
    let layout = Layout::pack(sources.iter().map(|source| source.spec.clone()), b"")
        .map_err(|error| explain(&error))?;
    let client = options
        .place
        .connect(choose(options.backend)?, "gpu-ipc put")?;
    let readers = if options.reader.is_empty() {
        Readers::Owner
    } else {
        Readers::Uids(options.reader.clone())
    };
    let expect = options.expect.map(Epoch);
    let create = CreateOptions {
        readers,
        expect,
        replace: options.replace,
        ..CreateOptions::default()
    };
    let mut writer = client
        .create_with(&options.name, layout, &create)
        .map_err(|error| explain(&error))?;
    for source in &sources {
        let path = options.files[source.file].display();
        fill(&mut writer, source, &files[source.file]).map_err(|why| format!("{path}: {why}"))?;
    }
    let commit = writer.commit(&[]).map_err(|error| explain(&error))?;
    commit.wait().map_err(|error| explain(&error))
}

fn whole(file: &File, number: usize, path: &Path) -> Result<Vec<Source>, String> {
    let len = file.metadata().map_err(|error| error.to_string())?.len();
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .ok_or("its name is not UTF-8")?;
    let spec = PartSpec::bytes(name, len).map_err(|error| explain(&error))?;
    Ok(vec![Source {
        file: number,
        offset: 0,
        spec,
    }])
}

/// Reads the header of a file of tensors: its length, then JSON.
fn tensors(mut file: &File, number: usize) -> Result<Vec<Source>, String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut word = [0; 8];
    file.read_exact(&mut word).map_err(failed)?;
    let len = u64::from_le_bytes(word);
    let total = file.metadata().map_err(failed)?.len();
    if len > MOST_HEADER || len + 8 > total {
        return Err(format!(
            "its header says {len} bytes, of {total} in the file"
        ));
    }
    let mut header = vec![0; len as usize];
    file.read_exact(&mut header).map_err(failed)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| error.to_string())?;
    let mut sources = Vec::new();
    for (name, tensor) in metadata.tensors() {
        let shape: Vec<u64> = tensor.shape.iter().map(|&extent| extent as u64).collect();
        let spec = PartSpec::contiguous(&name, dtype(tensor.dtype)?, &shape)
            .map_err(|error| explain(&error))?;
        let (from, to) = (tensor.data_offsets.0 as u64, tensor.data_offsets.1 as u64);
        if to.checked_sub(from) != Some(spec.len) || to > total - 8 - len {
            return Err(format!(
                "{name} lies at {from} to {to}, but has {} bytes",
                spec.len
            ));
        }
        sources.push(Source {
            file: number,
            offset: 8 + len + from,
            spec,
        });
    }
    sources.sort_by_key(|source| source.offset);
    Ok(sources)
}

/// Says what DLPack calls a type of the file format.
fn dtype(dtype: Dtype) -> Result<DType, String> {
    let (code, bits) = match dtype {
        Dtype::BOOL => (6, 8),
        Dtype::I8 => (0, 8),
        Dtype::I16 => (0, 16),
        Dtype::I32 => (0, 32),
        Dtype::I64 => (0, 64),
        Dtype::U8 => (1, 8),
        Dtype::U16 => (1, 16),
        Dtype::U32 => (1, 32),
        Dtype::U64 => (1, 64),
        Dtype::F16 => (2, 16),
        Dtype::F32 => (2, 32),
        Dtype::F64 => (2, 64),
        Dtype::BF16 => (4, 16),
        Dtype::C64 => (5, 64),
        Dtype::F8_E4M3 => (10, 8),
        Dtype::F8_E5M2 => (12, 8),
        Dtype::F8_E8M0 => (14, 8),
        Dtype::F6_E2M3 => (15, 6),
        Dtype::F6_E3M2 => (16, 6),
        Dtype::F4 => (17, 4),
        other => return Err(format!("the type {other:?} has no number in DLPack")),
    };
    Ok(DType {
        code,
        bits,
        lanes: 1,
    })
}

fn fill(writer: &mut Writer, source: &Source, file: &File) -> Result<(), String> {
    let mut buffer = vec![0; PIECE.min(source.spec.len) as usize];
    let mut at = 0;
    while at < source.spec.len {
        let piece = &mut buffer[..PIECE.min(source.spec.len - at) as usize];
        file.read_exact_at(piece, source.offset + at)
            .map_err(|error| error.to_string())?;
        writer
            .write_part(&source.spec.name, at, piece)
            .map_err(|error| explain(&error))?;
        at += piece.len() as u64;
    }
    Ok(())
}
