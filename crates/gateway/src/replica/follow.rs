//! Follows removals: a name that was removed at its home goes here too, and does not come back.
//!
//! Looked at again and again, and not told once: so a message that was lost, a gateway that was
//! away and a replica that was committed in the moment of the removal are all found at the next
//! look.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpu_ipc::broker::Epoch;
use zenoh::Wait;

use crate::local::Local;
use crate::error::Result;
use crate::message::Incarnation;
use crate::net::call::{Answer, Question, ask};
use crate::net::key::{Gateway, ROOT, escape, unescape};

/// How long a home may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Names in one question.
const MOST_NAMES: usize = 10;

/// Finds the gateways of a host; of all hosts for none.
pub fn gateways(session: &zenoh::Session, host: Option<&str>) -> Vec<Gateway> {
    let host = host.map_or("*".to_owned(), escape);
    let query = session
        .liveliness()
        .get(format!("{ROOT}/{host}/*/live"))
        .timeout(PATIENCE);
    let Ok(replies) = query.wait() else {
        return Vec::new();
    };
    let mut found = BTreeSet::new();
    while let Ok(reply) = replies.recv() {
        let Ok(sample) = reply.result() else { continue };
        let chunks: Vec<&str> = sample.key_expr().as_str().split('/').collect();
        let ["gpu-ipc", "1", host, incarnation, "live"] = chunks[..] else {
            continue;
        };
        let incarnation = incarnation
            .parse::<gpu_ipc::broker::Identity>()
            .ok()
            .map(|number| Incarnation(number.0));
        if let (Some(host), Some(incarnation)) = (unescape(host), incarnation) {
            found.insert(Gateway { host, incarnation });
        }
    }
    found.into_iter().collect()
}

/// Looks once, and returns how many objects were removed.
///
/// # Errors
///
/// What the broker gives.
pub fn look(local: &Local, session: &zenoh::Session) -> Result<u64> {
    let mut replicas: BTreeMap<String, BTreeMap<String, Vec<u64>>> = BTreeMap::new();
    for row in local.list()?.objects {
        if let (Some(home), "visible") = (row.home, row.state.as_str()) {
            replicas
                .entry(home)
                .or_default()
                .entry(row.name)
                .or_default()
                .push(row.epoch);
        }
    }
    let mut gone = 0;
    for (home, names) in replicas {
        let Some(gateway) = gateways(session, Some(&home)).into_iter().next() else {
            continue;
        };
        let all: Vec<String> = names.keys().cloned().collect();
        for some in all.chunks(MOST_NAMES) {
            let question = Question::Removed(some.to_vec());
            let Some(answered) = ask(session, &gateway, &question, PATIENCE)?.wait() else {
                continue;
            };
            let Answer::Removed(removed) = answered.answer else {
                continue;
            };
            for (name, up_to) in removed {
                let Some(epochs) = names.get(&name) else {
                    continue;
                };
                gone += remove(local, &name, epochs, up_to);
            }
        }
    }
    Ok(gone)
}

fn remove(local: &Local, name: &str, epochs: &[u64], up_to: u64) -> u64 {
    let over: Vec<u64> = epochs
        .iter()
        .copied()
        .filter(|epoch| *epoch <= up_to)
        .collect();
    if over.is_empty() {
        return 0;
    }
    // All of a name at once is remembered for ever.
    let asked = if over.len() == epochs.len() {
        vec![0]
    } else {
        over.clone()
    };
    for epoch in asked {
        match local.client.remove_epoch(name, Epoch(epoch)) {
            Ok(_) => tracing::info!(name, up_to, "removed, as at its home"),
            Err(error) => tracing::warn!(name, %error, "a replica that its home has removed stays"),
        }
    }
    over.len() as u64
}
