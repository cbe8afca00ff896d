//! What an object is: an identity, a layout of named parts, and the manifest that says so.

pub mod identity;
pub mod layout;
pub mod manifest;
pub mod part;
