//! What a broker allows.

use std::time::Duration;

/// What a broker allows.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of all objects.
    pub bytes: u64,
    /// Bytes of the objects of one user.
    pub bytes_per_uid: u64,
    /// Of each device's memory, what its objects may take, in percent.
    pub device_percent: u8,
    /// Epochs of a name that are kept.
    pub epochs: usize,
    /// Participants at a time.
    pub participants: usize,
    /// Names that have an object, visible or not. One that was removed counts no more.
    pub names: usize,
    /// Names that one participant watches at a time.
    pub watches: usize,
    /// When a limit of bytes presses, removes objects that no participant reads, the oldest first.
    pub evict: bool,
    /// How long an object may be read by no participant before it is removed.
    pub ttl: Option<Duration>,
    /// How long a pool may be held by no process before it is removed.
    pub pool_ttl: Option<Duration>,
    /// Names that are neither evicted nor removed for their age; one that ends with `*` stands for
    /// all that begin so.
    pub pins: Vec<String>,
    /// Reads the slots before it publishes; without, the negative control of the tests.
    pub reads_slots: bool,
}

impl Default for Limits {
    /// No limit of bytes but the device's; two epochs of each name; 4,096 participants, of which each watches 1,024
    /// names; 262,144 names.
    fn default() -> Limits {
        Limits {
            bytes: u64::MAX,
            bytes_per_uid: u64::MAX,
            device_percent: 100,
            epochs: 2,
            participants: 4_096,
            names: 1 << 18,
            watches: 1_024,
            evict: false,
            ttl: None,
            pool_ttl: None,
            pins: Vec::new(),
            reads_slots: true,
        }
    }
}

impl Limits {
    /// Says whether a name's objects stay whatever presses.
    pub(super) fn is_pinned(&self, name: &str) -> bool {
        self.pins.iter().any(|pin| match pin.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == pin,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_a_name_or_the_beginning_of_names() {
        let limits = Limits {
            pins: vec!["prod".into(), "base/*".into()],
            ..Limits::default()
        };
        for (name, pinned) in [
            ("prod", true),
            ("prod2", false),
            ("base/7b", true),
            ("base", false),
        ] {
            assert_eq!(limits.is_pinned(name), pinned, "{name}");
        }
    }
}
