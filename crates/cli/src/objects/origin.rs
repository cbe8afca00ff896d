//! What `put` notes in an object about the files that it was filled with, so that `get` can write
//! them again: JSON in the layout's user bytes.

use std::collections::BTreeMap;

use gpu_ipc::broker::Layout;
use serde::{Deserialize, Serialize};

/// The files of an object.
#[derive(Debug, Serialize, Deserialize)]
pub struct Origin {
    #[serde(rename = "gpu_ipc_put")]
    pub files: Vec<Original>,
}

/// A file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Original {
    /// Its name, without its folder.
    pub name: String,
    /// The parts that came from it.
    pub parts: Vec<String>,
    /// It was a file of tensors, with this metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensors: Option<BTreeMap<String, String>>,
}

impl Origin {
    /// Reads it from a layout; `None` for an object that another program filled.
    pub fn of(layout: &Layout) -> Option<Origin> {
        serde_json::from_slice(layout.user()).ok()
    }

    /// Writes it.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("it is made of strings")
    }
}
