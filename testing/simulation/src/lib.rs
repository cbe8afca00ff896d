//! Simulates hosts that follow the gateways' plan.
//!
//! | module | what it holds |
//! |---|---|
//! | [`scenario`] | the hosts: their links, deaths and lies, drawn from a seed |
//! | [`link`] | one host's way out, shared fairly by the reads that it serves |
//! | [`hearing`] | announcements, heard late and by each host at another time |
//! | [`world`] | the events of a run |
//! | [`outcome`] | what a run came to, beside the optimum |
//! | [`report`] | many runs as a table and as data |
//! | [`discovery`] | hosts that look for names, over the shipped messages |
//! | [`picture`] | the same as a picture |
//!
//! The decisions are those of `gpu-ipc-gateway-plan`, which the gateway ships. The control,
//! [`world::Policy::OriginOnly`], reads
//! everything from the origin.

pub mod discovery;
pub mod hearing;
pub mod link;
pub mod outcome;
pub mod picture;
pub mod report;
pub mod scenario;
pub mod world;
