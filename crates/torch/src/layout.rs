//! What of a storage a tensor is: its type, shape and strides.

use gpu_api::{Error, Result};

/// The most dimensions that PyTorch gives a tensor that is still indexable everywhere.
pub const MAX_DIMENSIONS: usize = 64;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal, $bytes:literal;)*) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Dtype { $($(#[$doc])* $variant = $code,)* }

        impl Dtype {
            /// Every type.
            pub const ALL: &[Dtype] = &[$(Dtype::$variant),*];

            /// Reads the byte that messages carry.
            pub const fn from_byte(byte: u8) -> Option<Dtype> {
                match byte { $($code => Some(Dtype::$variant),)* _ => None }
            }

            /// Returns its name in PyTorch, without `torch.`.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)* }
            }

            /// Returns the bytes of an element.
            pub const fn bytes(self) -> u64 {
                match self { $(Dtype::$variant => $bytes,)* }
            }
        }
    };
}

dtypes! {
    /// `torch.uint8`
    U8 = 1, "uint8", 1;
    /// `torch.int8`
    I8 = 2, "int8", 1;
    /// `torch.int16`
    I16 = 3, "int16", 2;
    /// `torch.int32`
    I32 = 4, "int32", 4;
    /// `torch.int64`
    I64 = 5, "int64", 8;
    /// `torch.float16`
    F16 = 6, "float16", 2;
    /// `torch.bfloat16`
    Bf16 = 7, "bfloat16", 2;
    /// `torch.float32`
    F32 = 8, "float32", 4;
    /// `torch.float64`
    F64 = 9, "float64", 8;
    /// `torch.bool`
    Bool = 10, "bool", 1;
    /// `torch.complex64`
    C64 = 11, "complex64", 8;
    /// `torch.complex128`
    C128 = 12, "complex128", 16;
}

/// A tensor's view of its storage. Offset and strides count elements, as PyTorch's do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// The type of an element.
    pub dtype: Dtype,
    /// Elements before the first.
    pub offset: u64,
    /// Elements in each dimension.
    pub shape: Vec<u64>,
    /// Elements between neighbours in each dimension; 0 where all are one.
    pub strides: Vec<u64>,
}

impl Layout {
    /// Describes a tensor whose elements lie side by side from the storage's first.
    ///
    /// # Examples
    ///
    /// ```
    /// use gpu_ipc_torch::{Dtype, Layout};
    ///
    /// let layout = Layout::contiguous(Dtype::F32, &[2, 3, 4]);
    /// assert_eq!(layout.strides, [12, 4, 1]);
    /// assert!(layout.check(96).is_ok() && layout.check(95).is_err());
    /// ```
    pub fn contiguous(dtype: Dtype, shape: &[u64]) -> Layout {
        let mut strides = vec![1; shape.len()];
        for at in (1..shape.len()).rev() {
            strides[at - 1] = u64::saturating_mul(strides[at], shape[at].max(1));
        }
        Layout {
            dtype,
            offset: 0,
            shape: shape.to_vec(),
            strides,
        }
    }

    /// Counts the elements; `None` when 64 bits do not hold the number.
    pub fn elements(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape
            .iter()
            .try_fold(1u64, |all, &extent| all.checked_mul(extent))
    }

    /// Returns the bytes up to the end of the last element; `None` when 64 bits do not hold the
    /// number.
    pub fn end(&self) -> Option<u64> {
        let mut last = self.offset;
        if self.elements()? == 0 {
            return last.checked_mul(self.dtype.bytes());
        }
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add((extent - 1).checked_mul(stride)?)?;
        }
        last.checked_add(1)?.checked_mul(self.dtype.bytes())
    }

    /// Checks that every element lies inside a storage of this many bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when one does not, or shape and strides do not fit each other.
    pub fn check(&self, storage_bytes: u64) -> Result<()> {
        let what = "a tensor's layout";
        if self.shape.len() != self.strides.len() || self.shape.len() > MAX_DIMENSIONS {
            let got = format!(
                "{} extents and {} strides",
                self.shape.len(),
                self.strides.len()
            );
            return Err(Error::invalid(
                what,
                got,
                "as many of one as of the other, 64 at most",
            ));
        }
        match self.end() {
            Some(end) if end <= storage_bytes => Ok(()),
            // Nothing is read through a tensor of no elements, wherever it says to begin.
            _ if self.elements() == Some(0) => Ok(()),
            end => {
                let end = end.map_or("beyond 64 bits".into(), |end| end.to_string());
                let got = format!("up to byte {end} of a storage of {storage_bytes}");
                Err(Error::invalid(what, got, "inside its storage"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_type_survives_its_byte_and_no_other_byte_names_one() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_byte(dtype as u8), Some(dtype));
        }
        assert_eq!(
            (0..=u8::MAX).filter_map(Dtype::from_byte).count(),
            Dtype::ALL.len()
        );
    }

    #[test]
    fn views_end_where_their_last_element_does() {
        // x[:, 1] of 3 by 4 floats.
        let column = Layout {
            dtype: Dtype::F32,
            offset: 1,
            shape: vec![3],
            strides: vec![4],
        };
        assert_eq!(column.end(), Some(40));
        let scalar = Layout {
            dtype: Dtype::F64,
            offset: 2,
            shape: vec![],
            strides: vec![],
        };
        assert_eq!((scalar.elements(), scalar.end()), (Some(1), Some(24)));
        let expanded = Layout {
            dtype: Dtype::U8,
            offset: 0,
            shape: vec![1 << 40],
            strides: vec![0],
        };
        assert_eq!(expanded.end(), Some(1));
        let nothing = Layout {
            dtype: Dtype::U8,
            offset: 5,
            shape: vec![0, 7],
            strides: vec![7, 1],
        };
        assert!(nothing.check(0).is_ok());
    }

    proptest! {
        #[test]
        fn the_end_is_that_of_the_farthest_element(
            offset in 0..50u64,
            dims in proptest::collection::vec((1..5u64, 0..20u64), 0..4),
            dtype in 0..Dtype::ALL.len(),
        ) {
            let (shape, strides): (Vec<u64>, Vec<u64>) = dims.iter().copied().unzip();
            let layout = Layout { dtype: Dtype::ALL[dtype], offset, shape: shape.clone(), strides: strides.clone() };
            // By going through all elements, as nobody would.
            let mut farthest = 0;
            for mut index in 0..layout.elements().expect("few") {
                let mut at = offset;
                for (extent, stride) in shape.iter().zip(&strides).rev() {
                    at += index % extent * stride;
                    index /= extent;
                }
                farthest = farthest.max(at);
            }
            let end = (farthest + 1) * layout.dtype.bytes();
            prop_assert_eq!(layout.end(), Some(end));
            prop_assert!(layout.check(end).is_ok() && layout.check(end - 1).is_err());
        }

        #[test]
        fn no_numbers_overflow(
            offset: u64,
            dims in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..70),
            bytes: u64,
        ) {
            let (shape, strides) = dims.into_iter().unzip();
            let _ = Layout { dtype: Dtype::C128, offset, shape, strides }.check(bytes);
        }
    }
}
