//! What the examples of objects share: their processes, the weights, and what stands for inference.
//!
//! 1. `options`: what they are told.
//! 2. `process`: their roles, and a keeper with its broker.
//! 3. `weights`: an object of many parts, and who fills it.
//! 4. `engine`: who reads it; on an NVIDIA GPU by the captured graph of `graph`.

#![allow(
    dead_code,
    reason = "each example is a program of its own and uses a part of this"
)]

#[path = "../../shared/mod.rs"]
mod common;
pub mod engine;
mod graph;
pub mod options;
pub mod process;
pub mod weights;

/// The name of the object.
pub const NAME: &str = "weights";
