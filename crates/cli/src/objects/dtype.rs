//! What files of tensors and people call a type.

use gpu_ipc::broker::DType;
use safetensors::Dtype;

/// The types of the file format, with DLPack's code and bits.
const TYPES: [(Dtype, u8, u8); 20] = [
    (Dtype::BOOL, 6, 8),
    (Dtype::I8, 0, 8),
    (Dtype::I16, 0, 16),
    (Dtype::I32, 0, 32),
    (Dtype::I64, 0, 64),
    (Dtype::U8, 1, 8),
    (Dtype::U16, 1, 16),
    (Dtype::U32, 1, 32),
    (Dtype::U64, 1, 64),
    (Dtype::F16, 2, 16),
    (Dtype::F32, 2, 32),
    (Dtype::F64, 2, 64),
    (Dtype::BF16, 4, 16),
    (Dtype::C64, 5, 64),
    (Dtype::F8_E4M3, 10, 8),
    (Dtype::F8_E5M2, 12, 8),
    (Dtype::F8_E8M0, 14, 8),
    (Dtype::F6_E2M3, 15, 6),
    (Dtype::F6_E3M2, 16, 6),
    (Dtype::F4, 17, 4),
];

/// Returns what DLPack calls a type of the file format.
pub fn of_file(dtype: Dtype) -> Result<DType, String> {
    let found = TYPES.iter().find(|(of, ..)| *of == dtype);
    let &(_, code, bits) =
        found.ok_or_else(|| format!("the type {dtype:?} has no number in DLPack"))?;
    Ok(DType {
        code,
        bits,
        lanes: 1,
    })
}

/// Returns what the file format calls a type, if it has it.
pub fn in_file(dtype: DType) -> Option<Dtype> {
    let DType { code, bits, lanes } = dtype;
    let found = TYPES.iter().find(|&&(_, c, b)| (c, b) == (code, bits))?;
    (lanes == 1).then_some(found.0)
}

/// Returns a type's name for people: that of the file format, else DLPack's numbers.
pub fn name(dtype: DType) -> String {
    let DType { code, bits, lanes } = dtype;
    match in_file(DType { lanes: 1, ..dtype }) {
        Some(name) if lanes == 1 => format!("{name:?}"),
        Some(name) => format!("{name:?}x{lanes}"),
        None => format!("DLPack {code}/{bits}/{lanes}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_has_one_name_there_and_back() {
        for (dtype, ..) in TYPES {
            let ours = of_file(dtype).expect("a number");
            assert_eq!(
                (in_file(ours), name(ours)),
                (Some(dtype), format!("{dtype:?}"))
            );
        }
        let two = DType {
            lanes: 2,
            ..DType::F32
        };
        assert_eq!((in_file(two), name(two).as_str()), (None, "F32x2"));
        let odd = DType {
            bits: 128,
            ..DType::F32
        };
        assert_eq!((in_file(odd), name(odd).as_str()), (None, "DLPack 2/128/1"));
    }
}
