//! Reads through a ring, with slots so small that each is filled many times.

use std::os::unix::process::ExitStatusExt;

use gateway::step::RING_STEPS;
use harness::program::{Running, run_to_end};
use serde_json::Value;

use crate::host::{Host, Service, WATCHDOG, contents, json, watch};

/// 64 pieces, eight times as many as a ring has slots, and some bytes more.
const BYTES: usize = (1 << 20) + 256;
const SLOTS: [&str; 3] = ["--insecure", "--slot-kib", "16"];

fn pair() -> ([Host; 2], Vec<Service>) {
    let hosts = [Host::new(0), Host::new(1)];
    let brokers = Host::brokers(&hosts);
    (hosts, brokers)
}

fn serve(hosts: &[Host; 2], which: usize, step: Option<&str>) -> Service {
    hosts[which].gateway_at(
        &hosts[which].address,
        &hosts[0].address,
        &SLOTS.map(String::from),
        step,
    )
}

/// Every way brings the same bytes; the choice is one of those that were tried, and `status` shows
/// it.
pub fn each_way_brings_every_byte_and_the_choice_is_shown() {
    let (hosts, _brokers) = pair();
    let _gateways = [serve(&hosts, 0, None), serve(&hosts, 1, None)];
    let ways = [
        (Some("direct"), None),
        (Some("pinned-ring"), None),
        (Some("pinned-ring"), Some("slots")),
        (None, None),
    ];
    for (number, (way, land)) in ways.into_iter().enumerate() {
        let (name, bytes) = (format!("model-{number}"), contents(BYTES, number as u32));
        hosts[0].put(&name, &bytes);
        hosts[1].hears_of(&name);
        let mut arguments = vec![name.as_str()];
        arguments.extend(way.iter().flat_map(|way| ["--way", way]));
        arguments.extend(land.iter().flat_map(|land| ["--land", land]));
        let report = hosts[1].json("pull", &arguments);
        assert!(hosts[1].get(&name) == bytes, "{way:?} {land:?}: {report}");
        let tried = report["ways"].as_array().expect("what was tried");
        let taken = tried
            .iter()
            .find(|one| one["way"] == report["way"])
            .expect("the way was tried");
        assert!(taken["gb_s"].as_f64() > Some(0.0), "{report}");
        match way {
            Some(way) => {
                assert_eq!(
                    (&report["way"], tried.len()),
                    (&way.replace('-', "_").into(), 1),
                    "{report}"
                );
                let landed = if way == "direct" {
                    Value::Null
                } else {
                    land.unwrap_or("object").into()
                };
                assert_eq!(report["land"], landed, "{report}");
            }
            None => assert_eq!(tried.len(), 2, "{report}"),
        }
        let paths = hosts[1].json("status", &[])[0]["paths"].clone();
        assert_eq!(
            (&paths[0]["from"], &paths[0]["way"]),
            (&Value::from("host-0"), &report["way"]),
            "{paths}"
        );
        assert_eq!(paths[0]["gb_s"], report["gb_s"], "{paths}");
    }
}

pub fn a_way_that_does_not_lead_there_is_an_error() {
    let (hosts, _brokers) = pair();
    let _gateways = [serve(&hosts, 0, None), serve(&hosts, 1, None)];
    hosts[0].put("model", &contents(BYTES, 1));
    hosts[1].hears_of("model");
    let report = hosts[1].json("pull", &["model", "--way", "device-ring"]);
    assert_eq!(
        (&report["ok"], &report["kind"]),
        (&false.into(), &"failed".into()),
        "{report}"
    );
    let why = report["error"].as_str().expect("why");
    assert!(
        why.contains("no ring of device buffers leads from host-0 to here"),
        "{why}"
    );
}

/// A pull that panics while bytes may come ends at once, as if it was killed: nothing unmaps what
/// they are written to.
pub fn a_panic_in_the_middle_of_a_read_ends_the_process() {
    let (hosts, _brokers) = pair();
    let _gateways = [serve(&hosts, 0, None), serve(&hosts, 1, None)];
    let bytes = contents(BYTES, 3);
    hosts[0].put("model", &bytes);
    hosts[1].hears_of("model");
    for way in ["direct", "pinned-ring"] {
        let mut pull = hosts[1].command("pull");
        pull.args(["model", "--json", "--way", way])
            .env("GPU_IPC_GATEWAY_STEP", "panic:pull.half_read");
        let ended = run_to_end(&mut pull, WATCHDOG);
        assert_eq!(ended.status.signal(), Some(6), "{way}: {ended:?}");
    }
    watch("the object can be pulled", || {
        hosts[1].json("pull", &["model"])["bytes"] == BYTES
    });
    assert!(hosts[1].get("model") == bytes, "it is whole");
}

/// The roll of a group has no bytes of its own, and leads to its members on the other host too.
pub fn a_group_is_pulled_member_by_member_and_its_roll() {
    let (hosts, _brokers) = pair();
    let _gateways = [serve(&hosts, 0, None), serve(&hosts, 1, None)];
    hosts[0].put_group("group", &contents(4096, 4));
    for name in ["group/0", "group"] {
        hosts[1].hears_of(name);
        let report = hosts[1].json("pull", &[name]);
        assert_eq!(report["retries"], 0, "{report}");
    }
    assert!(hosts[1].get_member("group", 0) == contents(4096, 4));
}

/// A process that is killed in the middle of a ring's round leaves nothing: the object can be
/// pulled afterwards.
pub fn killed_at_each_step_of_a_ring() {
    let (hosts, _brokers) = pair();
    let bytes = contents(BYTES, 2);
    let _reader = serve(&hosts, 1, None);
    for step in RING_STEPS {
        let at_origin = step.starts_with("fill.");
        let told = format!("kill:{step}");
        let mut origin = serve(&hosts, 0, at_origin.then_some(told.as_str()));
        let name = format!("at-{step}");
        hosts[0].put(&name, &bytes);
        hosts[1].hears_of(&name);
        let mut pull = hosts[1].command("pull");
        pull.args([
            name.as_str(),
            "--json",
            "--way",
            "pinned-ring",
            "--attempts",
            "3",
        ]);
        if !at_origin {
            pull.env("GPU_IPC_GATEWAY_STEP", &told);
        }
        let ended = run_to_end(&mut pull, WATCHDOG);
        if at_origin {
            assert_eq!(json(&ended)["ok"], false, "{step}: {ended:?}");
            watch("the origin's death", || origin.has_ended());
            origin = serve(&hosts, 0, None);
            hosts[1].hears_of(&name);
        } else {
            assert_eq!(ended.status.signal(), Some(9), "{step}: {ended:?}");
        }
        // The former pull's object is given up when its death is proven.
        watch("the object can be pulled", || {
            hosts[1].json("pull", &[&name, "--way", "pinned-ring"])["bytes"] == BYTES
        });
        assert!(hosts[1].get(&name) == bytes, "{step}");
        drop(origin);
    }
}

/// An origin that is stopped until its leases are over, and goes on: what was read is thrown away,
/// and read again.
pub fn stopped_at_a_fill_beyond_the_leases_end() {
    let (hosts, _brokers) = pair();
    let bytes = contents(BYTES, 3);
    let arguments = [&SLOTS[..], &["--lease-ms", "1000"]].concat();
    let arguments: Vec<String> = arguments.into_iter().map(String::from).collect();
    let at = &hosts[0].address;
    let origin = hosts[0].gateway_at(at, at, &arguments, Some("stop:fill.heard"));
    let _reader = serve(&hosts, 1, None);
    hosts[0].put("model", &bytes);
    hosts[1].hears_of("model");
    let mut pull = hosts[1].command("pull");
    pull.args([
        "model",
        "--json",
        "--way",
        "pinned-ring",
        "--attempts",
        "100",
    ]);
    let pull = Running::start(&mut pull);
    watch("the origin stops", || origin.is_stopped());
    // Its lease lives a second.
    std::thread::sleep(std::time::Duration::from_millis(1_200));
    origin.go_on();
    let report = json(&pull.end(WATCHDOG));
    assert_eq!(report["bytes"], BYTES, "{report}");
    assert!(
        report["retries"].as_u64() >= Some(1),
        "the lease was over: {report}"
    );
    assert!(hosts[1].get("model") == bytes);
}
