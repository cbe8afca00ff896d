//! What a broker allows.

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
            reads_slots: true,
        }
    }
}
