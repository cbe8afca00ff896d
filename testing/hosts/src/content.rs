//! Bytes of objects, each word of which says where it belongs.

/// Makes the bytes of a version: word `i` is the version in its upper half and `i` in its lower.
pub fn make(version: u32, bytes: usize) -> Vec<u8> {
    (0..bytes / 8)
        .flat_map(|i| word(version, i).to_le_bytes())
        .collect()
}

/// Reads the version of bytes.
///
/// # Errors
///
/// The first word that does not belong there: the object is a mixture, or has lost bytes.
pub fn version(bytes: &[u8]) -> Result<u32, String> {
    let (words, rest) = bytes.as_chunks::<8>();
    let Some(first) = words.first() else {
        return Err("no bytes".into());
    };
    let version = (u64::from_le_bytes(*first) >> 32) as u32;
    let wrong = words
        .iter()
        .enumerate()
        .find(|(i, bytes)| u64::from_le_bytes(**bytes) != word(version, *i));
    match wrong {
        None if rest.is_empty() => Ok(version),
        None => Err(format!("{} bytes, which are no whole words", bytes.len())),
        Some((i, bytes)) => {
            let word = u64::from_le_bytes(*bytes);
            let (other, place) = (word >> 32, word & 0xffff_ffff);
            Err(format!(
                "a mixture: begins as version {version}, but word {i} is word {place} of version {other}"
            ))
        }
    }
}

fn word(version: u32, i: usize) -> u64 {
    u64::from(version) << 32 | i as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_foreign_word_a_hole_and_a_shift_are_seen() {
        let whole = make(7, 80_000);
        assert_eq!(version(&whole), Ok(7));
        let mut mixed = whole.clone();
        mixed[79_992..].copy_from_slice(&make(8, 80_000)[79_992..]);
        let seen = "a mixture: begins as version 7, but word 9999 is word 9999 of version 8";
        assert_eq!(version(&mixed), Err(seen.into()));
        let mut hole = whole.clone();
        hole[4_096..8_192].fill(0);
        assert!(version(&hole).is_err());
        assert!(
            version(&whole[8..]).is_err()
                && version(&whole[..79_999]).is_err()
                && version(&[]).is_err()
        );
    }
}
