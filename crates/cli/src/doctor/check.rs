//! One thing that was looked at, and what was found.

use serde::{Deserialize, Serialize};

/// How it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    /// It works.
    Ok,
    /// It works, but something about it should be known.
    Warning,
    /// It should work and does not.
    Failed,
    /// It is not here, and nothing is wrong with that.
    Absent,
}

impl CheckState {
    /// Returns the mark in front of a line.
    pub fn mark(self) -> &'static str {
        match self {
            CheckState::Ok => "ok",
            CheckState::Warning => "warn",
            CheckState::Failed => "FAIL",
            CheckState::Absent => "none",
        }
    }
}

/// A thing and how it stands.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Check {
    /// Its name, the same in every version.
    pub name: String,
    /// How it stands.
    pub state: CheckState,
    /// Without it nothing works here.
    pub needed: bool,
    /// What was found, in plain words.
    pub found: String,
    /// What follows from it, or why it is not so.
    pub why: Option<String>,
    /// What to do.
    pub remedy: Option<String>,
}

impl Check {
    fn new(state: CheckState, name: &str, found: impl Into<String>) -> Check {
        Check {
            name: name.into(),
            state,
            needed: false,
            found: found.into(),
            why: None,
            remedy: None,
        }
    }

    /// Notes what works.
    pub fn ok(name: &str, found: impl Into<String>) -> Check {
        Check::new(CheckState::Ok, name, found)
    }

    /// Notes what works with a consequence.
    pub fn warning(name: &str, found: impl Into<String>) -> Check {
        Check::new(CheckState::Warning, name, found)
    }

    /// Notes what should work and does not.
    pub fn failed(name: &str, found: impl Into<String>) -> Check {
        Check::new(CheckState::Failed, name, found)
    }

    /// Notes what is not here.
    pub fn absent(name: &str, found: impl Into<String>) -> Check {
        Check::new(CheckState::Absent, name, found)
    }

    /// Adds the reason or the consequence.
    #[must_use]
    pub fn why(mut self, why: impl Into<String>) -> Check {
        self.why = Some(why.into());
        self
    }

    /// Adds what to do.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Check {
        self.remedy = Some(remedy.into());
        self
    }

    /// Says that nothing works without it.
    #[must_use]
    pub fn needed(mut self) -> Check {
        self.needed = true;
        self
    }

    /// Says whether its failure is the program's.
    pub fn is_fatal(&self) -> bool {
        self.needed && self.state == CheckState::Failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_needed_and_failed_is_fatal() {
        assert!(Check::failed("x", "").needed().is_fatal());
        assert!(!Check::failed("x", "").is_fatal());
        assert!(!Check::warning("x", "").needed().is_fatal());
    }
}
