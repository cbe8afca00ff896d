//! A hundred hosts of 10,000 objects find every name at a cost of their number, and nobody is told
//! that a name is nobody's which an honest host has; the control is.

use gateway::message::MOST_ANSWER;
use simulation::discovery::{Faults, Network, Rule};

const HOSTS: u32 = 100;
const OBJECTS: u32 = 10_000;
const SEARCHES: u64 = 200;

#[test]
fn a_search_costs_two_messages_a_host_and_nothing_for_each_object() {
    let mut network = Network::new(HOSTS, OBJECTS, Faults::default(), 1);
    for _ in 0..SEARCHES {
        network.search(Rule::Shipped);
    }
    let traffic = network.traffic;
    println!("{traffic:?}");
    assert_eq!(
        traffic.announced,
        u64::from(HOSTS),
        "a token a host, and none an object"
    );
    assert_eq!(traffic.messages, SEARCHES * 2 * u64::from(HOSTS));
    // Questions of about 60 bytes, and answers of 17 or 190.
    assert!(
        traffic.bytes / SEARCHES < 100 * u64::from(HOSTS),
        "{traffic:?}"
    );
    let [found, nobody, silence] = traffic.ended;
    assert!(
        found > 0 && nobody > 0 && silence == 0 && traffic.wrong == 0,
        "{traffic:?}"
    );
}

#[test]
fn the_list_of_a_host_is_whole_and_a_page_has_a_bound() {
    let mut network = Network::new(2, OBJECTS, Faults::default(), 1);
    let all = network.list(1);
    assert_eq!(all.len(), OBJECTS as usize + 1, "its own, and a replica");
    assert!(all.is_sorted_by(|a, b| (&a.name, a.epoch) < (&b.name, b.epoch)));
    let traffic = network.traffic;
    println!("{traffic:?}");
    assert!(traffic.largest < MOST_ANSWER as u64 / 8, "{traffic:?}");
}

/// A network in which everything goes wrong.
fn troubled(seed: u64) -> Network {
    let faults = Faults {
        lost: 300,
        repeated: 5,
        silent: 60,
        liars: 20,
    };
    Network::new(40, 50, faults, seed)
}

#[test]
fn nobody_is_said_of_no_name_that_an_honest_host_has() {
    let mut ended = [0; 3];
    for seed in 1..=8 {
        let mut network = troubled(seed);
        for _ in 0..SEARCHES {
            network.search(Rule::Shipped);
        }
        assert_eq!(
            network.traffic.wrong, 0,
            "seed {seed}: {:?}",
            network.traffic
        );
        for (sum, more) in ended.iter_mut().zip(network.traffic.ended) {
            *sum += more;
        }
    }
    println!("{ended:?}");
    assert!(ended.iter().all(|searches| *searches > 0), "{ended:?}");
}

#[test]
fn the_control_says_nobody_of_names_that_are_there() {
    let wrong = |seed| {
        let mut network = troubled(seed);
        for _ in 0..SEARCHES {
            network.search(Rule::SilenceIsNo);
        }
        network.traffic.wrong
    };
    assert!((1..=8).map(wrong).sum::<u64>() > 0, "the control must fail");
}
