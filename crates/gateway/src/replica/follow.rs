//! Follows removals: a name that was removed at its home goes here too, and does not come back.
//!
//! Looked at again and again, and not told once: so a message that was lost, a gateway that was
//! away and a replica that was committed in the moment of the removal are all found at the next
//! look.

use std::collections::BTreeMap;
use std::time::Duration;

use gpu_ipc::broker::Epoch;

use crate::error::Result;
use crate::local::Local;
use crate::message::{Home, Removed};
use crate::net::call::{Answer, Question, ask};
use crate::net::live::Live;
use crate::net::session::Session;

/// How long a home may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of names in one question, which has 4,096: each byte may take six in JSON.
const MOST_BYTES: usize = 600;

/// Looks once, and returns how many objects were removed.
///
/// # Errors
///
/// What the broker gives.
pub fn look(local: &Local, session: &Session, live: &Live) -> Result<u64> {
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
        let home = Home::read(&home);
        for names_of_one in parts(names.keys()) {
            let question = Question::Removed(Removed {
                broker: home.broker,
                names: names_of_one,
            });
            // Another machine of the same name declines: the number is not its broker's.
            let removed = live.gateways(Some(&home.host)).iter().find_map(|gateway| {
                let asked = ask(session, gateway, &question, PATIENCE).ok()?;
                match asked.wait()?.answer {
                    Answer::Removed(removed) => Some(removed),
                    _ => None,
                }
            });
            let Some(removed) = removed else { continue };
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

/// Cuts names into parts of one question each.
fn parts<'a>(names: impl Iterator<Item = &'a String>) -> Vec<Vec<String>> {
    let mut parts: Vec<Vec<String>> = Vec::new();
    let mut bytes = MOST_BYTES;
    for name in names {
        bytes += name.len() + 3;
        match parts.last_mut() {
            Some(part) if bytes <= MOST_BYTES => part.push(name.clone()),
            _ => {
                bytes = name.len();
                parts.push(vec![name.clone()]);
            }
        }
    }
    parts
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_in_one_question_that_a_gateway_reads() {
        let names: Vec<String> = (0..99).map(|n| "\u{1}".repeat(255 - n) + "é").collect();
        let parts = parts(names.iter());
        assert_eq!(parts.concat(), names);
        for names in parts {
            let broker = [7; 16];
            let question = Question::Removed(Removed { broker, names });
            let bytes = serde_json::to_vec(&question).expect("a JSON");
            crate::net::call::read_question(&bytes).expect("short enough");
        }
    }
}
