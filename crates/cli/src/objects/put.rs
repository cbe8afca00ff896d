//! `gpu-ipc put`: files become an object.

use std::path::PathBuf;

use clap::Args as Arguments;
use gpu_ipc::Error;
use gpu_ipc::broker::{Client, CreateOptions, Epoch, Layout, ObjectError, Readers};

use super::input::Input;
use super::origin::Origin;
use super::{Asked, progress};
use crate::choice::BackendChoice;
use crate::device::{choose, explain};
use crate::{Outcome, output};

/// Options of `put`.
#[derive(Arguments, Debug)]
pub struct PutOptions {
    /// The name
    pub name: String,
    /// Files, or pipes, which are read to their ends first: each becomes a part with the file's
    /// name, or a .safetensors file a part for each tensor
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// All are files of tensors, whatever their names
    #[arg(long)]
    pub safetensors: bool,
    /// Commit only if this is the name's latest epoch; 0: only if it has none
    #[arg(long, value_name = "N")]
    pub expect: Option<u64>,
    /// Remove the name's old epochs first, if there is no room for two
    #[arg(long)]
    pub replace: bool,
    /// A user that may open the object, and so could write to it; repeatable
    #[arg(long, value_name = "UID")]
    pub reader: Vec<u32>,
    /// A group whose users may open the object, and so could write to it; repeatable
    #[arg(long, value_name = "GID", conflicts_with = "reader")]
    pub reader_group: Vec<u32>,
    /// Device of the object
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendChoice,
    /// Which broker.
    #[command(flatten)]
    pub asked: Asked,
}

/// Puts the files, and prints the epoch.
pub fn run(options: &PutOptions) -> Outcome {
    match put(options) {
        Ok(epoch) => output::conclude(&epoch.to_string(), Outcome::Good),
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn put(options: &PutOptions) -> Result<Epoch, String> {
    let open = |path: &PathBuf| Input::open(path, options.safetensors);
    let inputs: Vec<Input> = options.files.iter().map(open).collect::<Result<_, _>>()?;
    let origin = Origin {
        files: inputs.iter().map(Input::origin).collect(),
    };
    let specs = inputs.iter().flat_map(Input::specs).cloned();
    let layout = Layout::pack(specs, &origin.encode()).map_err(|error| explain(&error))?;
    let bytes = inputs.iter().flat_map(Input::specs).map(|spec| spec.len);
    let bar = progress(bytes.sum());
    let client = options
        .asked
        .connect(choose(options.backend)?, "gpu-ipc put")?;
    let readers = match (&options.reader, &options.reader_group) {
        (uids, _) if !uids.is_empty() => Readers::Uids(uids.clone()),
        (_, gids) if !gids.is_empty() => Readers::Gids(gids.clone()),
        _ => Readers::Owner,
    };
    let create = CreateOptions {
        readers,
        expect: options.expect.map(Epoch),
        replace: options.replace,
        ..CreateOptions::default()
    };
    let mut writer = client
        .create_with(&options.name, layout, &create)
        .map_err(|error| explain(&error))?;
    for input in &inputs {
        input.fill(&mut writer, &bar)?;
    }
    bar.finish_and_clear();
    let commit = writer.commit(&[]).map_err(|error| explain(&error))?;
    let patience = options.asked.patience();
    commit.wait_for(patience).map_err(|error| match error {
        ObjectError::Gpu(Error::Deadline { .. }) => {
            let (name, seconds) = (&options.name, options.asked.timeout);
            let keeper = keeper_of(&client);
            format!(
                "the commit of {name} was not confirmed within {seconds} s: {keeper}; it goes on, so ask \
                 `gpu-ipc objects {name}` before you put it again"
            )
        }
        error => explain(&error),
    })
}

/// Says why a commit may wait.
fn keeper_of(client: &Client) -> String {
    match client.list() {
        Ok(listing) => super::list::keeper(&listing),
        Err(error) => explain(&error),
    }
}
