//! Packets: the header that all messages of all versions start with, and the way to put fields in
//! and take them out.
//!
//! Two protocols are made of them: that of sessions ([`message`](crate::wire::message)), and that
//! of brokers.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 2 | the protocol's magic |
//! | 2 | 2 | version |
//! | 4 | 2 | type |
//! | 6 | 2 | file descriptors that come with the packet |
//! | 8 | 8 | request, which the answer repeats; 0 where there is none |

use std::fmt;
use std::ops::RangeInclusive;

/// The most bytes of a packet, in every version of every protocol.
pub const MOST_BYTES: usize = 4096;

const HEADER: usize = 16;

/// The versions that a side speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Versions {
    /// The lowest.
    pub lowest: u16,
    /// The highest.
    pub highest: u16,
}

impl Versions {
    /// Picks the highest version that both sides speak, if there is one.
    pub fn agree(self, theirs: Versions) -> Option<u16> {
        let version = self.highest.min(theirs.highest);
        (version >= self.lowest && version >= theirs.lowest && theirs.lowest <= theirs.highest)
            .then_some(version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.lowest == self.highest {
            write!(f, "{}", self.lowest)
        } else {
            write!(f, "{} to {}", self.lowest, self.highest)
        }
    }
}

/// What a protocol is, beside its tables of messages.
#[derive(PartialEq, Eq, Debug)]
pub struct Protocol {
    /// The first two bytes.
    pub magic: [u8; 2],
    /// The magic as an error says it.
    pub magic_is: &'static str,
    /// The versions that this side speaks.
    pub versions: Versions,
    /// The types of messages that look the same in all versions, so that sides of any two can agree
    /// on one, or name both.
    pub in_all_versions: &'static [u16],
    /// The most bytes of a text; a longer one is cut when it is written, and refused when it is
    /// read.
    pub most_text: usize,
    /// The same as an error says it.
    pub most_text_is: &'static str,
    /// Its own refusals.
    pub refusals: RangeInclusive<u16>,
    /// All that it has, as an error says it.
    pub refusals_are: &'static str,
}

impl Protocol {
    /// Says whether the number of a refusal may come: its own, or one of every protocol.
    pub fn refuses(&self, number: u16) -> bool {
        self.refusals.contains(&number) || matches!(number, 1 | 2 | 4 | 5 | 6 | 10)
    }
}

/// Why bytes are not a packet of a protocol.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} is {got}, but must be {must}")]
pub struct Malformed {
    /// Which field.
    pub what: &'static str,
    /// The value found.
    pub got: u64,
    /// The value required.
    pub must: &'static str,
}

/// Names the field that is wrong.
pub fn malformed(what: &'static str, got: impl TryInto<u64>, must: &'static str) -> Malformed {
    Malformed {
        what,
        got: got.try_into().unwrap_or(u64::MAX),
        must,
    }
}

/// The bytes that every packet starts with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The version.
    pub version: u16,
    /// The message's type.
    pub number: u16,
    /// Descriptors that come with the packet, as the sender says.
    pub fds: u16,
    /// The question that is asked or answered; 0 for none.
    pub request: u64,
}

impl Header {
    /// Reads the header, and returns the rest to be taken apart.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for a packet that is too short or of another protocol.
    pub fn read<'a>(
        protocol: &'static Protocol,
        packet: &'a [u8],
    ) -> Result<(Header, Reader<'a>), Malformed> {
        let mut r = Reader {
            rest: packet,
            protocol,
        };
        let magic = r.array()?;
        if magic != protocol.magic {
            return Err(malformed(
                "the magic",
                u16::from_le_bytes(magic),
                protocol.magic_is,
            ));
        }
        let header = Header {
            version: r.u16()?,
            number: r.u16()?,
            fds: r.u16()?,
            request: r.u64()?,
        };
        Ok((header, r))
    }
}

/// Appends to a packet. The caller writes no more than fits.
#[derive(Debug)]
pub struct Writer<'a> {
    packet: &'a mut [u8; MOST_BYTES],
    len: usize,
    protocol: &'static Protocol,
}

impl Writer<'_> {
    /// Starts a packet with its header.
    ///
    /// # Panics
    ///
    /// For more than 65,535 descriptors; the kernel passes at most 253.
    pub fn start<'a>(
        protocol: &'static Protocol,
        packet: &'a mut [u8; MOST_BYTES],
        version: u16,
        number: u16,
        fds: usize,
        request: u64,
    ) -> Writer<'a> {
        let mut w = Writer {
            packet,
            len: 0,
            protocol,
        };
        w.put(&protocol.magic);
        w.u16(version);
        w.u16(number);
        w.u16(u16::try_from(fds).expect("the kernel passes at most 253 descriptors"));
        w.u64(request);
        debug_assert_eq!(w.len, HEADER);
        w
    }

    /// Ends the packet, and returns its bytes.
    pub fn end(self) -> usize {
        self.len
    }

    /// Appends bytes.
    pub fn put(&mut self, bytes: &[u8]) {
        self.packet[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// Appends two bytes.
    pub fn u16(&mut self, number: u16) {
        self.put(&number.to_le_bytes());
    }

    /// Appends four bytes.
    pub fn u32(&mut self, number: u32) {
        self.put(&number.to_le_bytes());
    }

    /// Appends eight bytes.
    pub fn u64(&mut self, number: u64) {
        self.put(&number.to_le_bytes());
    }

    /// Appends a text as far as it fits. Control characters become `?`: texts end up in errors and
    /// logs.
    pub fn text(&mut self, text: &str) {
        let length_at = self.len;
        self.put(&[0; 2]);
        let start = self.len;
        for c in text.chars().map(|c| if c.is_control() { '?' } else { c }) {
            if self.len + c.len_utf8() > start + self.protocol.most_text {
                break;
            }
            self.put(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
        let len = u16::try_from(self.len - start).expect("a text is shorter than a packet");
        self.packet[length_at..start].copy_from_slice(&len.to_le_bytes());
    }
}

/// Takes from a packet, and refuses to take more than there is.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    protocol: &'static Protocol,
}

impl Reader<'_> {
    /// Returns the packet's protocol.
    pub fn protocol(&self) -> &'static Protocol {
        self.protocol
    }

    /// Takes bytes.
    ///
    /// # Errors
    ///
    /// [`Malformed`] when fewer are left; so do all that follow.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let Some((bytes, rest)) = self.rest.split_first_chunk() else {
            return Err(malformed(
                "the number of bytes left",
                self.rest.len(),
                "what the message needs",
            ));
        };
        self.rest = rest;
        Ok(*bytes)
    }

    /// Takes two bytes.
    ///
    /// # Errors
    ///
    /// As [`array`](Reader::array).
    pub fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Takes four bytes.
    ///
    /// # Errors
    ///
    /// As [`array`](Reader::array).
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Takes eight bytes.
    ///
    /// # Errors
    ///
    /// As [`array`](Reader::array).
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Takes bytes that must be 0.
    ///
    /// # Errors
    ///
    /// As [`array`](Reader::array), and for one that is not 0.
    pub fn zeros<const N: usize>(&mut self) -> Result<(), Malformed> {
        match self.array::<N>()?.into_iter().find(|&byte| byte != 0) {
            None => Ok(()),
            Some(byte) => Err(malformed("the padding", byte, "0")),
        }
    }

    /// Takes a text.
    ///
    /// # Errors
    ///
    /// As [`array`](Reader::array); for one that is too long, is not UTF-8, or has control
    /// characters.
    pub fn text(&mut self) -> Result<String, Malformed> {
        let len = usize::from(self.u16()?);
        if len > self.protocol.most_text {
            return Err(malformed(
                "the text's length",
                len,
                self.protocol.most_text_is,
            ));
        }
        let Some((bytes, rest)) = self.rest.split_at_checked(len) else {
            return Err(malformed(
                "the text's length",
                len,
                "no more than the packet has left",
            ));
        };
        self.rest = rest;
        let text = str::from_utf8(bytes)
            .map_err(|e| malformed("the text's good bytes", e.valid_up_to(), "all"))?;
        // What the other side writes must not steer a terminal.
        if let Some(c) = text.chars().find(|c| c.is_control()) {
            return Err(malformed(
                "a character of the text",
                u32::from(c),
                "no control character",
            ));
        }
        Ok(text.into())
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    ///
    /// [`Malformed`] if something is.
    pub fn end(&self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(malformed(
            "the number of bytes behind the message",
            self.rest.len(),
            "0",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static PROTOCOL: Protocol = Protocol {
        magic: *b"XX",
        magic_is: "22616, the bytes XX",
        versions: Versions {
            lowest: 1,
            highest: 1,
        },
        in_all_versions: &[],
        most_text: 256,
        most_text_is: "at most 256",
        refusals: 1..=63,
        refusals_are: "1 to 63",
    };

    fn reader(rest: &[u8]) -> Reader<'_> {
        Reader {
            rest,
            protocol: &PROTOCOL,
        }
    }

    #[test]
    fn a_header_survives_its_bytes_and_another_protocol_is_refused() {
        let mut packet = [0; MOST_BYTES];
        let len = Writer::start(&PROTOCOL, &mut packet, 1, 2, 3, 4).end();
        let (header, r) = Header::read(&PROTOCOL, &packet[..len]).expect("its own bytes");
        assert_eq!(
            header,
            Header {
                version: 1,
                number: 2,
                fds: 3,
                request: 4
            }
        );
        r.end().expect("nothing is left");
        assert!(Header::read(&PROTOCOL, &packet[..len - 1]).is_err());
        packet[0] = b'Y';
        let error = Header::read(&PROTOCOL, &packet[..len])
            .expect_err("another magic")
            .to_string();
        assert_eq!(error, "the magic is 22617, but must be 22616, the bytes XX");
    }

    #[test]
    fn two_sides_agree_on_the_highest_that_both_speak() {
        let agree = |ours: (u16, u16), theirs: (u16, u16)| {
            let [ours, theirs] =
                [ours, theirs].map(|(lowest, highest)| Versions { lowest, highest });
            ours.agree(theirs)
        };
        assert_eq!(agree((1, 3), (2, 5)), Some(3));
        assert_eq!(agree((1, 3), (1, 1)), Some(1));
        assert_eq!(agree((2, 3), (1, 1)), None);
        assert_eq!(agree((1, 1), (2, 2)), None);
        assert_eq!(agree((1, 3), (3, 2)), None, "a range that is none");
    }

    #[test]
    fn a_text_is_cut_between_characters_and_loses_its_control_characters() {
        let mut packet = [0; MOST_BYTES];
        let mut w = Writer::start(&PROTOCOL, &mut packet, 1, 1, 0, 0);
        w.text(&("a\x1b[2J\n".to_owned() + &"\u{20ac}".repeat(90)));
        let len = w.len;
        let text = reader(&packet[HEADER..len]).text().expect("a good text");
        assert_eq!(text, "a?[2J?".to_owned() + &"\u{20ac}".repeat(83));
    }

    #[test]
    fn a_bad_text_is_refused() {
        for bytes in [
            &b"\x02\0\xff\xff"[..],
            b"\x01\0\n",
            b"\x02\0a",
            b"\x01\x01",
            b"\x01",
        ] {
            assert!(reader(bytes).text().is_err(), "{bytes:?}");
        }
    }
}
