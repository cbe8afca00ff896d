//! The process that speaks to the fabric: what it may do, and what its death costs.

use std::path::PathBuf;

use gateway::message::{Ask, Confirm, Incarnation, Release, Wanted};
use gateway::net::call::{Answer, Granted, Question};
use gateway::net::key::Gateway;
use gateway::net::session::Session;
use harness::program::{Running, run_to_end};
use rustix::process::{Pid, Signal, kill_process};

use crate::host::{Host, Service, WATCHDOG, child_of, contents, is_stopped, json, watch};
use crate::rogue::{answered, session_to};

const INSECURE: &str = "--insecure";

fn pair() -> ([Host; 2], Vec<Service>) {
    let hosts = [Host::new(0), Host::new(1)];
    let brokers = Host::brokers(&hosts);
    (hosts, brokers)
}

fn serve(host: &Host, peer: &Host) -> Service {
    host.gateway(&host.address, &peer.address, &[INSECURE.into()])
}

fn lease(session: &Session, gateway: &Gateway, number: u64) -> Granted {
    let ask = Question::Ask(Ask {
        asker: Incarnation([5; 16]),
        host: "reader".into(),
        number,
        wanted: Wanted {
            name: "model".into(),
            epoch: None,
            identity: None,
        },
        others: 0,
        last_resort: false,
    });
    match answered(session, gateway, &ask) {
        Answer::Granted(granted) => *granted,
        other => panic!("no lease: {other:?}"),
    }
}

fn confirm(granted: &Granted) -> Question {
    Question::Confirm(Confirm {
        lease: granted.grant.lease,
        identity: granted.grant.identity,
        number: 9,
        digest: None,
    })
}

fn proc(pid: Pid, file: &str) -> PathBuf {
    format!("/proc/{}/{file}", pid.as_raw_nonzero()).into()
}

fn read(pid: Pid, file: &str) -> String {
    let bytes = std::fs::read(proc(pid, file)).expect("it runs");
    String::from_utf8_lossy(&bytes).into_owned()
}

pub fn a_carrier_that_is_killed_is_started_again_and_costs_its_leases_alone() {
    let (hosts, _brokers) = pair();
    let bytes = contents(1 << 20, 1);
    hosts[0].put("model", &bytes);
    let mut origin = serve(&hosts[0], &hosts[0]);
    let _reader = serve(&hosts[1], &hosts[0]);
    let (session, gateway) = (session_to(&hosts[0]), hosts[0].serving());
    let granted = lease(&session, &gateway, 1);
    assert_eq!(
        answered(&session, &gateway, &confirm(&granted)),
        Answer::Is(true)
    );
    let first = origin.child("carrier");
    kill_process(first, Signal::KILL).expect("it runs");
    watch("its lease has ended", || {
        answered(&session, &gateway, &confirm(&granted)) == Answer::Is(false)
    });
    // The same gateway serves on, by another carrier.
    let report = hosts[1].json("pull", &["model"]);
    assert_eq!(
        (&report["from"], &report["bytes"]),
        (&"host-0".into(), &bytes.len().into())
    );
    assert!(hosts[1].get("model") == bytes);
    assert!(!origin.has_ended());
    assert_ne!(origin.child("carrier"), first);
    watch("the figures say so", || {
        let status = hosts[0].json("status", &[]);
        status[0]["figures"]["lost"].as_u64() == Some(1)
    });
}

pub fn a_carrier_that_pulls_and_is_killed_costs_another_attempt() {
    let (hosts, _brokers) = pair();
    let bytes = contents(1 << 20, 1);
    hosts[0].put("model", &bytes);
    let _gateways = [serve(&hosts[0], &hosts[0]), serve(&hosts[1], &hosts[0])];
    let mut pull = hosts[1].command("pull");
    pull.args(["model", "--json"])
        .env("GPU_IPC_GATEWAY_STEP", "stop:pull.reading");
    let pull = Running::start(&mut pull);
    watch("the pull begins to read", || is_stopped(pull.pid()));
    let carrier = child_of(pull.pid(), "carrier").expect("it has one");
    kill_process(carrier, Signal::KILL).expect("it runs");
    pull.signal(Signal::CONT);
    let report = json(&pull.end(WATCHDOG));
    assert_eq!(
        (&report["bytes"], &report["retries"]),
        (&bytes.len().into(), &1.into()),
        "{report}"
    );
    assert!(hosts[1].get("model") == bytes);
}

pub fn a_carrier_is_caged_and_maps_what_is_lent_alone() {
    let (hosts, _brokers) = pair();
    hosts[0].put("model", &contents(4096, 1));
    hosts[0].put("secret", &contents(4096, 2));
    let origin = serve(&hosts[0], &hosts[0]);
    let carrier = origin.child("carrier");
    let status = read(carrier, "status");
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    if rustix::process::geteuid().is_root() {
        assert!(
            status.contains("Uid:\t65534\t65534\t65534\t65534"),
            "{status}"
        );
        assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    }
    // Of its environment what UCX and NIXL read, and of files and sockets of the host none.
    let environment = read(carrier, "environ");
    assert!(
        environment.split('\0').all(|one| {
            let kept = [
                "UCX_",
                "NIXL_",
                "GPU_IPC_NIXL",
                "LD_LIBRARY_PATH",
                "VIRTUAL_ENV",
                "CONDA_",
            ];
            one.is_empty() || kept.iter().any(|kept| one.starts_with(kept))
        }),
        "{environment:?}"
    );
    let open = std::fs::read_dir(proc(carrier, "fd"))
        .expect("it runs")
        .flatten();
    let links: Vec<PathBuf> = open
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .collect();
    let unix = read(carrier, "net/unix");
    let is_unix = |link: &&PathBuf| {
        let inode = link.to_string_lossy();
        let inode = inode.trim_start_matches("socket:[").trim_end_matches(']');
        unix.lines()
            .any(|line| line.split_whitespace().nth(6) == Some(inode))
    };
    let sockets: std::collections::BTreeSet<_> = links.iter().filter(is_unix).collect();
    assert_eq!(sockets.len(), 1, "the gateway's alone: {links:?}");
    let lent = || -> Vec<String> {
        let maps = read(carrier, "maps");
        let of_objects = maps.lines().filter(|line| line.contains("gpu-ipc-host"));
        of_objects.map(str::to_owned).collect()
    };
    assert_eq!(lent(), [""; 0], "nothing is lent");
    let (session, gateway) = (session_to(&hosts[0]), hosts[0].serving());
    let granted = lease(&session, &gateway, 1);
    let mapped = lent();
    assert!(
        mapped.len() == 1 && mapped[0].contains(" r--s "),
        "{mapped:?}"
    );
    // The addresses that peers are told are the carrier's.
    let at = format!("{:x}-", granted.regions[0].0);
    assert!(mapped[0].starts_with(&at), "{at}: {mapped:?}");
    let release = Question::Release(Release {
        lease: granted.grant.lease,
    });
    assert_eq!(answered(&session, &gateway, &release), Answer::Is(true));
    watch("zeroes are in its place", || lent().is_empty());
    let maps = read(carrier, "maps");
    let kept = maps.lines().find(|line| line.starts_with(&at));
    assert!(kept.is_some_and(|line| line.contains(" r--p ")), "{kept:?}");
}

pub fn bytes_that_are_altered_on_the_way_are_found_and_not_committed() {
    let (hosts, _brokers) = pair();
    // One that is digested at once, and one that is digested meanwhile.
    let small = contents(64 << 10, 1);
    let large = contents(9 << 20, 2);
    hosts[0].put("small", &small);
    hosts[0].put("large", &large);
    let _gateways = [serve(&hosts[0], &hosts[0]), serve(&hosts[1], &hosts[0])];
    for (number, (name, bytes)) in [("small", &small), ("large", &large)]
        .into_iter()
        .enumerate()
    {
        let pull = |more: &[&str]| {
            let mut pull = hosts[1].command("pull");
            pull.args([name, "--json", "--transport", "tcp", INSECURE]);
            pull.args(["--peer", &hosts[0].address]).args(more);
            json(&run_to_end(&mut pull, WATCHDOG))
        };
        let said = pull(&["--attempts", "1", "--alter-at", "5000"]);
        let why = said["error"].as_str().unwrap_or_default();
        assert!(why.contains("altered them on the way"), "{said}");
        assert_eq!(
            hosts[1].local().list().expect("a list").objects.len(),
            number
        );
        let said = pull(&[]);
        assert_eq!(
            (&said["retries"], &said["checked"]),
            (&0.into(), &bytes.len().into()),
            "{said}"
        );
        assert!(&hosts[1].get(name) == bytes);
    }
    watch("the origin says so", || {
        hosts[0].json("status", &[])[0]["figures"]["differed"].as_u64() == Some(2)
    });
}
