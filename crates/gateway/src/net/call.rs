//! A question to a gateway and its answer, as bytes.
//!
//! A question is JSON. An answer is the length of its JSON as u32, little-endian, the JSON, and
//! what the JSON announces: the object's manifest and the transport's metadata.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use zenoh::Wait;
use zenoh::bytes::ZBytes;
use zenoh::handlers::FifoChannelHandler;
use zenoh::query::Query;

use super::key::Gateway;
use super::seal;
use super::session::Session;
use crate::error::{Error, Result};
use crate::message::{
    Again, Ask, Confirm, Fill, Find, Grant, Has, Home, List, Listed, MANIFEST_PIECE, MOST_ANSWER,
    MOST_BYTES, Manifest, Release, Removed, Renew,
};
use crate::transport::choice::Way;
use crate::transport::{Place, RemoteSpan};

/// The most slots of a ring.
pub const MOST_SLOTS: usize = 64;
/// The most bytes of a ring.
pub const MOST_RING: u64 = 1 << 30;

/// What a gateway is asked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// A lease.
    Ask(Ask),
    /// Is it alive?
    Confirm(Confirm),
    /// It goes on.
    Renew(Renew),
    /// It has ended.
    Release(Release),
    /// Pieces in slots.
    Fill(Fill),
    /// A piece of a long manifest.
    Manifest(Manifest),
    /// Who has this name?
    Find(Find),
    /// A page of all objects.
    List(List),
    /// Which gateways are there?
    Gateways,
    /// Up to which epochs were these names removed, whose home this is?
    Removed(Removed),
}

/// What a gateway answers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// A lease. The manifest, or its first piece, and metadata come behind.
    Granted(Box<Granted>),
    /// A piece of a manifest, of so many bytes, which come behind.
    Manifest(usize),
    /// No.
    Declined {
        /// Why.
        why: String,
        /// Whether it may be yes at another moment.
        again: Again,
    },
    /// The object is being registered, or digested: ask the same again.
    Registering,
    /// Yes or no.
    Is(bool),
    /// The lease is alive, and its object has other bytes.
    Differs,
    /// What this host has of a name, the newest first; nothing if it has nothing.
    Found(Vec<Has>),
    /// A page of its objects, and whether more follow.
    Listed(Vec<Listed>, bool),
    /// The gateways that it has heard of, itself among them.
    Gateways(Vec<Gateway>),
    /// Names and the epoch that each was removed up to.
    Removed(Vec<(String, u64)>),
}

/// A lease and how to read its object.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Granted {
    /// The lease.
    pub grant: Grant,
    /// Where the object was committed first.
    pub home: Home,
    /// How the bytes are carried.
    pub transport: String,
    /// Address, bytes and device of each region; no device for host memory.
    pub regions: Vec<(u64, u64, Option<u32>)>,
    /// Whether the regions can be read directly.
    pub direct: bool,
    /// Rings that this lease has.
    pub rings: Vec<Lent>,
    /// Bytes of the manifest.
    pub manifest: usize,
}

/// A ring that a lease has.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Lent {
    /// Which way it serves.
    pub way: Way,
    /// The address of each slot.
    pub slots: Vec<u64>,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// The slots' device; none for host memory.
    pub device: Option<u32>,
    /// The first bytes of the object that lie in the slots, one slot after the other.
    pub filled: u64,
}

impl Lent {
    /// Lists the slots.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] for more or larger slots than a ring has.
    pub fn spans(&self) -> Result<Vec<RemoteSpan>> {
        let most = self.slot_bytes.saturating_mul(self.slots.len() as u64);
        if most == 0 || most > MOST_RING || self.slots.len() > MOST_SLOTS || self.filled > most {
            return Err(Error::Malformed {
                what: "a ring",
                got: format!(
                    "{} slots of {} bytes, {} filled",
                    self.slots.len(),
                    self.slot_bytes,
                    self.filled
                ),
                must: "1 to 64 slots, of at most 1 GiB in all",
            });
        }
        let (bytes, place) = (
            self.slot_bytes,
            self.device.map_or(Place::Host, Place::Device),
        );
        Ok(self
            .slots
            .iter()
            .map(|&address| RemoteSpan {
                address,
                bytes,
                place,
            })
            .collect())
    }
}

impl Granted {
    /// Lists the regions.
    pub fn spans(&self) -> impl Iterator<Item = RemoteSpan> + '_ {
        self.regions.iter().map(|&(address, bytes, device)| {
            let place = device.map_or(Place::Host, Place::Device);
            RemoteSpan {
                address,
                bytes,
                place,
            }
        })
    }
}

/// An answer with what came behind it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answered {
    /// The answer.
    pub answer: Answer,
    /// Manifest or its first piece, then metadata.
    pub attached: Vec<u8>,
}

impl Answered {
    /// Makes one that has nothing behind it.
    pub fn plain(answer: Answer) -> Answered {
        Answered {
            answer,
            attached: Vec::new(),
        }
    }

    /// Writes it.
    pub fn encode(&self) -> Vec<u8> {
        let json = serde_json::to_vec(&self.answer).expect("texts, numbers and lists have a JSON");
        let mut out = (json.len() as u32).to_le_bytes().to_vec();
        out.extend_from_slice(&json);
        out.extend_from_slice(&self.attached);
        out
    }

    /// Reads it.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] for anything that [`encode`](Answered::encode) does not write.
    pub fn decode(bytes: &[u8]) -> Result<Answered> {
        let malformed = |got: String| Error::Malformed {
            what: "an answer",
            got,
            must: "JSON and what it announces",
        };
        let short = || malformed(format!("{} bytes", bytes.len()));
        if bytes.len() > MOST_ANSWER {
            return Err(short());
        }
        let (len, rest) = bytes.split_first_chunk::<4>().ok_or_else(short)?;
        let (json, attached) = rest
            .split_at_checked(u32::from_le_bytes(*len) as usize)
            .ok_or_else(short)?;
        let answer = serde_json::from_slice(json).map_err(|e| malformed(e.to_string()))?;
        let announced = match &answer {
            Answer::Granted(granted) => granted.manifest.min(MANIFEST_PIECE),
            Answer::Manifest(bytes) => *bytes,
            _ => 0,
        };
        if announced > attached.len() {
            return Err(short());
        }
        Ok(Answered {
            answer,
            attached: attached.to_vec(),
        })
    }
}

/// Reads a question, of at most 4,096 bytes.
///
/// # Errors
///
/// [`Error::Malformed`] for what is none.
pub fn read_question(bytes: &[u8]) -> Result<Question> {
    let malformed = |got| Error::Malformed {
        what: "a question",
        got,
        must: "JSON of at most 4,096 bytes",
    };
    if bytes.len() > MOST_BYTES {
        return Err(malformed(format!("{} bytes", bytes.len())));
    }
    serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))
}

/// A question that was asked.
pub struct Asked {
    replies: FifoChannelHandler<zenoh::query::Reply>,
    session: Session,
    gateway: Gateway,
    number: [u8; 16],
    question: Vec<u8>,
}

impl std::fmt::Debug for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asked")
            .field("gateway", &self.gateway)
            .finish_non_exhaustive()
    }
}

/// Whether an answer has come.
#[derive(Debug)]
pub enum Heard {
    /// It has.
    Answer(Answered),
    /// It may come yet.
    NotYet,
    /// It will not come.
    Nothing,
}

/// Asks a gateway.
///
/// # Errors
///
/// [`Error::Unavailable`] when the session has ended.
pub fn ask(
    session: &Session,
    gateway: &Gateway,
    question: &Question,
    patience: Duration,
) -> Result<Asked> {
    let question = serde_json::to_vec(question).expect("texts, numbers and lists have a JSON");
    let number = seal::Asked::number()?;
    let query = session
        .get(format!("{}/ask", gateway.key()))
        .payload(&question[..])
        .attachment(&number[..])
        .timeout(patience);
    let replies = query.wait().map_err(|e| Error::Unavailable {
        what: format!("the gateway of {}", gateway.host),
        why: e.to_string(),
        remedy: "see that it runs, and that `--peer` leads to it",
    })?;
    Ok(Asked {
        replies,
        session: session.clone(),
        gateway: gateway.clone(),
        number,
        question,
    })
}

/// Answers a question; in a session with certificates the answer is signed.
pub fn reply(session: &Session, query: &Query, answered: &Answered) {
    let answer = answered.encode();
    let key = query.key_expr().clone();
    let bytes = |of: Option<&ZBytes>| of.map(|bytes| bytes.to_bytes().into_owned());
    let sealed = session.seal().map(|seal| {
        let number = bytes(query.attachment()).and_then(|bytes| bytes.try_into().ok());
        let asked = seal::Asked {
            number: number.ok_or("the question has no number")?,
            key: key.as_str(),
            question: &bytes(query.payload()).unwrap_or_default(),
        };
        seal.sign(&asked, &answer)
    });
    let sent = match sealed.transpose() {
        Ok(sealed) => {
            let reply = query.reply(key.clone(), answer).attachment(sealed);
            reply.wait().map_err(|error| error.to_string())
        }
        Err(why) => Err(why),
    };
    if let Err(error) = sent {
        tracing::warn!(%error, "an answer could not be sent");
    }
}

impl Asked {
    /// Looks for the answer, without waiting.
    pub fn hear(&self) -> Heard {
        match self.replies.try_recv() {
            Ok(Some(reply)) => self.read(&reply),
            Ok(None) => Heard::NotYet,
            Err(_) => Heard::Nothing,
        }
    }

    /// Waits for the answer; the question's patience ends it.
    pub fn wait(&self) -> Option<Answered> {
        loop {
            match self.read(&self.replies.recv().ok()?) {
                Heard::Answer(answer) => return Some(answer),
                Heard::NotYet | Heard::Nothing => {}
            }
        }
    }

    fn read(&self, reply: &zenoh::query::Reply) -> Heard {
        let Ok(sample) = reply.result() else {
            return Heard::NotYet;
        };
        let answer = sample.payload().to_bytes();
        if let Some(seal) = self.session.seal() {
            let asked = seal::Asked {
                number: self.number,
                key: &format!("{}/ask", self.gateway.key()),
                question: &self.question,
            };
            let sealed = sample.attachment().map(ZBytes::to_bytes);
            if let Err(why) =
                seal.check(&self.gateway, &asked, &answer, &sealed.unwrap_or_default())
            {
                let host = &self.gateway.host;
                let why = format!("what answers for host {host} is not believed: {why}");
                tracing::warn!("{why}");
                let again = Again::Never;
                return Heard::Answer(Answered::plain(Answer::Declined { why, again }));
            }
        }
        match Answered::decode(&answer) {
            Ok(answered) => Heard::Answer(answered),
            Err(error) => {
                tracing::warn!(%error, "an answer was thrown away");
                Heard::NotYet
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Incarnation, LeaseId, LeaseNumber};
    use proptest::prelude::*;

    #[test]
    fn a_question_and_an_answer_survive_their_bytes() {
        let lease = LeaseId {
            incarnation: Incarnation([3; 16]),
            lease: LeaseNumber([0xff; 16]),
            asker: Incarnation([5; 16]),
        };
        let question = Question::Confirm(Confirm {
            lease,
            identity: [4; 16],
            number: 5,
            digest: None,
        });
        let bytes = serde_json::to_vec(&question).expect("a JSON");
        assert_eq!(read_question(&bytes).expect("its own bytes"), question);
        let grant = Grant {
            lease,
            identity: [4; 16],
            epoch: 6,
            lives_ms: 7,
        };
        let (home, transport) = (Home::read("a"), "tcp".to_owned());
        let regions = vec![(u64::MAX, 9, None), (1, 2, Some(3))];
        let rings = vec![Lent {
            way: Way::PinnedRing,
            slots: vec![1, u64::MAX],
            slot_bytes: 8,
            device: None,
            filled: 9,
        }];
        let granted = Granted {
            grant,
            home,
            transport,
            regions,
            direct: true,
            rings,
            manifest: 2,
        };
        let answered = Answered {
            answer: Answer::Granted(Box::new(granted)),
            attached: vec![1, 2, 3],
        };
        let bytes = answered.encode();
        assert_eq!(Answered::decode(&bytes).expect("its own bytes"), answered);
        assert!(
            Answered::decode(&bytes[..bytes.len() - 2]).is_err(),
            "less than it announces"
        );
        assert!(read_question(&vec![b' '; 4_097]).is_err());
    }

    #[test]
    fn a_ring_of_no_slots_and_one_that_is_too_large_are_refused() {
        let lent = |slots: usize, slot_bytes, filled| {
            Lent {
                way: Way::DeviceRing,
                slots: vec![7; slots],
                slot_bytes,
                device: Some(1),
                filled,
            }
            .spans()
        };
        assert_eq!(lent(2, 8, 16).expect("a ring").len(), 2);
        for (slots, bytes, filled) in [
            (0, 8, 0),
            (2, 0, 0),
            (65, 8, 0),
            (2, 8, 17),
            (2, 1 << 30, 0),
            (2, u64::MAX, 0),
        ] {
            lent(slots, bytes, filled).expect_err("no ring");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Answered::decode(&bytes), read_question(&bytes));
        }
    }
}
