//! Rows: one thing that was measured, its floor, and what is aimed at.

use serde::{Deserialize, Serialize};

use super::sample::{Figures, Pairs};

/// What a row's numbers are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Unit {
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanoseconds,
    /// Bytes.
    #[serde(rename = "B")]
    Bytes,
}

/// What is aimed at, in the row's unit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Goal {
    /// At most this factor times the floor, plus this constant.
    Times(f64, f64),
    /// At most this value.
    AtMost(f64),
    /// At most so much beyond the floor.
    Beyond(f64),
}

/// One thing that was measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Its name, with what it depends on behind a slash.
    pub row: String,
    /// What was timed.
    pub what: String,
    /// What the floor is.
    pub floor_is: String,
    /// The number that it depends on: blocks in limbo, consumers, bytes.
    pub at: Option<u64>,
    /// What the numbers are.
    pub unit: Unit,
    /// Our calls.
    pub ours: Option<Figures>,
    /// The raw calls that they cannot do without.
    pub floor: Option<Figures>,
    /// Median by median.
    pub ratio: Option<f64>,
    /// What the way of counting that PyTorch has takes for the same, in our own words.
    pub baseline: Option<Figures>,
    /// What is aimed at, in words.
    pub goal: Option<String>,
    /// Whether it is reached.
    pub met: Option<bool>,
    /// What else is to be known.
    pub note: Option<String>,
    /// Why there are no numbers.
    pub error: Option<String>,
}

impl Row {
    /// Begins a row without numbers.
    pub fn new(name: &str, what: &str, floor_is: &str) -> Row {
        Row {
            row: name.to_owned(),
            what: what.to_owned(),
            floor_is: floor_is.to_owned(),
            at: None,
            unit: Unit::Nanoseconds,
            ours: None,
            floor: None,
            ratio: None,
            baseline: None,
            goal: None,
            met: None,
            note: None,
            error: None,
        }
    }

    /// Makes a row of something that failed.
    pub fn failed(name: &str, why: String) -> Row {
        Row {
            error: Some(why),
            ..Row::new(name, "", "")
        }
    }

    /// Says which of several rows of one name it is.
    pub fn at(mut self, number: u64, shown: &str) -> Row {
        self.row = format!("{}/{shown}", self.row);
        self.at = Some(number);
        self
    }

    /// Returns its name without what it depends on.
    pub fn group(&self) -> &str {
        self.row.split('/').next().unwrap_or(&self.row)
    }

    /// Says that the numbers are bytes.
    pub fn bytes(mut self) -> Row {
        self.unit = Unit::Bytes;
        self
    }

    /// Takes the samples in.
    pub fn measured(self, pairs: Pairs) -> Row {
        let (ours, floor) = pairs.figures();
        self.figures(ours, floor)
    }

    /// Takes the numbers in.
    pub fn figures(mut self, ours: Option<Figures>, floor: Option<Figures>) -> Row {
        (self.ours, self.floor) = (ours, floor);
        self.ratio = match (ours, floor) {
            (Some(ours), Some(floor)) if floor.median > 0.0 => Some(ours.median / floor.median),
            _ => None,
        };
        if ours.is_none() {
            self.error = Some("nothing was measured".to_owned());
        }
        self
    }

    /// Adds the numbers of the baseline.
    pub fn baseline(mut self, baseline: Option<Figures>) -> Row {
        self.baseline = baseline;
        self
    }

    /// Adds what else is to be known.
    pub fn note(mut self, note: impl Into<String>) -> Row {
        self.note = Some(note.into());
        self
    }

    /// Compares with what is aimed at.
    pub fn goal(self, goal: Goal) -> Row {
        let (Some(ours), floor) = (self.ours.map(|f| f.median), self.floor.map(|f| f.median))
        else {
            return self;
        };
        let limit = match (goal, floor) {
            (Goal::AtMost(most), _) => Some(most),
            (Goal::Times(times, more), Some(floor)) => Some(times * floor + more),
            (Goal::Beyond(more), Some(floor)) => Some(floor + more),
            (_, None) => None,
        };
        let unit = self.unit;
        let text = match goal {
            Goal::AtMost(most) => show(most, unit),
            Goal::Times(times, 0.0) => format!("{times} x floor"),
            Goal::Times(times, more) => format!("{times} x floor + {}", show(more, unit)),
            Goal::Beyond(more) => format!("floor + {}", show(more, unit)),
        };
        self.judged(format!("at most {text}"), limit.map(|limit| ours <= limit))
    }

    /// Takes back what is aimed at, where it is not meant for this device.
    pub fn without_goal(mut self) -> Row {
        (self.goal, self.met) = (None, None);
        self
    }

    /// Says what is aimed at, and whether it is reached.
    pub fn judged(mut self, goal: impl Into<String>, met: Option<bool>) -> Row {
        self.goal = Some(goal.into());
        self.met = met;
        self
    }
}

/// Writes a number with three digits in a unit that fits.
pub fn show(number: f64, unit: Unit) -> String {
    let units: &[(&str, f64)] = match unit {
        Unit::Nanoseconds => &[("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0)],
        Unit::Bytes => &[
            ("GiB", 1_073_741_824.0),
            ("MiB", 1_048_576.0),
            ("KiB", 1024.0),
            ("B", 1.0),
        ],
    };
    let found = units.iter().find(|(_, size)| number.abs() >= *size);
    let (name, size) = found.copied().unwrap_or(units[units.len() - 1]);
    format!("{} {name}", digits(number / size))
}

/// Writes a ratio; a small one as a fraction, of which three digits say more.
pub fn fraction(ratio: f64) -> String {
    if ratio > 0.0 && ratio < 0.1 {
        format!("1/{}", digits(1.0 / ratio))
    } else {
        digits(ratio)
    }
}

/// Writes a number with about three digits.
pub fn digits(number: f64) -> String {
    let places = match number.abs() {
        n if n >= 100.0 || n == 0.0 => 0,
        n if n >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{number:.places$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ours: f64, floor: f64) -> Row {
        Row::new("r", "", "").figures(Figures::of(vec![ours], 1), Figures::of(vec![floor], 1))
    }

    #[test]
    fn goals_compare_with_the_floor_of_the_same_run() {
        let met = |ours, goal| row(ours, 100.0).goal(goal).met;
        assert_eq!(met(430.0, Goal::Times(1.3, 300.0)), Some(true));
        assert_eq!(met(431.0, Goal::Times(1.3, 300.0)), Some(false));
        assert_eq!(met(250.0, Goal::Beyond(150.0)), Some(true));
        assert_eq!(met(251.0, Goal::Beyond(150.0)), Some(false));
        assert_eq!(
            (met(99.0, Goal::AtMost(99.0)), met(99.5, Goal::AtMost(99.0))),
            (Some(true), Some(false))
        );
        let goal = row(1.0, 2.0).goal(Goal::Times(1.3, 300.0)).goal;
        assert_eq!(goal.as_deref(), Some("at most 1.3 x floor + 300 ns"));
        assert_eq!(row(1.0, 4.0).ratio, Some(0.25));
    }

    #[test]
    fn what_was_not_measured_meets_nothing() {
        let none = Row::new("r", "", "")
            .figures(None, None)
            .goal(Goal::AtMost(1.0));
        assert!(none.met.is_none() && none.error.is_some());
    }

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        let time = |nanos| show(nanos, Unit::Nanoseconds);
        assert_eq!(
            (time(0.0), time(14.53), time(1420.0)),
            ("0 ns".into(), "14.5 ns".into(), "1.42 µs".into())
        );
        assert_eq!(
            (time(163e6), time(2e9), time(0.25)),
            ("163 ms".into(), "2 s".into(), "0.25 ns".into())
        );
        assert_eq!(show(1536.0, Unit::Bytes), "1.5 KiB");
        assert_eq!(digits(1.0), "1");
        assert_eq!(
            (fraction(0.0037), fraction(0.4), fraction(1.73)),
            ("1/270".into(), "0.4".into(), "1.73".into())
        );
    }
}
