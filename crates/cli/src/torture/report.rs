//! What a run found, for people and for programs.

use serde::Serialize;

use super::Control;
use crate::output;

/// What a run found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// How long it ran.
    pub seconds: u64,
    /// What it was made from.
    pub seed: u64,
    /// Consumers killed.
    pub kills: u64,
    /// Producers killed.
    pub producer_kills: u64,
    /// Processes stopped for a while.
    pub stops: u64,
    /// Children forked that lived on.
    pub forks: u64,
    /// Leases claimed.
    pub claims: u64,
    /// Contents that changed while they were held.
    pub early_reuse: u64,
    /// Blocks that came back twice, grants claimed too often.
    pub double_retire: u64,
    /// Blocks that did not come back.
    pub leaked_blocks: u64,
    /// Processes that did nothing any more.
    pub hung: u64,
    /// The longest time from a death to the return of what was held, in milliseconds, quarantine included.
    pub max_death_to_reclaim_ms: f64,
    /// Processes that ended by themselves with an error; which, and why, is on standard error.
    pub crashes: u64,
    /// The control that was run instead of the library.
    pub control: Option<Control>,
}

impl Report {
    /// Says whether nothing was found, and no process crashed.
    pub fn is_good(&self) -> bool {
        !self.has_finding() && self.crashes == 0
    }

    fn has_finding(&self) -> bool {
        self.early_reuse + self.double_retire + self.leaked_blocks + self.hung > 0
    }

    /// Makes one JSON object: the fields, and `ok`.
    pub fn json(&self) -> String {
        output::judged(self.is_good(), self)
    }

    /// Makes what people read.
    pub fn text(&self) -> String {
        let Report { seconds, seed, kills, producer_kills, stops, forks, claims, .. } = self;
        let Report { early_reuse, double_retire, leaked_blocks, hung, max_death_to_reclaim_ms, crashes, .. } = self;
        let last = match (self.control, self.has_finding()) {
            (None, false) if *crashes > 0 => "A process crashed.",
            (None, false) => "Nothing was lost, nothing was freed early.",
            (None, true) => "Something went wrong.",
            (Some(_), false) => "The control's fault was not found: run it for longer.",
            (Some(_), true) => "The control's fault was found, as it must be.",
        };
        format!(
            "{seconds} s with seed {seed}: {claims} leases claimed\n\
             {kills} consumers and {producer_kills} producers killed, {stops} processes stopped, {forks} forked\n\
             used again while held: {early_reuse}, ended twice: {double_retire}, leaked blocks: {leaked_blocks}, \
             hung: {hung}, crashed: {crashes}\n\
             at most {max_death_to_reclaim_ms:.0} ms from a death to the return of what was held\n{last}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_and_a_crash_are_no_good_and_a_crash_is_no_finding() {
        let good = Report { kills: 7, claims: 9, ..Report::default() };
        assert!(good.is_good() && good.json().starts_with("{\"ok\":true,"), "{}", good.json());
        let findings = [
            Report { early_reuse: 1, ..good.clone() },
            Report { double_retire: 1, ..good.clone() },
            Report { leaked_blocks: 1, ..good.clone() },
            Report { hung: 1, ..good.clone() },
        ];
        for report in findings {
            assert!(!report.is_good() && report.has_finding(), "{report:?}");
            assert!(report.json().starts_with("{\"ok\":false,"), "{}", report.json());
        }
        let crashed = Report { crashes: 1, ..good };
        assert!(!crashed.is_good() && crashed.text().ends_with("A process crashed."), "{}", crashed.text());
        let control = Report { control: Some(Control::Counter), ..crashed };
        assert!(
            control.text().ends_with("The control's fault was not found: run it for longer."),
            "{}",
            control.text()
        );
    }
}
