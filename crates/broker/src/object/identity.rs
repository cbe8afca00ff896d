//! Names an object: for people by name and epoch, for programs by 128 random bits.

use std::fmt;

use gpu_api::{Error, Result};
use rustix::rand::{GetRandomFlags, getrandom};
use transport::wrappers;

/// The most bytes of a name.
pub const MOST_NAME: usize = 255;

/// Identifies one object for ever, on every host: 128 random bits, drawn by its writer.
///
/// It is also the number by which a writer asks what became of its commit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Identity(pub [u8; 16]);

impl Identity {
    /// Draws one.
    ///
    /// # Errors
    ///
    /// [`Error::System`] where a sandbox forbids `getrandom`.
    pub fn random() -> Result<Identity> {
        let mut bytes = [0; 16];
        getrandom(&mut bytes, GetRandomFlags::empty())
            .map_err(|e| Error::system("getrandom", "allow getrandom in this sandbox", e))?;
        Ok(Identity(bytes))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for Identity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Identity> {
        let invalid = || Error::invalid("an identity", text, "32 hexadecimal digits");
        if text.len() != 32 || !text.is_ascii() {
            return Err(invalid());
        }
        let mut bytes = [0; 16];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = str::from_utf8(digits).map_err(|_| invalid())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| invalid())?;
        }
        Ok(Identity(bytes))
    }
}

/// Names a history of epochs: 128 random bits, drawn by a broker that starts without anything that a
/// keeper kept. Epochs of two histories cannot be compared. All zero where it is not known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct Lineage(pub [u8; 16]);

impl Lineage {
    /// Draws one.
    ///
    /// # Errors
    ///
    /// As [`Identity::random`].
    pub fn random() -> Result<Lineage> {
        Identity::random().map(|bits| Lineage(bits.0))
    }
}

impl fmt::Display for Lineage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Identity(self.0), f)
    }
}

/// Numbers the objects of a name for people, from 1; 0 is before the first.
///
/// Assigned when an object becomes visible, and never lower than one that the name had before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct Epoch(pub u64);

wrappers!(Identity Epoch Lineage);

impl Epoch {
    /// Returns the one after.
    ///
    /// # Panics
    ///
    /// After 2^64 commits of one name.
    #[must_use]
    pub fn next(self) -> Epoch {
        Epoch(
            self.0
                .checked_add(1)
                .expect("a name was committed 2^64 times"),
        )
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Refuses a text that cannot be a name: of an object or of a part.
///
/// # Errors
///
/// [`Error::Invalid`] for an empty one, one of more than 255 bytes, or one with control characters.
pub fn check_name(what: &'static str, name: &str) -> Result<()> {
    let good = !name.is_empty() && name.len() <= MOST_NAME && !name.chars().any(char::is_control);
    if good {
        return Ok(());
    }
    let shown: String = name
        .chars()
        .take(64)
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    let got = format!("{shown:?} ({} bytes)", name.len());
    Err(Error::invalid(
        what,
        got,
        "1 to 255 bytes of UTF-8 without control characters",
    ))
}

/// Refuses a name for a new object that people could take for another one, or for none: as
/// [`check_name`], and what shows as nothing, breaks a line or turns the text around.
///
/// # Errors
///
/// As [`check_name`], and [`Error::Invalid`] for `.`, `..`, a name that begins or ends with a space,
/// and one with a character that is not seen.
pub fn check_new_name(what: &'static str, name: &str) -> Result<()> {
    check_name(what, name)?;
    let unseen = |c: char| {
        let other_space = c != ' ' && c.is_whitespace();
        other_space
            || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    let is_good = name.trim() == name && name != "." && name != ".." && !name.contains(unseen);
    if is_good {
        return Ok(());
    }
    Err(Error::invalid(
        what,
        format!("{:?}", name.chars().take(64).collect::<String>()),
        "another than `.` and `..`, without a space at either end and without characters that are not seen",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_its_text() {
        let identity = Identity::random().expect("random bits");
        assert_eq!(
            identity
                .to_string()
                .parse::<Identity>()
                .expect("its own text"),
            identity
        );
        assert_ne!(identity, Identity::random().expect("random bits"));
        for bad in [
            "",
            "12",
            "g0000000000000000000000000000000",
            "+0000000000000000000000000000000é",
        ] {
            assert!(bad.parse::<Identity>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_name_that_would_steer_a_terminal_is_refused() {
        check_name("a name", "model/llama-70b").expect("a good name");
        for bad in [String::new(), "a\x1b[2J".into(), "x".repeat(256)] {
            check_name("a name", &bad).expect_err("a bad name");
        }
    }

    #[test]
    fn a_new_name_is_seen_as_it_is() {
        for good in ["model/llama-70b v2", "模型", "..x", "é"] {
            check_new_name("a name", good).expect("a good name");
        }
        for bad in [
            "",
            " ",
            " a",
            "a ",
            ".",
            "..",
            "a\u{200b}",
            "a\u{202e}b",
            "a\u{2028}b",
            "a\u{a0}b",
            "\u{feff}a",
        ] {
            check_new_name("a name", bad).expect_err(bad);
            if !bad.is_empty() {
                check_name("a name", bad).expect("one that is there already is read");
            }
        }
        let error = check_new_name("a name", "a\u{202e}b").expect_err("it turns around");
        assert!(
            error
                .to_string()
                .starts_with("a name is \"a\\u{202e}b\", but must be another"),
            "{error}"
        );
    }
}
