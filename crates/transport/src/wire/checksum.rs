//! The checksum of descriptors that needs no key: crc32c, four parts at a time.
//!
//! A processor's crc32 instruction has to wait for the one before it, three cycles each; so 128
//! bytes in a row take almost 50 cycles. Cut into four parts that do not depend on each other they
//! take a third. A part's remainder is moved past the bytes that follow it by a multiplication with
//! a power of x, modulo the polynomial, which one carry-less multiplication and one crc32
//! instruction do.

/// The bytes that one call adds: those of a descriptor between its head and its checksums.
pub const ADDED: usize = 128;

/// Continues the crc32c of the bytes before with [`ADDED`] more.
#[inline]
pub fn append(crc: u32, bytes: &[u8; ADDED]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
    {
        // SAFETY: `parallel::append` asks for SSE 4.2 and PCLMULQDQ: just looked for.
        return unsafe { parallel::append(crc, bytes) };
    }
    crc32c::crc32c_append(crc, bytes)
}

#[cfg(target_arch = "x86_64")]
mod parallel {
    use std::arch::x86_64::{
        _mm_clmulepi64_si128, _mm_crc32_u64, _mm_cvtsi64_si128, _mm_cvtsi128_si64, _mm_xor_si128,
    };

    use super::ADDED;

    /// The bytes of each part.
    const PART: usize = ADDED / 4;
    const _: () = assert!(PART.is_multiple_of(8) && 4 * PART == ADDED);

    /// The polynomial, its highest power at the lowest bit, as everything here.
    const POLYNOMIAL: u32 = 0x82f6_3b78;

    /// Returns what a remainder is multiplied with to move it past this many bytes: x to the power
    /// of their bits, less 33, which the instruction that reduces the product adds.
    const fn past(bytes: usize) -> i64 {
        let mut power: u32 = 1 << 31;
        let mut left = 8 * bytes - 33;
        while left > 0 {
            power = (power >> 1) ^ (POLYNOMIAL * (power & 1));
            left -= 1;
        }
        power as i64
    }

    const FIRST: i64 = past(3 * PART);
    const SECOND: i64 = past(2 * PART);
    const THIRD: i64 = past(PART);

    #[target_feature(enable = "sse4.2,pclmulqdq")]
    pub fn append(crc: u32, bytes: &[u8; ADDED]) -> u32 {
        let word = |at: usize| {
            u64::from_le_bytes(*bytes[at..].first_chunk().expect("a word inside the bytes"))
        };
        let (mut a, mut b, mut c, mut d) = (u64::from(!crc), 0, 0, 0);
        for at in (0..PART).step_by(8) {
            a = _mm_crc32_u64(a, word(at));
            b = _mm_crc32_u64(b, word(PART + at));
            c = _mm_crc32_u64(c, word(2 * PART + at));
            d = _mm_crc32_u64(d, word(3 * PART + at));
        }
        let moved = |remainder: u64, power: i64| {
            _mm_clmulepi64_si128::<0>(
                _mm_cvtsi64_si128(remainder.cast_signed()),
                _mm_cvtsi64_si128(power),
            )
        };
        let sum = _mm_xor_si128(
            _mm_xor_si128(moved(a, FIRST), moved(b, SECOND)),
            moved(c, THIRD),
        );
        !(_mm_crc32_u64(0, _mm_cvtsi128_si64(sum).cast_unsigned()) as u32 ^ d as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_bit_counts_as_it_should() {
        for bit in 0..ADDED * 8 {
            let mut bytes = [0; ADDED];
            bytes[bit / 8] = 1 << (bit % 8);
            assert_eq!(append(0, &bytes), crc32c::crc32c(&bytes), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn it_is_the_checksum_that_others_compute(
            before in any::<u32>(),
            bytes in proptest::collection::vec(any::<u8>(), ADDED),
        ) {
            let bytes: [u8; ADDED] = bytes.try_into().expect("as long as asked for");
            prop_assert_eq!(append(before, &bytes), crc32c::crc32c_append(before, &bytes));
        }
    }
}
