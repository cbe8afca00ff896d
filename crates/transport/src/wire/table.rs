//! The messages of a protocol, written down once: as a table of numbers, names and fields.
//!
//! [`messages!`](crate::messages) makes of a table the type of one direction's messages, with
//! `encode` and `decode`. Every byte string that decodes has exactly one meaning, and every meaning
//! one byte string in each version.

use gpu_api::Error;

use super::packet::{Header, MOST_BYTES, Malformed, Protocol, Reader, Versions, Writer, malformed};
use super::refusal::RefusalCode;

/// The messages of one direction. Implemented by [`messages!`](crate::messages).
pub trait Message: Sized {
    /// What they are messages of.
    const PROTOCOL: &'static Protocol;

    /// Returns the type's number.
    fn number(&self) -> u16;

    /// Returns the number of the question that is asked or answered; 0 for none.
    fn request(&self) -> u64;

    /// Returns how many file descriptors go with the message.
    fn fds(&self) -> usize;

    /// Appends the fields.
    fn write(&self, w: &mut Writer<'_>);

    /// Takes the fields of the type that the header names.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for a type that there is not, and for bytes that are not its fields.
    fn read(header: &Header, r: &mut Reader<'_>) -> Result<Self, Malformed>;
}

/// Why bytes are not a message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// A message of another version; nothing but its header can be read.
    #[error("the other side speaks protocol version {theirs}, this side {ours}")]
    Version {
        /// The sender's version.
        theirs: u16,
        /// This side's.
        ours: Versions,
    },
    /// No message of this protocol.
    #[error("not a control message: {0}")]
    Malformed(#[from] Malformed),
}

impl From<DecodeError> for Error {
    fn from(e: DecodeError) -> Error {
        match e {
            DecodeError::Version { theirs, ours } => Error::mismatch(
                "protocol version",
                theirs,
                ours,
                RefusalCode::Version.remedy(),
            ),
            DecodeError::Malformed(Malformed { what, got, must }) => {
                Error::mismatch(what, got, must, RefusalCode::Protocol.remedy())
            }
        }
    }
}

/// Writes a message down in a version and returns its length.
pub fn encode<M: Message>(message: &M, packet: &mut [u8; MOST_BYTES], version: u16) -> usize {
    let mut w = Writer::start(
        M::PROTOCOL,
        packet,
        version,
        message.number(),
        message.fds(),
        message.request(),
    );
    message.write(&mut w);
    w.end()
}

/// Reads a message that came with `fds` file descriptors, and its version.
///
/// # Errors
///
/// [`DecodeError`] for anything that [`encode`] does not write.
pub fn decode<M: Message>(packet: &[u8], fds: usize) -> Result<(M, u16), DecodeError> {
    let (header, mut r) = Header::read(M::PROTOCOL, packet)?;
    let ours = M::PROTOCOL.versions;
    if !M::PROTOCOL.in_all_versions.contains(&header.number)
        && !(ours.lowest..=ours.highest).contains(&header.version)
    {
        return Err(DecodeError::Version {
            theirs: header.version,
            ours,
        });
    }
    let message = M::read(&header, &mut r)?;
    r.end()?;
    let must = |what, got: u64, is: u64, must| {
        if got == is {
            Ok(())
        } else {
            Err(malformed(what, got, must))
        }
    };
    must(
        "the number of file descriptors in the header",
        header.fds.into(),
        message.fds() as u64,
        "what the message needs",
    )?;
    must(
        "the number of file descriptors that came",
        fds as u64,
        header.fds.into(),
        "what the header says",
    )?;
    must(
        "the request",
        header.request,
        message.request(),
        "0 in a message that has none",
    )?;
    Ok((message, header.version))
}

/// Makes the messages of one direction: a type's number and name, `(request)` if it asks or
/// answers, `[count]` if descriptors come with it, and its fields in the order of their bytes, each
/// with the number of zeros that follow it. The type has `check` besides, which refuses fields that
/// contradict each other.
#[macro_export]
macro_rules! messages {
    (
        $(#[$about:meta])*
        pub enum $messages:ident of $protocol:path, $must:literal {
            $(
                $(#[$doc:meta])*
                $number:literal $name:ident $(($request:ident))? $([$fds:expr])? {
                    $($(#[$field_doc:meta])* $field:ident: $type:ty $([$zeros:literal])?),* $(,)?
                }
            )*
        }
    ) => {
        $(#[$about])*
        pub enum $messages {
            $(
                $(#[$doc])*
                $name {
                    $(
                        /// The question's number, which the answer repeats.
                        $request: u64,
                    )?
                    $($(#[$field_doc])* $field: $type,)*
                },
            )*
        }

        impl $messages {
            /// Counts the file descriptors that come with it.
            #[allow(unused_variables, reason = "few counts follow from the fields")]
            pub fn fds(&self) -> usize {
                match self {
                    $($messages::$name { $($field,)* .. } => 0 $(+ $fds)?,)*
                }
            }

            /// Writes the message down in the highest version and returns its length.
            pub fn encode(&self, packet: &mut [u8; $crate::wire::packet::MOST_BYTES]) -> usize {
                $crate::wire::table::encode(self, packet, $protocol.versions.highest)
            }

            /// Reads a message that came with `fds` file descriptors.
            ///
            /// # Errors
            ///
            /// [`DecodeError`]($crate::wire::table::DecodeError) for anything that `encode` does
            /// not write.
            pub fn decode(
                packet: &[u8],
                fds: usize,
            ) -> Result<$messages, $crate::wire::table::DecodeError> {
                $crate::wire::table::decode(packet, fds).map(|(message, _version)| message)
            }
        }

        impl $crate::wire::table::Message for $messages {
            const PROTOCOL: &'static $crate::wire::packet::Protocol = &$protocol;

            fn number(&self) -> u16 {
                match self {
                    $($messages::$name { .. } => $number,)*
                }
            }

            fn request(&self) -> u64 {
                match self {
                    $($messages::$name { $($request,)? .. } => 0 $(+ *$request)?,)*
                }
            }

            fn fds(&self) -> usize {
                $messages::fds(self)
            }

            fn write(&self, w: &mut $crate::wire::packet::Writer<'_>) {
                match self {
                    $($messages::$name { $($field,)* .. } => {
                        $(
                            $crate::wire::field::Field::write($field, w);
                            $(w.put(&[0; $zeros]);)?
                        )*
                    })*
                }
            }

            fn read(
                header: &$crate::wire::packet::Header,
                r: &mut $crate::wire::packet::Reader<'_>,
            ) -> Result<$messages, $crate::wire::packet::Malformed> {
                let message = match header.number {
                    $($number => {
                        $(
                            let $field = <$type as $crate::wire::field::Field>::read(r)?;
                            $(r.zeros::<$zeros>()?;)?
                        )*
                        $(let $request = header.request;)?
                        $messages::$name { $($request,)? $($field,)* }
                    })*
                    number => {
                        return Err($crate::wire::packet::malformed("the type", number, $must));
                    }
                };
                message.check()?;
                Ok(message)
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_errors_name_both_sides() {
        let ours = Versions {
            lowest: 1,
            highest: 1,
        };
        let version = DecodeError::Version { theirs: 7, ours };
        assert_eq!(
            version.to_string(),
            "the other side speaks protocol version 7, this side 1"
        );
        assert_eq!(
            Error::from(version).to_string(),
            "protocol version differs: 7 there, 1 here; build both sides from one version of gpu-ipc"
        );
        let magic = DecodeError::from(malformed("the magic", 22616u16, "18759, the bytes GI"));
        assert_eq!(
            magic.to_string(),
            "not a control message: the magic is 22616, but must be 18759, the bytes GI"
        );
        assert_eq!(
            Error::from(magic).to_string(),
            "the magic differs: 22616 there, 18759, the bytes GI here; connect to a session or a broker of gpu-ipc, from gpu-ipc"
        );
    }
}
