//! Numbers as people read them, in few columns.

use std::time::Duration;

/// Writes bytes with three digits and a unit.
pub fn bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.95 {
        format!("{value:.0} {}", units[unit])
    } else if value >= 9.995 {
        format!("{value:.1} {}", units[unit])
    } else {
        format!("{value:.2} {}", units[unit])
    }
}

/// Writes a time in its two largest units.
pub fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{} ms", time.as_millis()),
        1..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} m {:02} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {:02} m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {:02} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// Cuts a text to at most this many characters.
pub fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars()
        .take(most.saturating_sub(1))
        .chain(['…'])
        .collect()
}

/// Joins parts by three spaces, in indented lines of at most this many characters.
pub fn flow(parts: &[String], indent: usize, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 3 + part.chars().count() <= width => {
                line.push_str("   ");
                line.push_str(part);
            }
            _ => lines.push(format!("{:indent$}{part}", "")),
        }
    }
    lines.join("\n")
}

/// Breaks a text between words into lines of at most this many characters; a longer word has a line
/// of its own.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Joins as many of the parts as fit, by three spaces: a number that is cut would be another
/// number.
pub fn fitting(parts: &[String], width: usize) -> String {
    flow(parts, 0, width)
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_keep_three_digits() {
        for (number, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.98 KiB"),
            (65_536, "64.0 KiB"),
            (1 << 20, "1.00 MiB"),
            (5 << 30, "5.00 GiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(bytes(number), text);
        }
    }

    #[test]
    fn times_keep_two_units() {
        for (time_ms, text) in [
            (12, "12 ms"),
            (1_500, "1.5 s"),
            (61_000, "1 m 01 s"),
            (3_600_000, "1 h 00 m"),
            (90_000_000, "1 d 01 h"),
        ] {
            assert_eq!(time(Duration::from_millis(time_ms)), text);
        }
    }

    #[test]
    fn parts_flow_into_lines_and_none_is_cut() {
        let parts = ["blocks 7", "limbo 9", "held 1"].map(String::from);
        assert_eq!(flow(&parts, 2, 80), "  blocks 7   limbo 9   held 1");
        assert_eq!(flow(&parts, 2, 20), "  blocks 7   limbo 9\n  held 1");
        assert_eq!(flow(&parts, 2, 1), "  blocks 7\n  limbo 9\n  held 1");
        assert_eq!(fitting(&parts, 18), "blocks 7   limbo 9");
        assert_eq!(fitting(&[], 18), "");
    }

    #[test]
    fn a_text_is_broken_between_words() {
        assert_eq!(
            wrapped("it hangs or is stopped", 11),
            ["it hangs or", "is stopped"]
        );
        assert_eq!(wrapped("unbreakable word", 3), ["unbreakable", "word"]);
    }

    #[test]
    fn a_long_text_shows_that_it_was_cut() {
        assert_eq!(cut("producer", 8), "producer");
        assert_eq!(cut("producers", 8), "produce…");
    }
}
