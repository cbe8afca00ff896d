//! The fields of messages. Each type writes and reads its own bytes, so that a message is written
//! down once: as its fields, in the order of their bytes.

use arrayvec::ArrayVec;

use super::packet::{Malformed, Reader, Writer, malformed};
use crate::shared::slot::Generation;

/// A part of a message.
pub trait Field: Sized {
    /// Appends it.
    fn write(&self, w: &mut Writer<'_>);

    /// Takes it.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for bytes that [`write`](Field::write) does not append.
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

/// Makes fields of structs with one unnamed field.
#[macro_export]
macro_rules! wrappers {
    ($($wrapper:ident)*) => {$(
        impl $crate::wire::field::Field for $wrapper {
            fn write(&self, w: &mut $crate::wire::packet::Writer<'_>) {
                $crate::wire::field::Field::write(&self.0, w);
            }

            fn read(
                r: &mut $crate::wire::packet::Reader<'_>,
            ) -> Result<$wrapper, $crate::wire::packet::Malformed> {
                $crate::wire::field::Field::read(r).map($wrapper)
            }
        }
    )*};
}

/// Makes a field of a struct: its fields in this order, each with the number of zeros that follow
/// it.
#[macro_export]
macro_rules! record {
    ($name:ident { $($field:ident $([$zeros:literal])?),* $(,)? }) => {
        impl $crate::wire::field::Field for $name {
            fn write(&self, w: &mut $crate::wire::packet::Writer<'_>) {
                $(
                    $crate::wire::field::Field::write(&self.$field, w);
                    $(w.put(&[0; $zeros]);)?
                )*
            }

            fn read(
                r: &mut $crate::wire::packet::Reader<'_>,
            ) -> Result<$name, $crate::wire::packet::Malformed> {
                $(
                    let $field = $crate::wire::field::Field::read(r)?;
                    $(r.zeros::<$zeros>()?;)?
                )*
                Ok($name { $($field),* })
            }
        }
    };
}

impl Field for bool {
    fn write(&self, w: &mut Writer<'_>) {
        w.put(&[u8::from(*self)]);
    }

    fn read(r: &mut Reader<'_>) -> Result<bool, Malformed> {
        match r.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [byte] => Err(malformed("a flag", byte, "0 or 1")),
        }
    }
}

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

/// A list: its length, four zeros, then each.
impl<T: Field, const N: usize> Field for ArrayVec<T, N> {
    fn write(&self, w: &mut Writer<'_>) {
        w.u32(self.len() as u32);
        w.put(&[0; 4]);
        self.iter().for_each(|entry| entry.write(w));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let count = r.u32()?;
        r.zeros::<4>()?;
        if count as usize > N {
            return Err(malformed(
                "the length of a list",
                count,
                "what a message takes",
            ));
        }
        (0..count).map(|_| T::read(r)).collect()
    }
}
