//! Reads OpenMetrics 1.0 text as strictly as its specification writes it.
//!
//! What this program does not print (timestamps, exemplars, `UNIT`, summaries) is refused like what
//! nobody may print. Source:
//! <https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md>, "Text
//! Format".

use std::collections::{BTreeMap, BTreeSet};

/// A sample: its name, its labels, its value.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

impl Sample {
    /// Returns a label, which must be there.
    pub fn label(&self, name: &str) -> &str {
        self.labels
            .get(name)
            .unwrap_or_else(|| panic!("no label {name}: {self:?}"))
    }
}

/// A family whose samples are being read.
#[derive(Default)]
struct Family {
    name: String,
    kind: Option<String>,
    has_help: bool,
    has_samples: bool,
    buckets: Buckets,
}

/// The buckets of a histogram's metric: the labels besides their bounds, the last bound, the last
/// count.
#[derive(Default)]
struct Buckets(Option<(BTreeMap<String, String>, f64, f64)>);

impl Buckets {
    /// Takes the next sample of a histogram: buckets in the order of their bounds, then the count
    /// and the sum.
    fn take(&mut self, suffix: &str, sample: &Sample) -> Result<(), &'static str> {
        let mut labels = sample.labels.clone();
        let bound = labels.remove("le");
        let last = self.0.take().filter(|(of, ..)| *of == labels);
        match suffix {
            "_bucket" => {
                let bound = match bound.as_deref() {
                    Some("+Inf") => Some(f64::INFINITY),
                    Some(text) if text.contains('.') => text.parse().ok(),
                    _ => None,
                };
                let (above, at_least) =
                    last.map_or((f64::NEG_INFINITY, 0.0), |(_, bound, count)| (bound, count));
                let bound = bound.filter(|bound| *bound > above);
                let bound = bound.ok_or("a bucket without a bound above the one before")?;
                if sample.value < at_least {
                    return Err("a bucket that holds less than the one before");
                }
                self.0 = Some((labels, bound, sample.value));
            }
            "_count"
                if last.as_ref().is_none_or(|(_, bound, count)| {
                    *bound < f64::INFINITY || *count != sample.value
                }) =>
            {
                return Err("a count that is not its last bucket's");
            }
            _ => self.0 = last,
        }
        Ok(())
    }
}

/// Returns all samples of a text in their order, or why it is none.
pub fn parse(text: &str) -> Result<Vec<Sample>, String> {
    let body = text
        .strip_suffix("# EOF\n")
        .ok_or("the last line is not # EOF")?;
    if !body.is_empty() && !body.ends_with('\n') {
        return Err("a line in front of # EOF does not end".into());
    }
    let mut families: BTreeSet<String> = BTreeSet::new();
    let mut family = Family::default();
    let mut samples: Vec<Sample> = Vec::new();
    for line in body.split_terminator('\n') {
        let of_line = |why: &str| format!("{why}: {line:?}");
        if let Some(comment) = line.strip_prefix('#') {
            let mut words = comment
                .strip_prefix(' ')
                .ok_or_else(|| of_line("no space behind #"))?
                .splitn(3, ' ');
            let (Some(keyword), Some(name), Some(rest)) =
                (words.next(), words.next(), words.next())
            else {
                return Err(of_line("a description without its three words"));
            };
            if !is_name(name, true) {
                return Err(of_line("no name of a metric"));
            }
            if name != family.name {
                if !families.insert(name.to_owned()) {
                    return Err(of_line("a family in two places"));
                }
                family = Family {
                    name: name.to_owned(),
                    ..Family::default()
                };
            }
            if family.has_samples {
                return Err(of_line("a description behind its samples"));
            }
            match keyword {
                "TYPE"
                    if family.kind.is_none()
                        && matches!(rest, "gauge" | "counter" | "histogram") =>
                {
                    family.kind = Some(rest.to_owned());
                }
                "HELP" if !family.has_help => {
                    unescape(rest).map_err(|why| of_line(&why))?;
                    family.has_help = true;
                }
                _ => return Err(of_line("no TYPE or HELP that may stand here")),
            }
            continue;
        }
        let sample = sample(line).map_err(|why| of_line(&why))?;
        let is_counter = family.kind.as_deref() == Some("counter");
        let suffixes: &[&str] = match family.kind.as_deref() {
            Some("counter") => &["_total"],
            Some("histogram") => &["_bucket", "_count", "_sum"],
            _ => &[""],
        };
        let suffix = sample.name.strip_prefix(&*family.name);
        if family.kind.is_none() || suffix.is_none_or(|suffix| !suffixes.contains(&suffix)) {
            return Err(of_line(&format!(
                "a sample of another family than {}",
                family.name
            )));
        }
        if sample.value.is_nan() || (is_counter && sample.value < 0.0) {
            return Err(of_line("a value that its type cannot have"));
        }
        if samples
            .iter()
            .any(|other| (&other.name, &other.labels) == (&sample.name, &sample.labels))
        {
            return Err(of_line("a metric twice"));
        }
        if family.kind.as_deref() == Some("histogram") {
            family
                .buckets
                .take(suffix.unwrap_or_default(), &sample)
                .map_err(of_line)?;
        }
        family.has_samples = true;
        samples.push(sample);
    }
    match families
        .iter()
        .find(|name| families.contains(&format!("{name}_total")))
    {
        Some(name) => Err(format!(
            "{name} and {name}_total are families of one sample's name"
        )),
        None => Ok(samples),
    }
}

fn sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    if !is_name(name, true) {
        return Err("no name of a metric".into());
    }
    let mut labels = BTreeMap::new();
    if let Some(of_labels) = rest.strip_prefix('{') {
        rest = of_labels;
        while !rest.starts_with('}') {
            let (label, value) = rest.split_once("=\"").ok_or("no label")?;
            let end = closing(value).ok_or("a label's value does not end")?;
            let value_of = unescape(&value[..end])?;
            if !is_name(label, false) || labels.insert(label.to_owned(), value_of).is_some() {
                return Err(format!(
                    "no name of a label, or one that is there twice: {label}"
                ));
            }
            rest = &value[end + 1..];
            match rest.strip_prefix(',') {
                Some(more) if !more.starts_with('}') => rest = more,
                None if rest.starts_with('}') => {}
                _ => return Err("labels that nothing or too much divides".into()),
            }
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
    let is_number = !value.is_empty()
        && value
            .bytes()
            .all(|byte| byte.is_ascii_digit() || b"+-.e".contains(&byte));
    let value = value
        .parse()
        .ok()
        .filter(|_| is_number)
        .ok_or("no number")?;
    Ok(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

fn is_name(text: &str, may_have_colons: bool) -> bool {
    let is_letter = |c: char| c.is_ascii_alphabetic() || c == '_' || (may_have_colons && c == ':');
    text.starts_with(is_letter) && text.chars().all(|c| is_letter(c) || c.is_ascii_digit())
}

/// Finds the quotation mark that ends a value.
fn closing(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.char_indices().find_map(|(at, c)| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends.then_some(at)
    })
}

fn unescape(text: &str) -> Result<String, String> {
    let (mut out, mut chars) = (String::new(), text.chars());
    while let Some(c) = chars.next() {
        out.push(match c {
            '\\' => match chars.next() {
                Some('n') => '\n',
                Some(c @ ('\\' | '"')) => c,
                other => return Err(format!("a backslash before {other:?}")),
            },
            '"' => return Err("a quotation mark without a backslash".into()),
            c => c,
        });
    }
    Ok(out)
}
