//! Pulls by the gateway that runs here: many objects in one request, and what is left when the
//! process that pulls is killed.

use std::process::Output;
use std::time::Instant;

use gpu_ipc::broker::server::listing::Row;
use harness::program::{Running, run_to_end};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::host::{Host, Service, WATCHDOG, contents, watch};

const MANY: usize = 200;

/// Two hosts, of which the first has many objects and a group, and the second pulls.
fn begin() -> ([Host; 2], Vec<Service>) {
    let hosts = [Host::new(0), Host::new(1)];
    let mut services = Host::brokers(&hosts);
    for number in 0..MANY {
        hosts[0].put(&name(number), &contents(4096, number as u32));
    }
    hosts[0].put_group("group", &contents(4096, 7));
    services.push(hosts[0].gateway(&hosts[0].address, &hosts[0].address, &["--insecure".into()]));
    services.push(hosts[1].gateway_that_pulls(&hosts[0].address));
    (hosts, services)
}

fn name(number: usize) -> String {
    format!("object-{number:04}")
}

fn lines(output: &Output) -> Vec<Value> {
    let said = String::from_utf8_lossy(&output.stdout);
    said.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

fn pull(host: &Host, args: &[&str]) -> Output {
    run_to_end(host.command("pull").args(args).arg("--json"), WATCHDOG)
}

pub fn one_request_pulls_many_objects_and_a_group() {
    let (hosts, _services) = begin();
    let begun = Instant::now();
    let output = pull(&hosts[1], &["--pattern", "object-*", "--group", "group"]);
    let seconds = begun.elapsed().as_secs_f64();
    assert!(output.status.success(), "{output:?}");
    let reports = lines(&output);
    println!("{} objects in {seconds:.2} s", reports.len());
    assert_eq!(reports.len(), MANY + 2, "with the group's member and roll");
    for number in [0, 1, MANY / 2, MANY - 1] {
        assert!(hosts[1].get(&name(number)) == contents(4096, number as u32));
    }
    assert!(hosts[1].get_member("group", 0) == contents(4096, 7));
    let again = lines(&pull(&hosts[1], &[&name(3), &name(4)]));
    assert!(
        again.len() == 2 && again.iter().all(|report| report["was_here"] == true),
        "{again:?}"
    );
    let none = pull(&hosts[1], &["nothing", "--attempts", "1"]);
    assert!(!none.status.success());
    assert_eq!(lines(&none)[0]["kind"], "not_found", "{none:?}");
}

pub fn what_is_left_is_pulled_when_the_process_that_pulls_is_killed() {
    let (hosts, services) = begin();
    let pulling =
        Running::start(
            hosts[1]
                .command("pull")
                .args(["--pattern", "object-*", "--json"]),
        );
    let visible = || hosts[1].local().list().expect("a list").objects.len();
    watch("some are here", || visible() > 10);
    let gateway = services.last().expect("it runs");
    let pid = gateway.child("pulls");
    kill_process(pid, Signal::KILL).expect("it runs");
    let output = pulling.end(WATCHDOG);
    assert!(output.status.success(), "{output:?}");
    for number in 0..MANY {
        assert!(hosts[1].get(&name(number)) == contents(4096, number as u32));
    }
}

pub fn a_name_that_is_followed_is_kept_current() {
    let (hosts, _services) = begin();
    let mut follows = Running::start(hosts[1].command("pull").args([&name(0), "--follow"]));
    for version in 1..4 {
        watch("the newest epoch is here", || {
            assert!(follows.is_running(), "it follows until it is ended");
            let list = hosts[1].local().list().expect("a list").objects;
            let is_newest = |row: &Row| row.epoch == version && row.state == "visible";
            list.iter().any(is_newest)
        });
        let seed = if version == 1 { 0 } else { version as u32 };
        assert!(hosts[1].get(&name(0)) == contents(4096, seed));
        hosts[0].put(&name(0), &contents(4096, version as u32 + 1));
    }
    follows.kill();
}
