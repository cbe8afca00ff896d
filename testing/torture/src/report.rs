//! What a run found, for people and for programs.

use serde::Serialize;

use super::options::Control;
use gpu_ipc_cli::output;

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
    /// Of these, leases of blocks that lie across pieces of memory that grows in place.
    pub across: u64,
    /// Whether the device has ranges of addresses, so that memory can grow in place.
    #[serde(skip)]
    pub can_grow: bool,
    /// Contents that changed while they were held.
    pub early_reuse: u64,
    /// Blocks that came back twice, grants claimed too often.
    pub double_retire: u64,
    /// Blocks that did not come back.
    pub leaked_blocks: u64,
    /// Regions of the device's memory that did not come back when everybody had left.
    pub leaked_regions: u64,
    /// Producers whose descriptors, threads or memory grew.
    pub grown: u64,
    /// Allocations that found no room on a device that has more than enough.
    pub out_of_memory: u64,
    /// Processes that did nothing any more.
    pub hung: u64,
    /// Connections that said nothing.
    pub silent: u64,
    /// Connections that said half a hello, or anything, with descriptors.
    pub nonsense: u64,
    /// Connections that said hello and hung up.
    pub abandoned: u64,
    /// Connections that were shut for writing.
    pub half_closed: u64,
    /// Connects whose time was over.
    pub gave_up: u64,
    /// Connections of a user that is not let in, and was told so.
    pub strangers: u64,
    /// Whether this process may connect as another user: root alone may.
    #[serde(skip)]
    pub has_strangers: bool,
    /// Connects as they should be, by processes that did all of that too.
    pub visits: u64,
    /// Deaths whose blocks came back to a producer that lives.
    pub reclaims: u64,
    /// The longest time from a death to the return of what was held, in milliseconds, quarantine
    /// included.
    pub max_death_to_reclaim_ms: f64,
    /// Processes that ended by themselves with an error; which, and why, is on standard error.
    pub crashes: u64,
    /// The control that was run instead of the library.
    pub control: Option<Control>,
}

impl Report {
    /// Says whether nothing was found, no process crashed, and as much was done as makes that worth
    /// something.
    pub fn is_good(&self) -> bool {
        !self.has_finding() && self.crashes == 0 && self.shortfalls().is_empty()
    }

    fn has_finding(&self) -> bool {
        self.early_reuse + self.double_retire + self.leaked_blocks + self.hung > 0
            || self.leaked_regions + self.grown + self.out_of_memory > 0
    }

    /// Lists what was done less often than its floor: a tenth or less of what a machine with two
    /// busy cores does.
    pub fn shortfalls(&self) -> Vec<String> {
        if self.control.is_some() {
            return Vec::new();
        }
        let floors = [
            ("leases claimed", self.claims, 20 * self.seconds),
            (
                "leases claimed of blocks across pieces",
                self.across,
                if self.can_grow { self.seconds / 2 } else { 0 },
            ),
            ("consumers killed", self.kills, self.seconds / 4),
            ("producers killed", self.producer_kills, self.seconds / 20),
            ("processes stopped", self.stops, self.seconds / 2),
            ("children forked", self.forks, self.seconds / 10),
            ("connections that said nothing", self.silent, self.seconds),
            (
                "connections that talked nonsense",
                self.nonsense,
                self.seconds / 2,
            ),
            (
                "connections that were abandoned",
                self.abandoned,
                self.seconds / 2,
            ),
            (
                "connections that were shut for writing",
                self.half_closed,
                self.seconds / 4,
            ),
            ("connects that were given up", self.gave_up, self.seconds),
            (
                "connections of another user",
                self.strangers,
                if self.has_strangers {
                    self.seconds / 10
                } else {
                    0
                },
            ),
            ("connects of visitors", self.visits, self.seconds / 2),
            (
                "deaths whose blocks came back",
                self.reclaims,
                self.seconds / 10,
            ),
        ];
        output::below(floors)
    }

    /// Makes one JSON object: the fields, and `ok`.
    pub fn json(&self) -> String {
        output::judged_run(self.is_good(), self, self.shortfalls())
    }

    /// Makes what people read.
    pub fn text(&self) -> String {
        let Report {
            seconds,
            seed,
            kills,
            producer_kills,
            stops,
            forks,
            claims,
            across,
            ..
        } = self;
        let Report {
            early_reuse,
            double_retire,
            leaked_blocks,
            hung,
            max_death_to_reclaim_ms,
            crashes,
            ..
        } = self;
        let Report {
            reclaims,
            leaked_regions,
            grown,
            out_of_memory,
            ..
        } = self;
        let Report {
            silent,
            nonsense,
            abandoned,
            half_closed,
            gave_up,
            strangers,
            visits,
            ..
        } = self;
        let short = self.shortfalls().join("; ");
        let last = match (self.control, self.has_finding()) {
            (None, false) if *crashes > 0 => "A process crashed.".to_owned(),
            (None, false) if !short.is_empty() => {
                format!("Too little was done to say anything: {short}.")
            }
            (None, false) => "Nothing was lost, nothing was freed early.".to_owned(),
            (None, true) => "Something went wrong.".to_owned(),
            (Some(_), false) => "The control's fault was not found: run it for longer.".to_owned(),
            (Some(_), true) => "The control's fault was found, as it must be.".to_owned(),
        };
        format!(
            "{seconds} s with seed {seed}: {claims} leases claimed, {across} of them of blocks across pieces\n\
             {kills} consumers and {producer_kills} producers killed, {stops} processes stopped, {forks} forked\n\
             connections: {silent} silent, {nonsense} nonsense, {abandoned} abandoned, {half_closed} shut for \
             writing, {gave_up} given up, {strangers} of another user, {visits} let in\n\
             used again while held: {early_reuse}, ended twice: {double_retire}, leaked blocks: {leaked_blocks}, \
             leaked regions: {leaked_regions}\n\
             out of memory: {out_of_memory}, grown: {grown}, hung: {hung}, crashed: {crashes}\n\
             {reclaims} deaths whose blocks came back, after {max_death_to_reclaim_ms:.0} ms at most\n{last}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_and_a_crash_are_no_good_and_a_crash_is_no_finding() {
        let good = Report {
            kills: 7,
            claims: 9,
            ..Report::default()
        };
        assert!(
            good.is_good() && good.json().starts_with("{\"ok\":true,"),
            "{}",
            good.json()
        );
        let findings = [
            Report {
                early_reuse: 1,
                ..good.clone()
            },
            Report {
                double_retire: 1,
                ..good.clone()
            },
            Report {
                leaked_blocks: 1,
                ..good.clone()
            },
            Report {
                hung: 1,
                ..good.clone()
            },
            Report {
                leaked_regions: 1,
                ..good.clone()
            },
            Report {
                grown: 1,
                ..good.clone()
            },
            Report {
                out_of_memory: 1,
                ..good.clone()
            },
        ];
        for report in findings {
            assert!(!report.is_good() && report.has_finding(), "{report:?}");
            assert!(
                report.json().starts_with("{\"ok\":false,"),
                "{}",
                report.json()
            );
        }
        let idle = Report {
            seconds: 60,
            ..good.clone()
        };
        assert!(
            !idle.is_good() && !idle.has_finding(),
            "a minute in which next to nothing was done: {idle:?}"
        );
        assert!(
            idle.text().contains("9 leases claimed, not 1200"),
            "{}",
            idle.text()
        );
        let busy = Report {
            claims: 1200,
            ..idle
        };
        let grew = |across| {
            Report {
                can_grow: true,
                across,
                ..busy.clone()
            }
            .text()
        };
        assert!(
            !busy.text().contains("across pieces, not"),
            "the device cannot: {}",
            busy.text()
        );
        assert!(
            grew(29).contains("29 leases claimed of blocks across pieces, not 30"),
            "{}",
            grew(29)
        );
        assert!(!grew(30).contains("across pieces, not"), "{}", grew(30));
        let crashed = Report { crashes: 1, ..good };
        assert!(
            !crashed.is_good() && crashed.text().ends_with("A process crashed."),
            "{}",
            crashed.text()
        );
        let control = Report {
            control: Some(Control::Counter),
            ..crashed
        };
        assert!(
            control
                .text()
                .ends_with("The control's fault was not found: run it for longer."),
            "{}",
            control.text()
        );
    }
}
