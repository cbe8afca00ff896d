//! Eight hosts pull one object at a time: nine brokers, nine gateways and eight pulls, each a
//! process.

use std::collections::BTreeMap;
use std::process::Output;

use harness::program::Running;
use serde_json::Value;

use crate::host::{Host, Service, WATCHDOG, contents, json, watch};

const HOSTS: usize = 9;
const BYTES: usize = 4 << 20;

pub fn eight_pulls_cost_the_origin_two_reads() {
    let hosts: Vec<Host> = (0..HOSTS).map(Host::new).collect();
    let _brokers = Host::brokers(&hosts);
    let contents = contents(BYTES, 0);
    hosts[0].put("model", &contents);
    let first = hosts[0].address.clone();
    let gateway = |host: &Host| host.gateway(&host.address, &first, &["--insecure".into()]);
    let _gateways: Vec<Service> = hosts.iter().map(gateway).collect();
    hosts.iter().for_each(|host| host.hears_of("model"));

    let pulls: Vec<_> = hosts[1..]
        .iter()
        .map(|host| Running::start(host.command("pull").args(["--json", "model"])))
        .collect();
    let ended: Vec<Output> = pulls.into_iter().map(|pull| pull.end(WATCHDOG)).collect();
    let mut served: BTreeMap<String, u32> = BTreeMap::new();
    for output in &ended {
        assert!(output.status.success(), "{output:?}");
        let report = json(output);
        assert_eq!(
            (&report["home"], &report["bytes"]),
            (&Value::from("host-0"), &Value::from(BYTES)),
            "{report}"
        );
        *served
            .entry(report["from"].as_str().expect("a name").to_owned())
            .or_default() += 1;
    }
    println!("reads served: {served:?}");
    for host in &hosts[1..] {
        assert!(
            host.get("model") == contents,
            "{} has other bytes",
            host.name
        );
    }
    let origin = served.get("host-0").copied().unwrap_or(0);
    assert!(
        (1..=2).contains(&origin),
        "the origin served {origin} of 8 reads"
    );
    // The origin's own count, which is written now and then: no read of it was begun and failed.
    let confirmed = || hosts[0].json("status", &[])[0]["figures"]["confirmed"][0].as_u64();
    watch("the origin's figures", || {
        confirmed() == Some(origin.into())
    });
    let figures = hosts[0].json("status", &[])[0]["figures"].clone();
    assert_eq!(
        (&figures["granted"], &figures["expired"]),
        (&origin.into(), &0.into()),
        "{figures}"
    );
}
