//! OpenMetrics 1.0 text: a family's `TYPE` and `HELP`, then its samples, and `# EOF` at the end
//! (<https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md>).

// Tests: `crates/cli/src/sessions/metrics.rs`.

use std::fmt::{Display, Write as _};

/// The type of what [`text`] writes, as HTTP names it.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What a family measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A number that rises and falls.
    Gauge,
    /// A number that rises, from 0 at each start.
    Counter,
    /// How often something was at most so much.
    Histogram,
}

/// A family of samples.
#[derive(Debug)]
pub struct Family {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    samples: Vec<Sample>,
}

/// A sample: what its name has behind the family's, its labels, its value.
#[derive(Debug)]
struct Sample {
    suffix: &'static str,
    labels: String,
    value: f64,
}

impl Family {
    /// Makes one of numbers that rise and fall.
    pub fn gauge(
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (String, f64)>,
    ) -> Family {
        Self::of(name, Kind::Gauge, help, "", samples)
    }

    /// Makes one of numbers that rise.
    pub fn counter(
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (String, f64)>,
    ) -> Family {
        Self::of(name, Kind::Counter, help, "_total", samples)
    }

    fn of(
        name: &'static str,
        kind: Kind,
        help: &'static str,
        suffix: &'static str,
        samples: impl IntoIterator<Item = (String, f64)>,
    ) -> Family {
        let sample = |(labels, value)| Sample {
            suffix,
            labels,
            value,
        };
        Family {
            name,
            kind,
            help,
            samples: samples.into_iter().map(sample).collect(),
        }
    }

    /// Makes a histogram of bounds and how often each held, of what was counted in all, and of its
    /// sum.
    pub fn histogram(
        name: &'static str,
        help: &'static str,
        labels: &str,
        bounds: impl IntoIterator<Item = (f64, f64)>,
        (count, sum): (f64, f64),
    ) -> Family {
        let sample = |suffix, labels: String, value| Sample {
            suffix,
            labels,
            value,
        };
        let bucket = |bound: String, count| {
            sample("_bucket", format!("{labels},{}", label("le", bound)), count)
        };
        let bounds = bounds
            .into_iter()
            .map(|(bound, count)| bucket(float(bound), count));
        let mut samples: Vec<Sample> = bounds.collect();
        samples.push(bucket("+Inf".into(), count));
        samples.push(sample("_count", labels.into(), count));
        samples.push(sample("_sum", labels.into(), sum));
        Family {
            name,
            kind: Kind::Histogram,
            help,
            samples,
        }
    }
}

/// Writes families.
pub fn text(families: impl IntoIterator<Item = Family>) -> String {
    let mut text = String::new();
    for Family {
        name,
        kind,
        help,
        samples,
    } in families
    {
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# TYPE gpu_ipc_{name} {kind}\n# HELP gpu_ipc_{name} {help}"
        );
        for Sample {
            suffix,
            labels,
            value,
        } in samples
        {
            let _ = writeln!(text, "gpu_ipc_{name}{suffix}{{{labels}}} {value}");
        }
    }
    text + "# EOF\n"
}

/// Writes a label.
pub fn label(name: &str, value: impl Display) -> String {
    let value = value
        .to_string()
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

/// Writes a bound as the format asks: with a decimal point.
fn float(value: f64) -> String {
    format!("{value:?}")
}
