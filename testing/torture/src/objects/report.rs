//! What a run found, for people and for programs.

use serde::Serialize;

use gpu_ipc_cli::output;

/// What a run found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// How long it ran.
    pub seconds: u64,
    /// What it was made from.
    pub seed: u64,
    /// Commits that were answered with an epoch.
    pub commits: u64,
    /// Commits that were asked for before the writes had ended.
    pub hasty: u64,
    /// Commits of objects that took a part over from the epoch before.
    pub taken: u64,
    /// Objects that were opened and compared byte by byte.
    pub opens: u64,
    /// Advances to another epoch, compared byte by byte.
    pub advances: u64,
    /// Sleeps that woke, compared byte by byte.
    pub wakes: u64,
    /// Pools adopted.
    pub adoptions: u64,
    /// Of these, after a death.
    pub heirs: u64,
    /// Blocks that were sealed and waited for.
    pub seals: u64,
    /// Listed blocks that a holder compared byte by byte.
    pub compared: u64,
    /// Blocks that a reader of a pool compared byte by byte, whole all along.
    pub looks: u64,
    /// Blocks that were given up while a reader copied them.
    pub torn: u64,
    /// Children forked of holders.
    pub children: u64,
    /// Holders that killed themselves, with a child or work left.
    pub deaths: u64,
    /// Holders killed.
    pub holder_kills: u64,
    /// Pools that a process adopted while another one that lives held it.
    pub doubled: u64,
    /// Writers killed.
    pub writer_kills: u64,
    /// Readers killed.
    pub reader_kills: u64,
    /// Brokers killed.
    pub broker_kills: u64,
    /// Keepers killed.
    pub keeper_kills: u64,
    /// Keepers that another one took everything over from; the broker was killed at once after
    /// half of them.
    pub upgrades: u64,
    /// Keepers that were stopped for seconds and were said to be silent.
    pub silences: u64,
    /// Keepers without room for every object that were said to be full.
    pub fills: u64,
    /// Processes of each kind stopped for a while: writers or holders, readers, brokers, keepers.
    pub stops: [u64; 4],
    /// Objects with other contents than their stamp's: halves.
    pub mixed: u64,
    /// Committed epochs that were not there.
    pub lost: u64,
    /// Readers that advanced to an older epoch, or whose addresses moved.
    pub backwards: u64,
    /// Brokers that served with the options of an earlier keeper than the one that started them.
    pub stale: u64,
    /// Times at which more brokers were there, for seconds, than one that serves and one that
    /// waits.
    pub piled: u64,
    /// Objects that were left at the end and that nobody should have any more.
    pub leaked: u64,
    /// Processes that did nothing any more.
    pub hung: u64,
    /// Processes that ended by themselves with an error; which, and why, is on standard error.
    pub crashes: u64,
    /// What ran is known to be wrong, which must be found.
    pub control: bool,
    /// It was about pools.
    pub pools: bool,
}

impl Report {
    /// Says whether nothing was found, no process crashed, and as much was done as makes that worth
    /// something.
    pub fn is_good(&self) -> bool {
        !self.has_finding() && self.crashes == 0 && self.shortfalls().is_empty()
    }

    /// Says whether something was found that may never be.
    pub fn has_finding(&self) -> bool {
        let of_brokers = self.stale + self.piled;
        self.mixed
            + self.lost
            + self.backwards
            + self.doubled
            + self.leaked
            + self.hung
            + of_brokers
            > 0
    }

    /// Lists what was done less often than its floor: a tenth or less of what a machine with two
    /// busy cores does.
    pub fn shortfalls(&self) -> Vec<String> {
        if self.control {
            return Vec::new();
        }
        let seconds = self.seconds;
        let floors = if self.pools {
            self.floors_of_pools()
        } else {
            self.floors_of_objects()
        };
        let owners = [
            ("brokers killed", self.broker_kills, seconds / 10),
            ("keepers killed", self.keeper_kills, seconds / 20),
            ("keepers replaced", self.upgrades, seconds / 30),
            ("keepers found silent", self.silences, seconds / 60),
            ("keepers found full", self.fills, seconds / 60),
            ("writers or holders stopped", self.stops[0], seconds / 20),
            ("readers killed", self.reader_kills, seconds / 10),
            ("readers stopped", self.stops[1], seconds / 20),
            ("brokers stopped", self.stops[2], seconds / 20),
            ("keepers stopped", self.stops[3], seconds / 20),
        ];
        output::below(floors.into_iter().chain(owners))
    }

    fn floors_of_pools(&self) -> Vec<(&'static str, u64, u64)> {
        let seconds = self.seconds;
        vec![
            ("pools adopted", self.adoptions, seconds / 2),
            ("pools adopted after a death", self.heirs, seconds / 10),
            ("blocks sealed", self.seals, 2 * seconds),
            ("blocks compared by a holder", self.compared, 4 * seconds),
            ("blocks compared by a reader", self.looks, 4 * seconds),
            ("blocks given up under a reader", self.torn, seconds / 60),
            ("holders killed", self.holder_kills, seconds / 10),
            ("holders that left work", self.deaths, seconds / 20),
            ("children of holders", self.children, seconds / 20),
        ]
    }

    fn floors_of_objects(&self) -> Vec<(&'static str, u64, u64)> {
        let seconds = self.seconds;
        vec![
            ("commits", self.commits, seconds),
            ("commits that came too early", self.hasty, seconds / 4),
            ("parts taken over", self.taken, seconds / 4),
            ("opens", self.opens, 2 * seconds),
            ("advances", self.advances, seconds / 4),
            ("wakes", self.wakes, seconds / 4),
            ("writers killed", self.writer_kills, seconds / 10),
        ]
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
            commits,
            hasty,
            taken,
            opens,
            advances,
            wakes,
            ..
        } = self;
        let Report {
            adoptions,
            heirs,
            seals,
            compared,
            looks,
            torn,
            children,
            deaths,
            holder_kills,
            doubled,
            ..
        } = self;
        let Report {
            writer_kills,
            reader_kills,
            broker_kills,
            keeper_kills,
            upgrades,
            silences,
            fills,
            stops,
            ..
        } = self;
        let Report {
            mixed,
            lost,
            backwards,
            leaked,
            hung,
            stale,
            piled,
            crashes,
            ..
        } = self;
        let short = self.shortfalls().join("; ");
        let last = match (self.control, self.has_finding()) {
            (true, false) => "The control's fault was not found: run it for longer.".to_owned(),
            (true, true) => "The control's fault was found, as it must be.".to_owned(),
            (false, true) => "Something went wrong.".to_owned(),
            (false, false) if *crashes > 0 => "A process crashed.".to_owned(),
            (false, false) if !short.is_empty() => {
                format!("Too little was done to say anything: {short}.")
            }
            (false, false) if self.pools => {
                "No half block was served, and no sealed one was lost.".to_owned()
            }
            (false, false) => "Every object was whole, and none was lost.".to_owned(),
        };
        let (done, killed) = if self.pools {
            (
                format!(
                    "{adoptions} adoptions, {heirs} after a death; {seals} blocks sealed; {compared} compared by \
                     holders, {looks} by readers, {torn} given up meanwhile"
                ),
                format!("{holder_kills} holders ({deaths} more left work, {children} children)"),
            )
        } else {
            (
                format!(
                    "{commits} commits, {hasty} asked for too early, {taken} with a part taken over; {opens} opens, \
                     {advances} advances and {wakes} wakes compared"
                ),
                format!("{writer_kills} writers"),
            )
        };
        format!(
            "{seconds} s with seed {seed}: {done}\n\
             killed: {killed}, {reader_kills} readers, {broker_kills} brokers, {keeper_kills} keepers; stopped: {} \
             writers or holders, {} readers, {} brokers, {} keepers; keepers: {upgrades} replaced, {silences} silent, \
             {fills} full\n\
             halves: {mixed}, lost: {lost}, backwards: {backwards}, doubled: {doubled}, leaked: {leaked}, hung: \
             {hung}, stale: {stale}, piled: {piled}, crashed: {crashes}\n{last}",
            stops[0], stops[1], stops[2], stops[3],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Report {
        let (seconds, kills) = (20, 2);
        Report {
            seconds,
            commits: 20,
            hasty: 5,
            taken: 5,
            opens: 40,
            advances: 5,
            wakes: 5,
            writer_kills: kills,
            reader_kills: kills,
            broker_kills: kills,
            keeper_kills: 1,
            upgrades: 1,
            stops: [1; 4],
            ..Report::default()
        }
    }

    #[test]
    fn a_run_is_good_when_enough_was_done_and_nothing_was_found() {
        assert!(
            good().is_good() && good().json().starts_with("{\"ok\":true,"),
            "{}",
            good().text()
        );
        assert!(
            good()
                .text()
                .ends_with("Every object was whole, and none was lost.")
        );
        for found in [
            Report { mixed: 1, ..good() },
            Report { lost: 1, ..good() },
            Report {
                backwards: 1,
                ..good()
            },
            Report {
                leaked: 1,
                ..good()
            },
            Report {
                doubled: 1,
                ..good()
            },
            Report { hung: 1, ..good() },
            Report { stale: 1, ..good() },
            Report { piled: 1, ..good() },
        ] {
            assert!(!found.is_good() && found.has_finding(), "{found:?}");
            assert!(
                Report {
                    control: true,
                    ..found
                }
                .text()
                .ends_with("as it must be.")
            );
        }
        assert!(
            !Report {
                crashes: 1,
                ..good()
            }
            .is_good()
        );
        for idle in [
            Report {
                commits: 19,
                ..good()
            },
            Report {
                opens: 39,
                ..good()
            },
            Report {
                broker_kills: 1,
                ..good()
            },
            Report {
                keeper_kills: 0,
                ..good()
            },
            Report {
                stops: [1, 1, 1, 0],
                ..good()
            },
        ] {
            assert!(!idle.is_good() && !idle.has_finding(), "{idle:?}");
            assert!(
                idle.text().contains("Too little was done"),
                "{}",
                idle.text()
            );
        }
        // What is done with objects says nothing of pools.
        let pools = Report {
            pools: true,
            ..good()
        };
        assert!(!pools.is_good() && pools.text().contains("0 pools adopted"));
        let control = Report {
            control: true,
            ..Report::default()
        };
        assert!(!control.has_finding() && control.text().ends_with("run it for longer."));
    }
}
