//! What gateways announce, as keys of Zenoh: a token that is there while its gateway is suspected
//! to live.
//!
//! | key | what it says |
//! |---|---|
//! | `gpu-ipc/1/HOST/INCARNATION/ask` | questions to this gateway go here |
//! | `gpu-ipc/1/HOST/INCARNATION/live` | a token: this gateway is there |
//! | `gpu-ipc/1/HOST/INCARNATION/has/IDENTITY/EPOCH/BYTES/LAYOUT/READS/LIMIT/HOME/NAME` | a token: its broker has this object, and it serves READS reads of it, of at most LIMIT at a time |
//!
//! What a token says is a hint: the answer to a question decides. HOST, HOME and NAME are texts, in
//! which every byte but `A-Z a-z 0-9 . _ -` is `=` and two hexadecimal digits. HOME is the host
//! itself for an object that was committed there.

use gpu_ipc::broker::Identity;
use serde::Serialize;

use crate::message::Incarnation;

/// The beginning of all keys.
pub const ROOT: &str = "gpu-ipc/1";

/// A gateway.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct Gateway {
    /// The name of its host.
    pub host: String,
    /// Its process.
    pub incarnation: Incarnation,
}

impl Gateway {
    /// Returns the beginning of its keys.
    pub fn key(&self) -> String {
        format!("{ROOT}/{}/{}", escape(&self.host), self.incarnation)
    }
}

/// An object that a gateway announces.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct Announced {
    /// Its name.
    pub name: String,
    /// Its epoch.
    pub epoch: u64,
    /// Its identity, as hexadecimal digits.
    pub identity: String,
    /// Bytes of memory.
    pub bytes: u64,
    /// A number of its layout: equal layouts have equal ones.
    pub layout: u64,
    /// Reads of it that this gateway says it serves.
    pub reads: u32,
    /// How many it says it serves at most at a time.
    pub limit: u32,
    /// The host that committed it first.
    pub home: String,
}

impl Announced {
    /// Returns the key behind that of its gateway.
    pub fn key(&self, gateway: &Gateway) -> String {
        let Announced {
            name,
            epoch,
            identity,
            bytes,
            layout,
            reads,
            limit,
            home,
        } = self;
        let (home, name) = (escape(home), escape(name));
        format!(
            "{}/has/{identity}/{epoch}/{bytes}/{layout:016x}/{reads}/{limit}/{home}/{name}",
            gateway.key()
        )
    }

    /// Reads a key; nothing for one that no gateway gives.
    pub fn parse(key: &str) -> Option<(Gateway, Announced)> {
        let rest = key.strip_prefix(ROOT)?.strip_prefix('/')?;
        let chunks: Vec<&str> = rest.split('/').collect();
        let [
            host,
            incarnation,
            "has",
            identity,
            epoch,
            bytes,
            layout,
            reads,
            limit,
            home,
            name,
        ] = chunks[..]
        else {
            return None;
        };
        let incarnation = Incarnation(incarnation.parse::<Identity>().ok()?.0);
        let announced = Announced {
            name: unescape(name)?,
            epoch: epoch.parse().ok()?,
            identity: identity.parse::<Identity>().ok()?.to_string(),
            bytes: bytes.parse().ok()?,
            layout: u64::from_str_radix(layout, 16).ok()?,
            reads: reads.parse().ok()?,
            limit: limit.parse().ok()?,
            home: unescape(home)?,
        };
        Some((
            Gateway {
                host: unescape(host)?,
                incarnation,
            },
            announced,
        ))
    }
}

/// Writes a text as one chunk of a key.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' => {
                out.push(char::from(byte))
            }
            other => out.push_str(&format!("={other:02x}")),
        }
    }
    out
}

/// Reads it back; nothing for what [`escape`] does not write.
pub fn unescape(chunk: &str) -> Option<String> {
    let (mut bytes, mut out) = (chunk.bytes(), Vec::new());
    while let Some(byte) = bytes.next() {
        if byte != b'=' {
            out.push(byte);
            continue;
        }
        let digits = [bytes.next()?, bytes.next()?];
        out.push(u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok()?);
    }
    let text = String::from_utf8(out).ok()?;
    (!text.is_empty() && escape(&text) == chunk).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_announcement_survives_its_key(
            name in "\\PC{1,40}", home in "[a-zé/*$#?@ ]{1,9}", numbers: (u64, u64, u64), load: (u32, u32),
        ) {
            let ((epoch, bytes, layout), (reads, limit)) = (numbers, load);
            let gateway = Gateway { host: home.clone(), incarnation: Incarnation([7; 16]) };
            let identity = Identity([9; 16]).to_string();
            let announced = Announced { name, epoch, identity, bytes, layout, reads, limit, home };
            let key = announced.key(&gateway);
            prop_assert!(zenoh::key_expr::KeyExpr::new(key.clone()).is_ok_and(|key| !key.is_wild()), "{}", key);
            prop_assert_eq!(Announced::parse(&key), Some((gateway, announced)));
        }

        #[test]
        fn no_key_panics(key in "gpu-ipc/1(/[a-z0-9=]{0,33}){0,12}") {
            let _ = Announced::parse(&key);
        }
    }
}
