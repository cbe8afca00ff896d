//! What an example is told.

use std::error::Error;

use gpu_ipc::BackendKind;

/// Sizes and times of an example.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the memory lies.
    pub backend: String,
    /// Bytes of an object.
    pub bytes: u64,
    /// Parts of an object.
    pub parts: u64,
    /// Rounds, where there are some.
    pub rounds: u64,
    /// Milliseconds from one round to the next.
    pub every: u64,
}

impl Options {
    /// Reads the arguments of `example`.
    pub fn parse(example: &str) -> Result<Options, Box<dyn Error>> {
        let mut options = Options {
            backend: "host".into(),
            bytes: 16 << 20,
            parts: 50,
            rounds: 6,
            every: 1_000,
        };
        for pair in std::env::args().skip(1).collect::<Vec<_>>().chunks(2) {
            match pair {
                [name, value] if name == "--backend" => options.backend.clone_from(value),
                [name, value] if name == "--bytes" => options.bytes = bytes(value)?,
                [name, value] if name == "--parts" => options.parts = value.parse()?,
                [name, value] if name == "--rounds" => options.rounds = value.parse()?,
                [name, value] if name == "--every" => options.every = value.parse()?,
                _ => {
                    return Err(format!(
                        "usage: {example} [--backend host|cuda|hip] [--bytes 40GiB] [--parts N] [--rounds N] \
                         [--every MS]"
                    )
                    .into());
                }
            }
        }
        if !BackendKind::ALL
            .iter()
            .any(|kind| kind.name() == options.backend)
        {
            return Err(format!("no backend is named {}", options.backend).into());
        }
        if options.parts == 0 || options.bytes / options.parts < 4096 {
            return Err("at least one part, and at least 4096 bytes a part".into());
        }
        Ok(options)
    }
}

/// Reads a number of bytes, with KiB, MiB or GiB behind it.
fn bytes(text: &str) -> Result<u64, Box<dyn Error>> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let (number, shift) = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
        .unwrap_or((text, 0));
    let bytes = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| format!("{text} is not a number of bytes").into())
}

/// Writes a number of bytes as people do.
pub fn shown(bytes: u64) -> String {
    match bytes {
        _ if bytes.is_multiple_of(1 << 30) => format!("{} GiB", bytes >> 30),
        _ if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ => format!("{bytes} bytes"),
    }
}
