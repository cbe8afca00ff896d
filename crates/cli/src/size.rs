//! Numbers of bytes, as people read and write them.

/// Reads a number of bytes, a multiple of 8 for the words that contents are made of.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => {
            return Err(format!(
                "the unit is {other}, but must be B, KiB, MiB or GiB"
            ));
        }
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{digits:?} is not a number of bytes"))?;
    match number.checked_mul(unit) {
        Some(bytes) if bytes >= 8 && bytes % 8 == 0 => Ok(bytes),
        Some(_) => Err(format!("{text} is not a multiple of 8 bytes of at least 8")),
        None => Err(format!("{text} is more than any device has")),
    }
}

/// Writes a number of bytes with one decimal place in the largest unit that fits.
pub fn show(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => {
            // In tenths, rounded down: what is free is never said to be more than it is.
            let tenths = (u128::from(bytes) * 10) >> shift;
            let (whole, rest) = (tenths / 10, tenths % 10);
            if rest == 0 {
                format!("{whole} {unit}")
            } else {
                format!("{whole}.{rest} {unit}")
            }
        }
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse("64KiB"), Ok(65_536));
        assert_eq!(parse("8"), Ok(8));
        assert_eq!(parse("1GiB"), Ok(1 << 30));
        for wrong in ["", "KiB", "7", "0", "1kb", "99999999999GiB", "-8"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let too_much = "99999999999GiB is more than any device has";
        assert_eq!(
            parse("99999999999GiB").expect_err("more than 64 bits"),
            too_much
        );
    }

    #[test]
    fn sizes_are_written_in_the_largest_unit_that_fits() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1535, "1.4 KiB"),
            (1 << 30, "1 GiB"),
            ((1 << 30) - 1, "1023.9 MiB"),
            (u64::MAX, "16777215.9 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(show(bytes), text);
        }
    }
}
