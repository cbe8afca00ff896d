//! The files that `get` writes: each appears under its name when all of it is there, and none takes
//! the place of another.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use gpu_ipc::broker::{Part, PartSpec, Reader};
use indicatif::ProgressBar;
use safetensors::tensor::TensorInfo;
use serde::Serialize;

use super::get::copy;
use super::origin::{Origin, Original};
use super::{dtype, progress};
use crate::device::explain;
use crate::output;

/// The name that the format keeps for what is no tensor.
const METADATA: &str = "__metadata__";

/// Writes the files that an object was filled with, or one for each part, into a directory, which
/// is made.
///
/// # Errors
///
/// The path, what is wrong, and what to do.
pub fn write_all(reader: &Reader, dir: &Path) -> Result<(), String> {
    let files =
        Origin::of(reader.layout()).map_or_else(|| a_file_each(reader), |origin| origin.files);
    // Of another writer: a name must not lead out of the directory.
    for Original { name, .. } in &files {
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
            return Err(format!(
                "{name:?} is no name of a file; write all parts into one file with --safetensors, or each with --part"
            ));
        }
    }
    std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let bar = progress(
        reader
            .layout()
            .parts()
            .iter()
            .map(|part| part.spec.len)
            .sum(),
    );
    for Original {
        name,
        parts,
        tensors,
    } in files
    {
        let parts = parts.iter().map(|part| find(reader, part));
        let parts: Vec<&Part> = parts.collect::<Result<_, _>>()?;
        write_file(reader, &dir.join(name), parts, tensors, &bar)?;
    }
    bar.finish_and_clear();
    Ok(())
}

/// Writes all parts into one file of tensors.
///
/// # Errors
///
/// As [`write_all`].
pub fn write_tensors(reader: &Reader, path: &Path) -> Result<(), String> {
    let mut metadata = BTreeMap::new();
    for file in Origin::of(reader.layout())
        .into_iter()
        .flat_map(|origin| origin.files)
    {
        for (key, value) in file.tensors.into_iter().flatten() {
            let kept = metadata.entry(key.clone()).or_insert_with(|| value.clone());
            if *kept != value {
                output::complain(&format!(
                    "the metadata {key:?} is {kept:?}; {} had {value:?}, which is left out",
                    file.name
                ));
            }
        }
    }
    let parts: Vec<&Part> = reader.layout().parts().iter().collect();
    let bar = progress(parts.iter().map(|part| part.spec.len).sum());
    write_file(reader, path, parts, Some(metadata), &bar)?;
    bar.finish_and_clear();
    Ok(())
}

fn a_file_each(reader: &Reader) -> Vec<Original> {
    let parts = reader.layout().parts().iter();
    let file = |part: &Part| Original {
        name: part.spec.name.clone(),
        parts: vec![part.spec.name.clone()],
        tensors: None,
    };
    parts.map(file).collect()
}

fn find<'a>(reader: &'a Reader, name: &str) -> Result<&'a Part, String> {
    let part = reader.layout().part(name);
    part.ok_or_else(|| {
        format!("the object says that it was filled with {name}, which it does not have")
    })
}

fn write_file(
    reader: &Reader,
    path: &Path,
    mut parts: Vec<&Part>,
    tensors: Option<BTreeMap<String, String>>,
    bar: &ProgressBar,
) -> Result<(), String> {
    let shown = path.display();
    let failed = |error: std::io::Error| format!("{shown}: {error}");
    // As they lie in the object, and so as they lay in the file.
    parts.sort_by_key(|part| (part.region, part.offset, part.spec.len));
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    // As any new file: the umask takes away.
    let mut builder = tempfile::Builder::new();
    let builder = builder
        .prefix(".gpu-ipc-")
        .permissions(Permissions::from_mode(0o666));
    let mut file = builder
        .tempfile_in(dir.unwrap_or(Path::new(".")))
        .map_err(failed)?;
    if let Some(metadata) = tensors {
        file.write_all(&header(&parts, metadata)?).map_err(failed)?;
    }
    for part in parts {
        let copied = copy(reader, &part.spec.name, file.as_file_mut(), bar);
        copied.map_err(|stopped| stopped.explain(&shown.to_string()))?;
    }
    let kept = file.persist_noclobber(path);
    kept.map_err(|error| match error.error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            format!("{shown} is there already; remove it, or write elsewhere")
        }
        _ => failed(error.error),
    })?;
    Ok(())
}

/// Makes the head of a file of tensors, a multiple of 8 bytes long.
fn header(parts: &[&Part], metadata: BTreeMap<String, String>) -> Result<Vec<u8>, String> {
    let mut end = 0usize;
    let mut tensors = Vec::with_capacity(parts.len());
    for part in parts {
        let PartSpec {
            name,
            dtype,
            dimensions,
            len,
        } = &part.spec;
        let shape: Vec<u64> = dimensions
            .iter()
            .map(|dimension| dimension.extent)
            .collect();
        let plain =
            PartSpec::contiguous(&**name, *dtype, &shape).map_err(|error| explain(&error))?;
        let of_file = dtype::in_file(*dtype).filter(|_| plain == part.spec && name != METADATA);
        let dtype = of_file.ok_or_else(|| {
            let dtype = dtype::name(*dtype);
            format!("a file of tensors cannot have {name}, of type {dtype} and {len} bytes; write it with --part")
        })?;
        let from = end;
        end += *len as usize;
        let shape = shape.iter().map(|&extent| extent as usize).collect();
        let info = TensorInfo {
            dtype,
            shape,
            data_offsets: (from, end),
        };
        tensors.push((name.clone(), info));
    }
    let mut entries = Vec::with_capacity(tensors.len() + 1);
    // Sorted, so that one object has one file.
    if !metadata.is_empty() {
        entries.push(entry(METADATA, &metadata));
    }
    entries.extend(tensors.iter().map(|(name, info)| entry(name, info)));
    let mut json = format!("{{{}}}", entries.join(",")).into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([(json.len() as u64).to_le_bytes().as_slice(), &json].concat())
}

fn entry(name: &str, value: &impl Serialize) -> String {
    let json = |json: serde_json::Result<String>| json.expect("it is made of strings and numbers");
    let (name, value) = (serde_json::to_string(name), serde_json::to_string(value));
    format!("{}:{}", json(name), json(value))
}
