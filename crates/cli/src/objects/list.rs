//! `gpu-ipc objects`: what a broker has, and which processes read it.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::time::Duration;

use clap::{Args as Arguments, ValueEnum};
use gpu_ipc::broker::server::listing::{Listing, PoolRow, Process, Row, Shelf, Usage};

use super::{Asked, any_gpu};
use crate::device::explain;
use crate::sessions::text::time;
use crate::{Outcome, gateway, output, size};

/// Options of `objects`.
#[derive(Arguments, Debug)]
pub struct ObjectsOptions {
    /// Only the objects of this name; exit status 1 if there is none
    pub name: Option<String>,
    /// What comes first
    #[arg(long, value_enum, default_value = "name", value_name = "BY")]
    pub sort: Order,
    /// Which broker.
    #[command(flatten)]
    pub asked: Asked,
    /// List what the gateways of all hosts announce instead
    #[arg(long, conflicts_with = "name")]
    pub all_hosts: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// An order of objects.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// By name, then epoch.
    Name,
    /// The largest first.
    Bytes,
    /// The oldest first.
    Age,
    /// Those of the most readers first.
    Readers,
}

/// Prints the objects.
pub fn run(options: &ObjectsOptions) -> Outcome {
    if options.all_hosts {
        return gateway::all_hosts(options.asked.place.dir.as_deref(), options.json);
    }
    match list(options) {
        Ok(listing) if options.json => {
            output::conclude(&output::judged(true, &listing), Outcome::Good)
        }
        Ok(listing) => output::conclude(table(&listing).trim_end(), Outcome::Good),
        Err(why) => output::fail(&why, options.json, Outcome::Finding),
    }
}

fn list(options: &ObjectsOptions) -> Result<Listing, String> {
    let client = options.asked.connect(any_gpu()?, "gpu-ipc objects")?;
    let mut listing = client.list().map_err(|error| explain(&error))?;
    if let Some(name) = &options.name {
        listing.objects.retain(|row| row.name == *name);
        if listing.objects.is_empty() {
            let removed = listing.removed.iter().find(|removed| removed.name == *name);
            return Err(match removed {
                Some(removed) => {
                    format!("{name} was removed; its last epoch was {}", removed.up_to)
                }
                None => format!("no object that this user may know of has the name {name}"),
            });
        }
    }
    let objects = &mut listing.objects;
    match options.sort {
        Order::Name => objects.sort_by(|a, b| (&a.name, a.epoch).cmp(&(&b.name, b.epoch))),
        Order::Bytes => objects.sort_by_key(|row| Reverse(row.bytes)),
        Order::Age => objects.sort_by_key(|row| Reverse(row.age_s)),
        Order::Readers => objects.sort_by_key(|row| Reverse(row.readers.len())),
    }
    Ok(listing)
}

/// Says how the keeper is.
pub fn keeper(listing: &Listing) -> String {
    let Shelf {
        kept,
        most,
        missing,
        silent_s,
        why,
        ..
    } = &listing.shelf;
    let room = if *most > 0 {
        format!("{kept} of {most} descriptors")
    } else {
        format!("{kept} descriptors")
    };
    match listing.keeper.as_str() {
        "fed" => format!("the keeper has everything ({room})"),
        "absent" => "THE KEEPER IS AWAY: commits wait".into(),
        "full" => {
            format!("THE KEEPER IS FULL ({room}): {missing} objects go with the broker; {why}")
        }
        "silent" => format!("THE KEEPER HAS NOT ANSWERED for {silent_s} s: commits wait"),
        _ => "no keeper: objects go with the broker".into(),
    }
}

/// Says in a line what a broker has.
pub fn summary(listing: &Listing) -> String {
    let of = |limit: Option<u64>| {
        limit.map_or(String::new(), |limit| format!(" of {}", size::show(limit)))
    };
    format!(
        "process {}, {}{}; {}",
        listing.pid,
        size::show(listing.bytes),
        of(listing.limit),
        keeper(listing)
    )
}

/// Writes what cannot be told from a name otherwise: what is not printed, or turns a line around.
fn plain(name: &str) -> String {
    name.escape_debug().collect()
}

fn table(listing: &Listing) -> String {
    let mut text = format!("BROKER  {}\n", summary(listing));
    // Writing to a string cannot fail.
    if listing.users.len() > 1 {
        for Usage {
            uid,
            objects,
            bytes,
        } in &listing.users
        {
            let _ = writeln!(
                text,
                "        uid {uid}: {objects} objects, {}",
                size::show(*bytes)
            );
        }
    }
    if listing.objects.is_empty() {
        text.push_str("no objects\n");
        return text;
    }
    let width = listing
        .objects
        .iter()
        .map(|row| plain(&row.name).chars().count());
    let width = width.max().unwrap_or(0).max("NAME".len());
    let _ = writeln!(
        text,
        "{:width$}  {:>6}  {:>10}  {:>6}  {:>10}  {:8}  {:>6}  IDENTITY",
        "NAME", "EPOCH", "BYTES", "PARTS", "AGE", "STATE", "UID"
    );
    for row in &listing.objects {
        write_row(&mut text, row, width);
    }
    text
}

fn write_row(text: &mut String, row: &Row, width: usize) {
    let epoch = if row.epoch == 0 {
        "-".into()
    } else {
        row.epoch.to_string()
    };
    let (name, bytes) = (plain(&row.name), size::show(row.bytes));
    let age = time(Duration::from_secs(row.age_s));
    let home = row
        .home
        .as_ref()
        .map(|home| format!("  replica from {home}"));
    let marks = [
        home,
        row.pinned.then(|| "  pinned".into()),
        row.unkept.then(|| "  NOT KEPT".into()),
    ];
    let marks: String = marks.into_iter().flatten().collect();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{name:width$}  {epoch:>6}  {bytes:>10}  {:>6}  {age:>10}  {:8}  {:>6}  {}{marks}",
        row.parts, row.state, row.owner, row.identity
    );
    let writer = row.writer.iter().map(|writer| ("written", writer));
    let readers = row.readers.iter().map(|reader| ("read", reader));
    for (what, process) in writer.chain(readers) {
        let _ = writeln!(text, "    {what} by {}", shown(process));
    }
    if let Some(pool) = &row.pool {
        let _ = writeln!(text, "    {}", hold(pool));
    }
}

fn shown(process: &Process) -> String {
    let Process { pid, command, name } = process;
    format!("{pid} ({}) {}", plain(command), plain(name))
}

/// Says which process holds a pool.
fn hold(pool: &PoolRow) -> String {
    let PoolRow {
        generation,
        previous,
        holder,
        age_s,
    } = pool;
    let age = time(Duration::from_secs(*age_s));
    let before = match previous.as_str() {
        "never" => "there was no hold before".into(),
        how => format!("the hold before: {how}"),
    };
    match holder {
        Some(holder) => format!(
            "held by {}, generation {generation}, for {age}; {before}",
            shown(holder)
        ),
        None => format!("held by no process for {age}, generation {generation}; {before}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_says_each_state_of_the_keeper_with_its_numbers() {
        let of = |keeper: &str, shelf: Shelf| {
            let keeper = keeper.into();
            table(&Listing {
                keeper,
                shelf,
                ..Listing::default()
            })
        };
        let shelf = Shelf {
            kept: 4,
            most: 4,
            missing: 2,
            silent_s: 12,
            why: "start it with more room".into(),
            ..Shelf::default()
        };
        for (state, words) in [
            ("fed", "the keeper has everything (4 of 4 descriptors)"),
            ("absent", "THE KEEPER IS AWAY: commits wait"),
            (
                "full",
                "THE KEEPER IS FULL (4 of 4 descriptors): 2 objects go with the broker; start it with more room",
            ),
            (
                "silent",
                "THE KEEPER HAS NOT ANSWERED for 12 s: commits wait",
            ),
            ("none", "no keeper: objects go with the broker"),
        ] {
            let text = of(state, shelf.clone());
            assert!(
                text.contains(words) && text.ends_with("no objects\n"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_pool_has_its_holder_generation_and_age() {
        let pool = |holder: Option<Process>| Row {
            state: "pool".into(),
            pool: Some(PoolRow {
                generation: 3,
                previous: "died".into(),
                holder,
                age_s: 61,
            }),
            ..Row::default()
        };
        let holder = Process {
            pid: 7,
            command: "engine".into(),
            name: "rank 0".into(),
        };
        let text = table(&Listing {
            objects: vec![pool(Some(holder)), pool(None)],
            ..Listing::default()
        });
        assert!(
            text.contains("held by 7 (engine) rank 0, generation 3, for "),
            "{text}"
        );
        assert!(
            text.contains("held by no process for ") && text.contains("the hold before: died"),
            "{text}"
        );
    }

    #[test]
    fn a_name_cannot_break_the_table() {
        let row = |name: &str| Row {
            name: name.into(),
            parts: 3,
            age_s: 61,
            unkept: true,
            ..Row::default()
        };
        let objects = vec![row("a\u{202e}b\u{2028}c"), row("d")];
        let text = table(&Listing {
            objects,
            ..Listing::default()
        });
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(
            text.contains("NAME")
                && text.contains(r"a\u{202e}b\u{2028}c")
                && text.contains("NOT KEPT"),
            "{text}"
        );
    }
}
