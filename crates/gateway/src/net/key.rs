//! Keys of Zenoh.
//!
//! | key | what it says |
//! |---|---|
//! | `gpu-ipc/2/HOST/INCARNATION/ask` | questions to this gateway go here |
//! | `gpu-ipc/2/HOST/INCARNATION/live` | a token: this gateway is there, which is a suspicion |
//!
//! HOST is a text, in which every byte but `A-Z a-z 0-9 . _ -` is `=` and two hexadecimal digits.
//! No key is of an object: objects are asked for.

use gpu_ipc::broker::Identity;
use serde::{Deserialize, Serialize};

use crate::message::Incarnation;

/// The beginning of all keys.
pub const ROOT: &str = "gpu-ipc/2";

/// A gateway.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
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

    /// Reads the key of its token; nothing for one that no gateway gives.
    pub fn of_token(key: &str) -> Option<Gateway> {
        let rest = key.strip_prefix(ROOT)?.strip_prefix('/')?;
        let chunks: Vec<&str> = rest.split('/').collect();
        let [host, incarnation, "live"] = chunks[..] else {
            return None;
        };
        let incarnation = Incarnation(incarnation.parse::<Identity>().ok()?.0);
        let host = unescape(host)?;
        Some(Gateway { host, incarnation })
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
        fn a_gateway_survives_its_key(host in "[a-zA-Zé/*$#?@ ._-]{1,40}") {
            let gateway = Gateway { host, incarnation: Incarnation([7; 16]) };
            let key = format!("{}/live", gateway.key());
            prop_assert!(zenoh::key_expr::KeyExpr::new(key.clone()).is_ok_and(|key| !key.is_wild()), "{}", key);
            prop_assert_eq!(Gateway::of_token(&key), Some(gateway));
        }

        #[test]
        fn no_key_panics(key in "gpu-ipc/2(/[a-z0-9=]{0,33}){0,4}") {
            let _ = Gateway::of_token(&key);
        }
    }
}
