//! One part of an object: a named tensor, and where it lies.

use gpu_api::{Error, Result};

use crate::object::identity::check_name;

/// The most dimensions of a part.
pub const MOST_RANK: usize = 32;

/// An element's type, by the numbers of DLPack 1.1: code, bits, lanes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DType {
    /// DLPack's type code: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool, 7 to 17
    /// small floats.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// Lanes of one element.
    pub lanes: u16,
}

impl DType {
    /// Bytes that have no other type.
    pub const BYTES: DType = DType {
        code: 1,
        bits: 8,
        lanes: 1,
    };
    /// 32-bit floats.
    pub const F32: DType = DType {
        code: 2,
        bits: 32,
        lanes: 1,
    };

    /// Returns the bytes of this many elements, rounded up to whole bytes; `None` beyond 64 bits.
    pub fn bytes_of(self, elements: u64) -> Option<u64> {
        let bits = u128::from(elements) * u128::from(self.bits) * u128::from(self.lanes);
        u64::try_from(bits.div_ceil(8)).ok()
    }

    fn is_known(self) -> bool {
        self.code <= 17 && self.bits > 0 && self.lanes > 0
    }
}

/// One dimension of a part.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Dimension {
    /// Elements along it.
    pub extent: u64,
    /// Elements from one to the next.
    pub stride: u64,
}

/// A part as its writer asks for it: before it has a place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartSpec {
    /// Its name, unique in its object.
    pub name: String,
    /// Its elements' type.
    pub dtype: DType,
    /// Its dimensions; none for a scalar.
    pub dimensions: Vec<Dimension>,
    /// Its bytes.
    pub len: u64,
}

impl PartSpec {
    /// Describes a part whose elements lie close together, the last dimension fastest.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a bad name, an unknown type, more than 32 dimensions, and a size
    /// beyond 64 bits.
    pub fn contiguous(name: impl Into<String>, dtype: DType, shape: &[u64]) -> Result<PartSpec> {
        let beyond = || Error::invalid("the size of a part", format!("{shape:?}"), "below 2^64");
        let mut stride = 1u64;
        let mut dimensions = Vec::with_capacity(shape.len());
        for &extent in shape.iter().rev() {
            dimensions.push(Dimension { extent, stride });
            stride = stride.checked_mul(extent.max(1)).ok_or_else(beyond)?;
        }
        dimensions.reverse();
        let elements = if shape.contains(&0) { 0 } else { stride };
        let len = dtype.bytes_of(elements).ok_or_else(beyond)?;
        let spec = PartSpec {
            name: name.into(),
            dtype,
            dimensions,
            len,
        };
        spec.check()?;
        Ok(spec)
    }

    /// Describes plain bytes.
    ///
    /// # Errors
    ///
    /// As [`contiguous`](PartSpec::contiguous).
    pub fn bytes(name: impl Into<String>, len: u64) -> Result<PartSpec> {
        PartSpec::contiguous(name, DType::BYTES, &[len])
    }

    /// Refuses a part that no reader could take: its elements must lie inside its bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] that names the mistake.
    pub fn check(&self) -> Result<()> {
        let invalid = |what, got: String, must| Err(Error::invalid(what, got, must));
        check_name("the name of a part", &self.name)?;
        if !self.dtype.is_known() {
            return invalid(
                "the type of a part",
                format!("{:?} of {}", self.dtype, self.name),
                "one of DLPack 1.1",
            );
        }
        if self.dimensions.len() > MOST_RANK {
            let got = format!("{} of {}", self.dimensions.len(), self.name);
            return invalid("the number of dimensions", got, "at most 32");
        }
        match self.needed() {
            Some(needed) if needed <= self.len => Ok(()),
            needed => {
                let needed = needed.map_or("more than 2^64".into(), |needed| needed.to_string());
                let got = format!(
                    "{} bytes for {}, whose elements need {needed}",
                    self.len, self.name
                );
                invalid(
                    "the length of a part",
                    got,
                    "as long as its shape and strides reach",
                )
            }
        }
    }

    /// Returns the bytes from the first element to behind the last.
    fn needed(&self) -> Option<u64> {
        if self
            .dimensions
            .iter()
            .any(|dimension| dimension.extent == 0)
        {
            return Some(0);
        }
        let last = self.dimensions.iter().try_fold(0u64, |last, dimension| {
            last.checked_add((dimension.extent - 1).checked_mul(dimension.stride)?)
        })?;
        self.dtype.bytes_of(last.checked_add(1)?)
    }
}

/// A part in its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// What it is.
    pub spec: PartSpec,
    /// The region that it lies in.
    pub region: u8,
    /// Bytes from the region's start.
    pub offset: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contiguous_part_is_as_long_as_its_elements() {
        let part = PartSpec::contiguous("w", DType::F32, &[3, 5]).expect("a good part");
        assert_eq!(part.len, 60);
        assert_eq!(
            part.dimensions,
            [
                Dimension {
                    extent: 3,
                    stride: 5
                },
                Dimension {
                    extent: 1 + 4,
                    stride: 1
                }
            ]
        );
        assert_eq!(
            PartSpec::contiguous("s", DType::F32, &[])
                .expect("a scalar")
                .len,
            4
        );
        assert_eq!(
            PartSpec::contiguous("e", DType::F32, &[0, 7])
                .expect("an empty one")
                .len,
            0
        );
        let four_bits = DType {
            code: 17,
            bits: 4,
            lanes: 1,
        };
        assert_eq!(
            PartSpec::contiguous("f4", four_bits, &[3])
                .expect("a good part")
                .len,
            2
        );
        assert!(PartSpec::contiguous("w", DType::F32, &[u64::MAX, 2]).is_err());
    }

    #[test]
    fn strides_that_reach_beyond_the_bytes_are_refused() {
        let mut part = PartSpec::contiguous("w", DType::F32, &[4, 4]).expect("a good part");
        part.dimensions[0].stride = 5;
        let error = part.check().expect_err("one row too far").to_string();
        assert!(
            error.contains("64 bytes for w, whose elements need 76"),
            "{error}"
        );
        part.dimensions[0].stride = u64::MAX;
        assert!(
            part.check()
                .expect_err("beyond 64 bits")
                .to_string()
                .contains("more than 2^64")
        );
        part.dimensions[0].stride = 0;
        part.check().expect("a broadcast stays inside");
    }
}
