//! What a run found, for people and for programs.

use serde::Serialize;

use super::Control;

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
    /// The control that was run instead of the library.
    pub control: Option<Control>,
}

impl Report {
    /// Says whether nothing was found.
    pub fn is_good(&self) -> bool {
        self.early_reuse == 0 && self.double_retire == 0 && self.leaked_blocks == 0 && self.hung == 0
    }

    /// Makes one JSON object.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("it is made of strings and numbers")
    }

    /// Makes what people read.
    pub fn text(&self) -> String {
        let Report { seconds, seed, kills, producer_kills, stops, forks, claims, .. } = self;
        let Report { early_reuse, double_retire, leaked_blocks, hung, max_death_to_reclaim_ms, .. } = self;
        let last = match (self.control, self.is_good()) {
            (None, true) => "Nothing was lost, nothing was freed early.",
            (None, false) => "Something went wrong.",
            (Some(_), true) => "The control's fault was not found: run it for longer.",
            (Some(_), false) => "The control's fault was found, as it must be.",
        };
        format!(
            "{seconds} s with seed {seed}: {claims} leases claimed\n\
             {kills} consumers and {producer_kills} producers killed, {stops} processes stopped, {forks} forked\n\
             used again while held: {early_reuse}, ended twice: {double_retire}, leaked blocks: {leaked_blocks}, \
             hung: {hung}\n\
             at most {max_death_to_reclaim_ms:.0} ms from a death to the return of what was held\n{last}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_four_counts_decide() {
        let good = Report { kills: 7, claims: 9, ..Report::default() };
        assert!(good.is_good());
        assert!(!Report { early_reuse: 1, ..good.clone() }.is_good());
        assert!(!Report { double_retire: 1, ..good.clone() }.is_good());
        assert!(!Report { leaked_blocks: 1, ..good.clone() }.is_good());
        assert!(!Report { hung: 1, ..good }.is_good());
    }
}
