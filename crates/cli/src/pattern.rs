//! What a block contains, so that wrong contents show.

/// Makes the word at a place from a stamp: every block of every generation has other contents in
/// every word.
fn word(stamp: u64, index: u64) -> u64 {
    // splitmix64 (Steele, Lea, Flood 2014): a bijection that scatters neighbours.
    let mut z = stamp.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fills a buffer with a stamp's contents.
pub fn fill(buffer: &mut [u8], stamp: u64) {
    for (index, chunk) in (0..).zip(buffer.chunks_exact_mut(8)) {
        chunk.copy_from_slice(&word(stamp, index).to_le_bytes());
    }
}

/// Says whether a buffer has a stamp's contents.
pub fn matches(buffer: &[u8], stamp: u64) -> bool {
    differences(buffer, stamp).next().is_none()
}

/// Lists the words of a buffer that are not a stamp's: places and contents.
pub fn differences(buffer: &[u8], stamp: u64) -> impl Iterator<Item = (u64, u64)> {
    let (words, _) = buffer.as_chunks::<8>();
    let words = (0..).zip(words.iter().map(|bytes| u64::from_le_bytes(*bytes)));
    words.filter(move |&(index, found)| found != word(stamp, index))
}

/// Makes the stamp of a block.
pub fn stamp(seed: u64, block: u32) -> u64 {
    word(seed, u64::from(block))
}

/// Makes the stamp of the reply to a block.
pub fn reply(stamp: u64) -> u64 {
    !stamp
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_match_their_stamp_and_no_other() {
        let mut buffer = [0; 64];
        fill(&mut buffer, 7);
        assert!(matches(&buffer, 7));
        assert!(!matches(&buffer, 8));
        buffer[63] ^= 1;
        assert!(!matches(&buffer, 7));
        assert_eq!(
            differences(&buffer, 7)
                .map(|(index, _)| index)
                .collect::<Vec<_>>(),
            [7]
        );
    }
}
