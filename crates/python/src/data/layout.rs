//! What of a block an array is: element type, shape, strides and where the first element lies.

use std::ffi::CStr;

use gpu_ipc::Error;

/// The most dimensions that an array may have.
pub(crate) const MOST_DIMENSIONS: usize = 64;

/// An element type as DLPack numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub(crate) struct Dtype {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// DLPack's code of complex numbers.
const COMPLEX: u8 = 5;

/// Names, with DLPack's code and bits.
const NAMES: [(&str, u8, u8); 27] = [
    ("int8", 0, 8),
    ("int16", 0, 16),
    ("int32", 0, 32),
    ("int64", 0, 64),
    ("uint8", 1, 8),
    ("uint16", 1, 16),
    ("uint32", 1, 32),
    ("uint64", 1, 64),
    ("float16", 2, 16),
    ("float32", 2, 32),
    ("float64", 2, 64),
    ("bfloat16", 4, 16),
    ("complex64", 5, 64),
    ("complex128", 5, 128),
    ("complex32", 5, 32),
    ("bool", 6, 8),
    ("float8_e3m4", 7, 8),
    ("float8_e4m3", 8, 8),
    ("float8_e4m3b11fnuz", 9, 8),
    ("float8_e4m3fn", 10, 8),
    ("float8_e4m3fnuz", 11, 8),
    ("float8_e5m2", 12, 8),
    ("float8_e5m2fnuz", 13, 8),
    ("float8_e8m0fnu", 14, 8),
    ("float6_e2m3fn", 15, 6),
    ("float6_e3m2fn", 16, 6),
    ("float4_e2m1fn", 17, 4),
];

impl Dtype {
    pub const U8: Dtype = Dtype {
        code: 1,
        bits: 8,
        lanes: 1,
    };

    /// Returns the name that array libraries have for it.
    pub fn name(self) -> String {
        let name = NAMES
            .iter()
            .find(|(_, code, bits)| (*code, *bits) == (self.code, self.bits));
        let name = name.map_or_else(
            || format!("dlpack{}_{}", self.code, self.bits),
            |(name, ..)| (*name).into(),
        );
        if self.lanes == 1 {
            name
        } else {
            format!("{name}x{}", self.lanes)
        }
    }

    /// Finds an element type by its name.
    pub fn of_name(name: &str) -> Option<Dtype> {
        let known = NAMES.iter().find(|(known, ..)| *known == name);
        known.map(|&(_, code, bits)| Dtype {
            code,
            bits,
            lanes: 1,
        })
    }

    pub fn is_complex(self) -> bool {
        self.code == COMPLEX
    }

    /// Returns the bytes of an element; `None` for those that are packed into parts of bytes.
    pub fn bytes(self) -> Option<u64> {
        let bits = u64::from(self.bits) * u64::from(self.lanes);
        (bits > 0 && bits.is_multiple_of(8)).then_some(bits / 8)
    }

    /// Returns the character that numpy's type strings and `struct` have for it, where they have
    /// one.
    pub fn characters(self) -> Option<(char, &'static CStr)> {
        if self.lanes != 1 {
            return None;
        }
        Some(match (self.code, self.bits) {
            (0, 8) => ('i', c"b"),
            (0, 16) => ('i', c"h"),
            (0, 32) => ('i', c"i"),
            (0, 64) => ('i', c"q"),
            (1, 8) => ('u', c"B"),
            (1, 16) => ('u', c"H"),
            (1, 32) => ('u', c"I"),
            (1, 64) => ('u', c"Q"),
            (2, 16) => ('f', c"e"),
            (2, 32) => ('f', c"f"),
            (2, 64) => ('f', c"d"),
            (5, 64) => ('c', c"Zf"),
            (5, 128) => ('c', c"Zd"),
            (6, 8) => ('b', c"?"),
            _ => return None,
        })
    }

    /// Reads numpy's kind and size.
    pub fn of_numpy(kind: char, bytes: u64) -> Option<Dtype> {
        let code = match kind {
            'i' => 0,
            'u' => 1,
            'f' => 2,
            'c' => 5,
            'b' => 6,
            _ => return None,
        };
        let dtype = Dtype {
            code,
            bits: u8::try_from(bytes.checked_mul(8)?).ok()?,
            lanes: 1,
        };
        dtype.characters().map(|_| dtype)
    }
}

/// What of a block an array is. Strides are in elements; `None` is C order without gaps.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Layout {
    pub dtype: Dtype,
    pub shape: Vec<i64>,
    pub strides: Option<Vec<i64>>,
    /// Bytes from the block's start to the first element.
    pub offset: u64,
}

impl Layout {
    /// Describes plain bytes.
    pub fn bytes(len: u64) -> Layout {
        let len = i64::try_from(len).unwrap_or(i64::MAX);
        Layout {
            dtype: Dtype::U8,
            shape: vec![len],
            strides: None,
            offset: 0,
        }
    }

    /// Describes an array; strides that say no more than the shape does are left out.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for too many dimensions, and for a negative length.
    pub fn new(dtype: Dtype, shape: Vec<i64>, strides: Option<Vec<i64>>) -> Result<Layout, Error> {
        if shape.len() > MOST_DIMENSIONS {
            return Err(Error::Invalid {
                what: "the number of dimensions",
                got: shape.len().to_string(),
                must: "at most 64",
            });
        }
        if shape.iter().any(|&length| length < 0) {
            return Err(Error::Invalid {
                what: "a shape",
                got: format!("{shape:?}"),
                must: "not negative",
            });
        }
        let plain = c_order(&shape);
        let strides = strides.filter(|strides| {
            let says_more =
                |(axis, &stride): (usize, &i64)| shape[axis] > 1 && plain[axis] != stride;
            !shape.contains(&0) && strides.iter().enumerate().any(says_more)
        });
        Ok(Layout {
            dtype,
            shape,
            strides,
            offset: 0,
        })
    }

    /// Says whether the elements lie in Fortran order, without gaps. An array of no elements lies in
    /// any order, and the stride of a single element means nothing.
    pub fn is_in_f_order(&self) -> bool {
        let said = self.full_strides().into_iter().zip(f_order(&self.shape));
        let mut axes = self.shape.iter().zip(said);
        self.shape.contains(&0)
            || axes.all(|(&length, (stride, plain))| length == 1 || stride == plain)
    }

    /// Counts the elements.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |product, &length| {
            product.checked_mul(u64::try_from(length).ok()?)
        })
    }

    /// Returns the bytes of the elements, gaps not counted.
    pub fn nbytes(&self) -> Option<u64> {
        let bits = u64::from(self.dtype.bits).checked_mul(u64::from(self.dtype.lanes))?;
        Some(self.elements()?.checked_mul(bits)?.div_ceil(8))
    }

    /// Returns the strides in elements, said or not.
    pub fn full_strides(&self) -> Vec<i64> {
        self.strides.clone().unwrap_or_else(|| c_order(&self.shape))
    }

    /// Returns how many bytes before the first element, and from it on, the array reaches.
    pub fn reach(&self) -> Option<(u64, u64)> {
        if self.elements()? == 0 {
            return Some((0, 0));
        }
        let Some(strides) = &self.strides else {
            return Some((0, self.nbytes()?));
        };
        let bytes = self.dtype.bytes()?;
        let (mut before, mut after) = (0u64, bytes);
        for (&length, &stride) in self.shape.iter().zip(strides) {
            let steps = u64::try_from(length).ok()? - 1;
            let reach = steps
                .checked_mul(stride.unsigned_abs())?
                .checked_mul(bytes)?;
            let side = if stride < 0 { &mut before } else { &mut after };
            *side = side.checked_add(reach)?;
        }
        Some((before, after))
    }

    /// Says whether the array lies inside a block of this many bytes.
    pub fn fits(&self, len: u64) -> bool {
        let inside = || {
            let (before, after) = self.reach()?;
            Some(before <= self.offset && self.offset.checked_add(after)? <= len)
        };
        inside().unwrap_or(false)
    }
}

/// Returns the strides of an array in C order, in elements.
fn c_order(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    let mut step = 1i64;
    for axis in (0..shape.len()).rev() {
        strides[axis] = step;
        step = step.saturating_mul(shape[axis].max(1));
    }
    strides
}

/// Returns the strides of an array in Fortran order, in elements.
pub(crate) fn f_order(shape: &[i64]) -> Vec<i64> {
    let mut step = 1i64;
    let next = |&length: &i64| {
        let stride = step;
        step = step.saturating_mul(length.max(1));
        stride
    };
    shape.iter().map(next).collect()
}

/// Gives a class with a method `layout` what Python programs ask of it.
macro_rules! layout_methods {
    ($class:ty) => {
        #[pyo3::pymethods]
        impl $class {
            /// The name of the element type: ``float32``, ``bfloat16``, ``float8_e4m3fn``.
            #[getter]
            fn dtype(&self) -> String {
                self.layout().dtype.name()
            }

            /// The lengths of the array's dimensions.
            #[getter]
            fn shape<'py>(
                &self,
                py: pyo3::Python<'py>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::types::PyTuple>> {
                pyo3::types::PyTuple::new(py, &self.layout().shape)
            }

            /// The steps between elements of each dimension, in elements.
            #[getter]
            fn strides<'py>(
                &self,
                py: pyo3::Python<'py>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::types::PyTuple>> {
                pyo3::types::PyTuple::new(py, self.layout().full_strides())
            }

            /// Bytes of the array's elements.
            #[getter]
            fn nbytes(&self) -> u64 {
                self.layout().nbytes().unwrap_or(u64::MAX)
            }
        }
    };
}

pub(crate) use layout_methods;
