//! Times that a person would wait.

/// Reads a number of seconds.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "{text:?} is not a number of seconds from 0.01 to 3600"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::seconds;

    #[test]
    fn a_time_is_neither_nothing_nor_for_days() {
        assert_eq!(seconds("0.01"), Ok(0.01));
        for text in ["0", "-1", "3601", "inf", "NaN", "1s", ""] {
            let why = seconds(text).expect_err(text);
            assert!(why.contains("from 0.01 to 3600"), "{why}");
        }
    }
}
