//! What a chunk is shown as: where it stands, and whether another process holds it.

use std::collections::HashMap;

use super::{ChunkSnapshot, ChunkState, Snapshot};

/// What a chunk is shown as.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Shown {
    Free,
    Pending,
    /// In use, and lent to nobody.
    Used,
    /// Lent, and the producer has it too.
    Lent,
    /// Lent, and the producer dropped it.
    Limbo,
}

/// The blocks that are lent, by address.
pub(super) struct Marks<'a> {
    blocks: HashMap<u64, (bool, Vec<Option<usize>>)>,
    snapshot: &'a Snapshot,
}

impl<'a> Marks<'a> {
    pub(super) fn of(snapshot: &'a Snapshot) -> Marks<'a> {
        let mut blocks = HashMap::<u64, (bool, Vec<Option<usize>>)>::new();
        for lent in &snapshot.lent {
            let (limbo, holders) = blocks.entry(lent.address).or_default();
            *limbo |= lent.limbo;
            holders.push(lent.holder);
        }
        Marks { blocks, snapshot }
    }

    pub(super) fn shown(&self, chunk: &ChunkSnapshot) -> Shown {
        match (chunk.state, self.blocks.get(&chunk.address)) {
            (ChunkState::Free, _) => Shown::Free,
            (ChunkState::Pending, _) => Shown::Pending,
            (ChunkState::Used, None) => Shown::Used,
            (ChunkState::Used, Some((false, _))) => Shown::Lent,
            (ChunkState::Used, Some((true, _))) => Shown::Limbo,
        }
    }

    /// Names the holders of the block that begins at an address, each once.
    pub(super) fn holders(&self, address: u64) -> Vec<String> {
        let Some((_, holders)) = self.blocks.get(&address) else {
            return Vec::new();
        };
        let mut holders = holders.clone();
        holders.sort_unstable();
        holders.dedup();
        let name = |place: &Option<usize>| match place
            .and_then(|place| self.snapshot.holders.get(place))
        {
            Some(holder) => format!("{} ({})", holder.pid, holder.command),
            None => "another process".into(),
        };
        holders.iter().map(name).collect()
    }
}

impl Snapshot {
    /// Returns the bytes of blocks in limbo that the holder at a place of the list has, each block
    /// once.
    pub fn limbo_of(&self, holder: usize) -> u64 {
        let theirs = self
            .lent
            .iter()
            .filter(|lent| lent.limbo && lent.holder == Some(holder));
        let blocks: HashMap<u64, u64> = theirs.map(|lent| (lent.address, lent.len)).collect();
        blocks.values().fold(0, |sum, &len| sum.saturating_add(len))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HolderSnapshot, LentSnapshot};
    use super::*;

    #[test]
    fn who_holds_a_block_is_named_once() {
        let holder = |participant, pid| HolderSnapshot {
            participant,
            pid,
            command: "reader".into(),
            leases: 2,
            bytes: 2,
            mappings: 1,
            oldest_ms: 0,
            dying: false,
        };
        let lent = |address, holder, limbo| LentSnapshot {
            address,
            len: 512,
            holder: Some(holder),
            limbo,
        };
        let snapshot = Snapshot {
            holders: vec![holder(1, 10), holder(2, 20)],
            lent: vec![
                lent(0, 1, true),
                lent(0, 0, true),
                lent(0, 1, true),
                lent(512, 7, false),
                lent(1024, 1, true),
            ],
            ..Snapshot::default()
        };
        let marks = Marks::of(&snapshot);
        assert_eq!(marks.holders(0), ["10 (reader)", "20 (reader)"]);
        assert_eq!(marks.holders(512), ["another process"]);
        assert!(marks.holders(256).is_empty());
        let chunk = |address, state| ChunkSnapshot {
            address,
            len: 512,
            asked: 512,
            number: 1,
            state,
        };
        let shown = [
            (0, ChunkState::Used, Shown::Limbo),
            (512, ChunkState::Used, Shown::Lent),
            (2048, ChunkState::Used, Shown::Used),
            // It was freed after the leases were listed.
            (512, ChunkState::Free, Shown::Free),
        ];
        for (address, state, expected) in shown {
            assert_eq!(marks.shown(&chunk(address, state)), expected);
        }
        assert_eq!(
            (
                snapshot.limbo_of(1),
                snapshot.limbo_of(0),
                snapshot.limbo_of(7)
            ),
            (1024, 512, 0)
        );
    }
}
