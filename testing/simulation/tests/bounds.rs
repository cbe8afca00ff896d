//! The plan keeps its bounds with few hosts, and a plan that reads everything from the origin does
//! not.

use simulation::outcome::Outcome;
use simulation::report::Report;
use simulation::scenario::Trouble;
use simulation::world::{Policy, run};

const HOSTS: [u32; 5] = [2, 3, 8, 9, 64];
const SEEDS: std::ops::RangeInclusive<u64> = 1..=4;

/// With equal hosts: two rounds above the optimum at most, two reads at the origin, one read for
/// each host.
fn keeps_the_bound(run: &Outcome) -> bool {
    run.unfilled == 0
        && run.rounds <= run.optimum + 2.0
        && run.origin_reads <= 2
        && run.read_per_host < 1.001
}

#[test]
fn equal_hosts_take_two_rounds_above_the_optimum_at_most_and_the_origin_two_reads() {
    for (hosts, seed) in HOSTS
        .into_iter()
        .flat_map(|hosts| SEEDS.map(move |seed| (hosts, seed)))
    {
        let run = run(hosts, Trouble::None, seed, Policy::Plan);
        assert!(keeps_the_bound(&run), "seed {seed}: {run:?}");
        assert!(run.asked_per_host < 4.0, "seed {seed}: {run:?}");
    }
}

#[test]
fn reading_everything_from_the_origin_misses_the_bound() {
    for hosts in [8, 9, 64] {
        let run = run(hosts, Trouble::None, 1, Policy::OriginOnly);
        assert_eq!(run.unfilled, 0);
        assert!(!keeps_the_bound(&run), "{run:?}");
        assert!(
            run.rounds > run.optimum + 2.0 && run.origin_reads == hosts - 1,
            "{run:?}"
        );
    }
}

#[test]
fn slow_dying_and_lying_hosts_keep_nobody_from_the_object() {
    for trouble in Trouble::EACH {
        for (hosts, seed) in HOSTS
            .into_iter()
            .flat_map(|hosts| SEEDS.map(move |seed| (hosts, seed)))
        {
            let run = run(hosts, trouble, seed, Policy::Plan);
            assert_eq!(run.unfilled, 0, "seed {seed}: {run:?}");
            assert!(
                hosts < 8 || run.rounds <= 3.0 * run.optimum,
                "seed {seed}: {run:?}"
            );
            assert!(
                run.origin_reads <= 2 + run.died + hosts / 8,
                "seed {seed}: {run:?}"
            );
            assert!(hosts < 8 || run.read_per_host < 1.5, "seed {seed}: {run:?}");
        }
    }
}

#[test]
fn a_seed_gives_the_same_run() {
    let twice = [(); 2].map(|()| format!("{:?}", run(64, Trouble::All, 5, Policy::Plan)));
    assert_eq!(twice[0], twice[1]);
    assert_ne!(
        twice[0],
        format!("{:?}", run(64, Trouble::All, 6, Policy::Plan))
    );
}

#[test]
fn the_document_has_the_table_of_the_shipped_plan() {
    let cells = |row: &str| {
        row.split('|')
            .map(|cell| cell.trim().to_owned())
            .collect::<Vec<_>>()
    };
    let document = include_str!("../../../docs/HOSTS.md");
    let document: Vec<_> = document.lines().map(cells).collect();
    let table = Report::new(1, 64).table();
    let rows: Vec<_> = table
        .lines()
        .filter(|row| !row.contains("---"))
        .map(cells)
        .collect();
    assert!(rows.len() > 10, "{table}");
    for row in rows {
        assert!(
            document.contains(&row),
            "docs/HOSTS.md lacks {row:?}: make the table again, its command is above it"
        );
    }
}
