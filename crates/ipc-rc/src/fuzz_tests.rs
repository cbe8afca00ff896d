//! What is kept in `fuzz/corpus`, and a thousand inputs made from it, through the functions that
//! are fuzzed.

use std::collections::BTreeSet;
use std::path::Path;

use super::*;

/// Says how many inputs are made from each part of the corpus: a thousand, few under an
/// interpreter, or as many as `GPU_IPC_FUZZ_INPUTS` says.
fn inputs() -> usize {
    match std::env::var("GPU_IPC_FUZZ_INPUTS") {
        Ok(number) => number.parse().expect("GPU_IPC_FUZZ_INPUTS is a number"),
        Err(_) if cfg!(miri) => 50,
        Err(_) => 1000,
    }
}

/// Throws numbers that follow from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        // splitmix64 (Steele, Lea, Flood 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }
}

/// Reads a target's inputs, in the order of their names.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    assert!(
        paths.len() >= 10,
        "{} holds only {} inputs",
        dir.display(),
        paths.len()
    );
    paths
        .iter()
        .map(|path| std::fs::read(path).expect("it can be read"))
        .collect()
}

/// Makes an input from others as a fuzzer does: bytes changed, inserted, repeated, cut, and others'
/// parts.
fn crafted(corpus: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    const SPECIAL: [u64; 8] = [
        0,
        1,
        0x7f,
        1 << 31,
        (1 << 61) - 1,
        1 << 61,
        u64::MAX - 1,
        u64::MAX,
    ];
    let mut bytes = corpus[dice.below(corpus.len())].clone();
    for _ in 0..=dice.below(4) {
        let at = dice.below(bytes.len());
        match dice.below(6) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << dice.below(8),
            1 if !bytes.is_empty() => bytes[at] = dice.below(256) as u8,
            2 => bytes.truncate(at),
            3 => {
                let other = &corpus[dice.below(corpus.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(&other[dice.below(other.len())..]);
            }
            4 => {
                let special = SPECIAL[dice.below(SPECIAL.len())].to_le_bytes();
                let width = 1 << dice.below(4);
                bytes
                    .iter_mut()
                    .skip(at)
                    .zip(&special[..width])
                    .for_each(|(byte, new)| *byte = *new);
            }
            _ => {
                let part = bytes[at..].to_vec();
                bytes.extend(part);
                bytes.truncate(8192);
            }
        }
    }
    bytes
}

/// Runs a target on the corpus, whose results it returns, and on what is made from it; says how
/// much had a meaning.
fn drive<T>(target: &str, run: impl Fn(&[u8]) -> Option<T>) -> Vec<T> {
    let corpus = corpus(target);
    let kept: Vec<T> = corpus.iter().filter_map(|bytes| run(bytes)).collect();
    let (mut dice, inputs) = (Dice(20_261_121), inputs());
    let good = (0..inputs)
        .filter(|_| run(&crafted(&corpus, &mut dice)).is_some())
        .count();
    println!(
        "{target}: {} of {} kept and {good} of {inputs} crafted inputs have a meaning",
        kept.len(),
        corpus.len()
    );
    assert!(
        good > 0,
        "nothing of what is crafted gets past the first check"
    );
    kept
}

#[test]
fn descriptors() {
    let kept = drive("descriptor", |bytes| {
        descriptor(bytes).then_some(bytes.get(7).copied())
    });
    let kinds: BTreeSet<_> = kept.into_iter().flatten().collect();
    assert_eq!(
        kinds,
        BTreeSet::from([1, 2]),
        "the corpus lacks a kind of grant"
    );
}

#[test]
fn messages_to_a_producer() {
    let kinds: BTreeSet<u8> = drive("to_producer", to_producer).into_iter().collect();
    assert_eq!(kinds, (1..=9).collect(), "the corpus lacks a type");
}

#[test]
fn messages_to_a_participant() {
    let kinds: BTreeSet<u8> = drive("to_participant", to_participant)
        .into_iter()
        .collect();
    assert_eq!(kinds, (129..=142).collect(), "the corpus lacks a type");
}

#[test]
fn counter_files() {
    let corrupt: usize = drive("counter_file", |bytes| Some(counter_file(bytes)))
        .into_iter()
        .sum();
    assert!(
        corrupt >= 10,
        "the corpus writes hardly anything that is noticed: {corrupt} words"
    );
}
