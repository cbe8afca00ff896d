//! Rows of a broker with many objects: what a commit and a removal cost beside them.

use std::time::Instant;

use gpu_ipc::backend::thread;
use gpu_ipc::broker::{Client, Layout};
use rustix::process::{Resource, getrlimit};

use super::fixture::Stage;
use super::row::{Goal, Row};
use super::sample::Pairs;
use crate::device::explain;
use crate::failure::Result as Rows;
use crate::owner::Owner;

/// Objects that a broker has.
const MANY: u64 = 100_000;
/// Objects that it has where the floor is measured.
const FEW: u64 = 100;
/// Commits, and then removals, that are timed.
const TIMED: u64 = 200;
/// Descriptors of a broker that are no object's: one for each object is its manifest, for these
/// objects have no memory.
const SPARE: u64 = 2_048;
/// Clients that fill the broker.
const CLIENTS: usize = 8;

/// Both rows: with as many objects as a process may have descriptors for, 100,000 at most.
pub(super) fn rows(stage: &Stage) -> Rows<Vec<Row>> {
    let dir = format!("gpu-ipc-bench-many-{}", std::process::id());
    let owner = Owner::start(&stage.gpu, std::env::temp_dir().join(dir), &[])?;
    Ok(beside_many(stage, &owner)?)
}

fn beside_many(stage: &Stage, owner: &Owner) -> Result<Vec<Row>, String> {
    let client = owner.connect(&stage.gpu, "bench")?;
    let allowed = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let many = stage
        .choose(MANY, 2 * FEW)
        .min(allowed.saturating_sub(SPARE));
    let timed = stage.choose(TIMED, 5);
    let (mut commits, mut removals) = (Pairs::new(1), Pairs::new(1));
    fill(stage, owner, 0..FEW)?;
    time(&client, timed, &mut commits.floor, &mut removals.floor)?;
    fill(stage, owner, FEW..many)?;
    time(&client, timed, &mut commits.ours, &mut removals.ours)?;
    let there = client.sums().map_err(|e| explain(&e))?.count();
    if there != many {
        return Err(format!("the broker has {there} objects, and not {many}"));
    }
    let row = |name, what, floor_is, pairs| {
        let row = Row::new(name, what, floor_is).at(many, &many.to_string());
        let row = row.measured(pairs).goal(Goal::Times(1.5, 200_000.0));
        if many < MANY {
            row.note(format!(
                "{many} objects: a process may open {allowed} files here"
            ))
        } else {
            row
        }
    };
    Ok(vec![
        row(
            "object-commit-many",
            "commit of an object without parts, beside so many objects",
            "the same beside 100",
            commits,
        ),
        row(
            "object-remove-many",
            "removal of a name, beside so many objects",
            "the same beside 100",
            removals,
        ),
    ])
}

/// Puts objects of these numbers, by several clients at a time.
fn fill(stage: &Stage, owner: &Owner, numbers: std::ops::Range<u64>) -> Result<(), String> {
    let clients = (0..CLIENTS).map(|_| owner.connect(&stage.gpu, "bench"));
    let clients = clients.collect::<Result<Vec<Client>, String>>()?;
    std::thread::scope(|scope| {
        let put_all = |(offset, client): (usize, Client)| {
            let mine = numbers.clone().skip(offset).step_by(CLIENTS);
            move || {
                mine.into_iter()
                    .try_for_each(|number| put(&client, &format!("many{number}")))
            }
        };
        let threads: Vec<_> = clients
            .into_iter()
            .enumerate()
            .map(|client| thread::start_scoped(scope, "gpu-ipc-bench", put_all(client)))
            .collect::<Result<_, _>>()
            .map_err(|e| explain(&e))?;
        threads.into_iter().try_for_each(|thread| {
            let done = thread.join();
            done.unwrap_or_else(|_| Err("a thread of the bench panicked".into()))
        })
    })
}

fn time(
    client: &Client,
    count: u64,
    commits: &mut Vec<f64>,
    removals: &mut Vec<f64>,
) -> Result<(), String> {
    for number in 0..count {
        let name = format!("timed{number}");
        let start = Instant::now();
        put(client, &name)?;
        commits.push(start.elapsed().as_nanos() as f64);
        let start = Instant::now();
        client.remove(&name).map_err(|e| explain(&e))?;
        removals.push(start.elapsed().as_nanos() as f64);
    }
    Ok(())
}

fn put(client: &Client, name: &str) -> Result<(), String> {
    let layout = Layout::pack([], b"").map_err(|e| explain(&e))?;
    let writer = client.create(name, layout).map_err(|e| explain(&e))?;
    let committed = writer.commit(&[]).and_then(|commit| commit.wait());
    committed.map(drop).map_err(|e| explain(&e))
}
