//! What a broker allows, as its command line and its file of options say it.

use std::time::Duration;

use clap::Args as Arguments;
use gpu_ipc::broker::{Allowed, Limits};

use crate::size;

/// Options that hold from when they are read: at the start, and from the file again on SIGHUP.
/// What is not given has its default.
#[derive(Arguments, Clone, Default, Debug)]
pub struct RuleOptions {
    /// Most bytes of all objects together
    #[arg(long, value_name = "BYTES", value_parser = size::parse)]
    pub limit: Option<u64>,
    /// Most bytes of one user's objects
    #[arg(long, value_name = "BYTES", value_parser = size::parse)]
    pub limit_per_uid: Option<u64>,
    /// Most of each device's memory for objects, in percent [default: 90]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub device_limit: Option<u8>,
    /// Most names that have an object; one that was removed counts no more [default: 262144]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub limit_names: Option<u32>,
    /// When a limit of bytes or the keeper's room presses, remove objects that no process reads, the
    /// oldest first
    #[arg(long, value_name = "IS", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub evict: Option<bool>,
    /// Remove an object that no process has read for so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub ttl: Option<u64>,
    /// Remove a pool that no process has held for so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub pool_ttl: Option<u64>,
    /// A name that is neither evicted nor removed for its age, or the beginning of names with a `*`;
    /// repeatable
    #[arg(long, value_name = "NAME")]
    pub pin: Vec<String>,
    /// Number of epochs to keep of each name [default: 2]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub keep_epochs: Option<u32>,
    /// Another user that may connect; repeatable
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,
    /// A group whose users may connect; repeatable
    #[arg(long, value_name = "GID")]
    pub allow_gid: Vec<u32>,
}

impl RuleOptions {
    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        Limits {
            bytes: self.limit.unwrap_or(u64::MAX),
            bytes_per_uid: self.limit_per_uid.unwrap_or(u64::MAX),
            device_percent: self.device_limit.unwrap_or(90),
            names: self.limit_names.unwrap_or(262_144) as usize,
            evict: self.evict.unwrap_or(false),
            ttl: self.ttl.map(Duration::from_secs),
            pool_ttl: self.pool_ttl.map(Duration::from_secs),
            pins: self.pin.clone(),
            epochs: self.keep_epochs.unwrap_or(2) as usize,
            ..Limits::default()
        }
    }

    /// Returns who may connect.
    pub fn allowed(&self) -> Allowed {
        Allowed {
            uids: self.allow_uid.clone(),
            gids: self.allow_gid.clone(),
        }
    }
}
