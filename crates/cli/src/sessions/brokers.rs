//! The broker of this user, as one looks at it from outside.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpu_ipc::broker::client::broker_dir;
use gpu_ipc::broker::server::listing::{Listing, Shelf};
use gpu_ipc::broker::server::lock;
use gpu_ipc::broker::{Client, ObjectError};
use gpu_ipc::{BackendKind, Error};

use super::text::{bytes, cut, time};
use crate::device::explain;

/// A broker's directory, and what came of asking there.
#[derive(Clone, Debug)]
pub struct SeenBroker {
    /// The directory.
    pub dir: PathBuf,
    /// The answer.
    pub state: BrokerState,
}

/// What came of asking a broker.
#[derive(Clone, Debug)]
pub enum BrokerState {
    /// It answered.
    Serves(Box<Listing>),
    /// This process has the directory's lock and does not answer: it hangs or is stopped, and bars
    /// its successor.
    Hung(u32),
    /// It cannot be asked: why, and what to do.
    Unknown(String),
}

/// What a broker is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Depth {
    /// Sums, which cost the same however many objects there are.
    Sums,
    /// All objects.
    Objects,
}

/// Asks the broker of the default directory, or of one that is named; none where nobody listens,
/// unless it was named.
pub fn look(named: Option<&Path>, asked: Depth, timeout: Duration) -> Option<SeenBroker> {
    let dir = broker_dir(named).ok()?;
    let holder = lock::holder(&dir.join("lock"));
    if named.is_none() && holder.is_none() {
        return None;
    }
    let state = match (ask(&dir, asked, timeout), holder) {
        (Ok(listing), _) => BrokerState::Serves(Box::new(listing)),
        // Nobody listens: the last one is gone.
        (Err(ObjectError::Gpu(Error::Connect { .. })), _) if named.is_none() => return None,
        (Err(ObjectError::Gpu(Error::Deadline { .. })), Some(holder)) => BrokerState::Hung(holder),
        (Err(error), _) => BrokerState::Unknown(explain(&error)),
    };
    Some(SeenBroker { dir, state })
}

fn ask(dir: &Path, asked: Depth, timeout: Duration) -> Result<Listing, ObjectError> {
    // The question is about no memory: any device will do.
    let gpu = gpu_ipc::backend::detect_only(BackendKind::Host)?.first(BackendKind::Host)?;
    let client = Client::builder(gpu)
        .dir(dir)
        .name("gpu-ipc")
        .patience(timeout)
        .connect()?;
    match asked {
        Depth::Sums => client.sums(),
        Depth::Objects => client.list(),
    }
}

/// Writes what people read: at most 80 columns, but for paths and reasons.
pub fn table(seen: &SeenBroker) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_table(&mut text, seen);
    text
}

fn write_table(text: &mut String, seen: &SeenBroker) -> std::fmt::Result {
    let dir = seen.dir.display();
    let listing = match &seen.state {
        BrokerState::Serves(listing) => listing,
        BrokerState::Hung(pid) => {
            writeln!(text, "HUNG     {dir}")?;
            return writeln!(
                text,
                "         its broker, process {pid}, does not answer: it hangs or is stopped"
            );
        }
        BrokerState::Unknown(why) => {
            writeln!(text, "UNKNOWN  {dir}")?;
            return writeln!(text, "         {why}");
        }
    };
    writeln!(text, "BROKER   {dir}")?;
    writeln!(text, "         {}", summary(listing))?;
    if listing.objects.is_empty() {
        return Ok(());
    }
    writeln!(
        text,
        "  {:<30} {:>8} {:>10} {:>8}  STATE",
        "OBJECT", "EPOCH", "BYTES", "READERS"
    )?;
    for row in &listing.objects {
        let epoch = if row.epoch == 0 {
            "-".into()
        } else {
            row.epoch.to_string()
        };
        let (name, size) = (cut(&row.name, 30), bytes(row.bytes));
        writeln!(
            text,
            "  {name:<30} {epoch:>8} {size:>10} {:>8}  {}",
            row.readers.len(),
            row.state
        )?;
    }
    Ok(())
}

/// Says in a line what a broker has.
pub fn summary(listing: &Listing) -> String {
    let Shelf {
        kept,
        most,
        missing,
        silent_s,
        ..
    } = &listing.shelf;
    let keeper = match listing.keeper.as_str() {
        "fed" => "keeper has all".into(),
        "absent" => "KEEPER IS AWAY".into(),
        "full" => format!("KEEPER FULL ({kept} of {most}), {missing} not kept"),
        "silent" => format!("KEEPER SILENT for {silent_s} s"),
        _ => "no keeper".to_owned(),
    };
    let age = time(Duration::from_secs(listing.age_s));
    format!(
        "process {}, {} objects of {}, {keeper}, for {age}",
        listing.pid,
        listing.count(),
        bytes(listing.bytes)
    )
}

/// Makes what programs read.
pub fn to_json(seen: &SeenBroker) -> serde_json::Value {
    let dir = seen.dir.display().to_string();
    match &seen.state {
        BrokerState::Serves(listing) => {
            serde_json::json!({ "dir": dir, "state": "alive", "broker": listing })
        }
        BrokerState::Hung(pid) => serde_json::json!({ "dir": dir, "state": "hung", "pid": pid }),
        BrokerState::Unknown(why) => {
            serde_json::json!({ "dir": dir, "state": "unknown", "why": why })
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use gpu_ipc::broker::server::listing::Row;

    pub fn listing() -> Listing {
        let row = |name: &str, epoch, state: &str| Row {
            name: name.into(),
            epoch,
            identity: "0".repeat(32),
            bytes: 5 << 30,
            owner: 1000,
            state: state.into(),
            ..Row::default()
        };
        Listing {
            pid: 4_194_304,
            age_s: 61,
            keeper: "fed".into(),
            bytes: 10 << 30,
            restored: 1,
            commits: 3,
            opens: 4,
            aborted: 5,
            objects: vec![
                row("a-name-that-is-longer-than-thirty-characters", 7, "visible"),
                row("next", 0, "filling"),
            ],
            ..Listing::default()
        }
    }

    #[test]
    fn a_summary_says_each_state_of_the_keeper_with_its_numbers() {
        for (keeper, words) in [
            ("fed", "keeper has all"),
            ("absent", "KEEPER IS AWAY"),
            ("full", "KEEPER FULL (4 of 5), 2 not kept"),
            ("silent", "KEEPER SILENT for 12 s"),
            ("none", "no keeper"),
        ] {
            let shelf = Shelf {
                kept: 4,
                most: 5,
                missing: 2,
                silent_s: 12,
                ..Shelf::default()
            };
            let said = summary(&Listing {
                keeper: keeper.into(),
                shelf,
                ..listing()
            });
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn a_broker_fits_80_columns() {
        let state = BrokerState::Serves(Box::new(listing()));
        let text = table(&SeenBroker {
            dir: "/run/objects".into(),
            state,
        });
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        for word in [
            "BROKER   /run/objects",
            "process 4194304, 2 objects of 10.0 GiB, keeper has all",
            "5.00 GiB",
            "filling",
        ] {
            assert!(text.contains(word), "no {word:?} in\n{text}");
        }
        let hung = table(&SeenBroker {
            dir: "/run/objects".into(),
            state: BrokerState::Hung(12),
        });
        assert!(
            hung.contains("HUNG     /run/objects") && hung.contains("process 12, does not answer"),
            "{hung}"
        );
    }
}
