//! The fields of messages. Each type writes and reads its own bytes, so that a message is written
//! down once: as its fields, in the order of their bytes.

use gpu_api::{
    Access, BackendKind, DevicePtr, DeviceUuid, MemHandle, ParticipantId, RegionId, Spot,
};

use super::refusal::RefusalCode;
use crate::shared::slot::Generation;
use crate::wire::descriptor::{BYTES, Descriptor, SessionId};
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::{Malformed, Reader, Writer, malformed};

/// What messages are made of.
pub(super) trait Field: Sized {
    /// Appends it.
    fn write(&self, w: &mut Writer<'_>);

    /// Takes it.
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed>;
}

macro_rules! numbers {
    ($($number:ident)*) => {$(
        impl Field for $number {
            fn write(&self, w: &mut Writer<'_>) {
                w.$number(*self);
            }

            fn read(r: &mut Reader<'_>) -> Result<$number, Malformed> {
                r.$number()
            }
        }
    )*};
}
numbers!(u16 u32 u64);

macro_rules! wrappers {
    ($($wrapper:ident)*) => {$(
        impl Field for $wrapper {
            fn write(&self, w: &mut Writer<'_>) {
                self.0.write(w);
            }

            fn read(r: &mut Reader<'_>) -> Result<$wrapper, Malformed> {
                Field::read(r).map($wrapper)
            }
        }
    )*};
}
wrappers!(DevicePtr DeviceUuid MemHandle ParticipantId RegionId SessionId);

macro_rules! kinds {
    ($($kind:ident, $what:literal, $must:literal;)*) => {$(
        impl Field for $kind {
            fn write(&self, w: &mut Writer<'_>) {
                w.put(&[*self as u8]);
            }

            fn read(r: &mut Reader<'_>) -> Result<$kind, Malformed> {
                let [byte] = r.array()?;
                $kind::from_byte(byte).ok_or_else(|| malformed($what, byte, $must))
            }
        }
    )*};
}
kinds! {
    BackendKind, "the backend", "1, 2 or 3";
    Access, "the access", "0 or 1";
}

/// Makes a field of a struct: its fields in this order, each with the number of zeros that follow
/// it.
macro_rules! record {
    ($name:ident { $($field:ident $([$zeros:literal])?),* }) => {
        impl Field for $name {
            fn write(&self, w: &mut Writer<'_>) {
                $(
                    self.$field.write(w);
                    $(w.put(&[0; $zeros]);)?
                )*
            }

            fn read(r: &mut Reader<'_>) -> Result<$name, Malformed> {
                $(
                    let $field = Field::read(r)?;
                    $(r.zeros::<$zeros>()?;)?
                )*
                Ok($name { $($field),* })
            }
        }
    };
}
pub(super) use record;

record!(LeaseAddress {
    file,
    slot,
    generation
});
record!(Spot {
    range,
    range_len,
    offset,
    behind
});

impl<const N: usize> Field for [u8; N] {
    fn write(&self, w: &mut Writer<'_>) {
        w.put(self);
    }

    fn read(r: &mut Reader<'_>) -> Result<[u8; N], Malformed> {
        r.array()
    }
}

impl<T: Field> Field for Box<T> {
    fn write(&self, w: &mut Writer<'_>) {
        T::write(self, w);
    }

    fn read(r: &mut Reader<'_>) -> Result<Box<T>, Malformed> {
        T::read(r).map(Box::new)
    }
}

impl Field for String {
    fn write(&self, w: &mut Writer<'_>) {
        w.text(self);
    }

    fn read(r: &mut Reader<'_>) -> Result<String, Malformed> {
        r.text()
    }
}

impl Field for Generation {
    fn write(&self, w: &mut Writer<'_>) {
        w.u64(self.get());
    }

    fn read(r: &mut Reader<'_>) -> Result<Generation, Malformed> {
        let number = r.u64()?;
        Generation::new(number).ok_or_else(|| malformed("the generation", number, "below 2^61"))
    }
}

impl Field for RefusalCode {
    fn write(&self, w: &mut Writer<'_>) {
        w.u16(*self as u16);
    }

    fn read(r: &mut Reader<'_>) -> Result<RefusalCode, Malformed> {
        let number = r.u16()?;
        RefusalCode::from_number(number)
            .ok_or_else(|| malformed("the refusal's code", number, "1 to 13, but 3 and 9"))
    }
}

impl Field for Descriptor {
    fn write(&self, w: &mut Writer<'_>) {
        w.put(self.as_bytes());
    }

    fn read(r: &mut Reader<'_>) -> Result<Descriptor, Malformed> {
        let bytes: [u8; BYTES] = r.array()?;
        Descriptor::decode(&bytes).map_err(|_| {
            malformed(
                "the first byte of the descriptor",
                bytes[0],
                "that of a good descriptor",
            )
        })
    }
}

/// Makes the messages of one direction: a type's number and name, `(request)` if it asks or
/// answers, and its fields in the order of their bytes, each with the number of zeros that follow
/// it. The type has `fds` and `check` besides.
macro_rules! messages {
    (
        $(#[$about:meta])*
        pub enum $messages:ident, $must:literal {
            $(
                $(#[$doc:meta])*
                $number:literal $name:ident $(($request:ident))? {
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
            /// Writes the message down and returns its length.
            pub fn encode(&self, packet: &mut [u8; MOST_BYTES]) -> usize {
                let (number, request) = match self {
                    $($messages::$name { $($request,)? .. } => ($number, 0 $(+ *$request)?),)*
                };
                let mut w = packet::start(packet, number, self.fds(), request);
                match self {
                    $($messages::$name { $($field,)* .. } => {
                        $(
                            $field.write(&mut w);
                            $(w.put(&[0; $zeros]);)?
                        )*
                    })*
                }
                w.end()
            }

            /// Reads a message that came with `fds` file descriptors.
            pub fn decode(packet: &[u8], fds: usize) -> Result<$messages, DecodeError> {
                let (header, mut r) = packet::read(packet)?;
                let (message, requests): ($messages, &[u64]) = match header.number {
                    $($number => {
                        $(
                            let $field = <$type as Field>::read(&mut r)?;
                            $(r.zeros::<$zeros>()?;)?
                        )*
                        $(let $request = header.request;)?
                        ($messages::$name { $($request,)? $($field,)* }, &[$($request)?])
                    })*
                    number => return Err(packet::malformed("the type", number, $must)),
                };
                message.check()?;
                packet::check(&header, &r, message.fds(), fds, !requests.is_empty())?;
                Ok(message)
            }
        }
    };
}
pub(super) use messages;
