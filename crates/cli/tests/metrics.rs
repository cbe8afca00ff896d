//! A broker's metrics over HTTP, as a scraper and as a hostile client see them.

#[allow(dead_code, reason = "each test program uses some of it")]
mod kept;
mod open_metrics;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use gpu_ipc::broker::Client;
use gpu_ipc::{BackendKind, detect};
use harness::wait_until;
use kept::{Keeper, run, text};
use open_metrics::{Sample, parse};

/// Waits for the address that a broker serves its metrics at.
fn address_of(keeper: &Keeper) -> SocketAddr {
    let find = || {
        let log = keeper.log();
        let line = log
            .lines()
            .find(|line| line.contains("metrics are served"))?;
        line.split_once("address=")?.1.trim().parse().ok()
    };
    wait_until("metrics are served", || find().is_some());
    find().expect("a log only grows")
}

/// Sends a request, and returns the head and the body of the answer.
fn ask(address: SocketAddr, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "{request} HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.to_lowercase(), body.into())
}

fn scrape(address: SocketAddr) -> Vec<Sample> {
    let (head, body) = ask(address, "GET /metrics");
    assert!(head.starts_with("http/1.1 200 "), "{head}");
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{head}"
    );
    parse(&body).unwrap_or_else(|why| panic!("{why}\n{body}"))
}

fn value(samples: &[Sample], name: &str) -> f64 {
    let found = samples.iter().find(|sample| sample.name == name);
    found
        .unwrap_or_else(|| panic!("no {name}: {samples:?}"))
        .value
}

#[test]
fn a_scraper_reads_what_the_broker_has() {
    let keeper = Keeper::start_with(
        &["--most", "100"],
        &["--metrics", "127.0.0.1:0", "--limit", "768MiB"],
    );
    let address = address_of(&keeper);
    let dir = keeper.dir.path();
    let file = dir.join("weights.bin");
    fs::write(&file, [7; 5_000]).expect("a file");
    text(&run(
        dir,
        &[
            "put",
            "model",
            file.to_str().expect("a plain name"),
            "--backend",
            "host",
        ],
    ));
    // What was answered is good for a second.
    wait_until("the commit is counted", || {
        value(&scrape(address), "gpu_ipc_broker_commits_total") == 1.0
    });
    let samples = scrape(address);
    assert_eq!(value(&samples, "gpu_ipc_broker_up"), 1.0);
    assert_eq!(
        value(&samples, "gpu_ipc_broker_limit_bytes"),
        f64::from(768 << 20)
    );
    assert!(value(&samples, "gpu_ipc_object_bytes") >= 5_000.0);
    assert_eq!(value(&samples, "gpu_ipc_broker_commit_seconds_count"), 1.0);
    assert_eq!(value(&samples, "gpu_ipc_broker_starts_total"), 1.0);
    assert_eq!(value(&samples, "gpu_ipc_broker_keeper_deaths_total"), 0.0);
    // A region and a manifest at least, of the 100 that the keeper was told to keep at most.
    assert!(value(&samples, "gpu_ipc_broker_keeper_descriptors") >= 2.0);
    assert_eq!(
        value(&samples, "gpu_ipc_broker_keeper_descriptors_limit"),
        100.0
    );
    assert!(value(&samples, "gpu_ipc_broker_user_bytes") >= 5_000.0);
    let states: Vec<&str> = samples
        .iter()
        .filter(|sample| sample.name == "gpu_ipc_broker_keeper" && sample.value == 1.0)
        .map(|sample| sample.label("state"))
        .collect();
    assert_eq!(states, ["fed"]);
    for (request, status) in [
        ("GET /", "404"),
        ("GET /metrics/..", "404"),
        ("POST /metrics", "405"),
    ] {
        let (head, _) = ask(address, request);
        assert!(
            head.starts_with(&format!("http/1.1 {status} ")),
            "{request}: {head}"
        );
    }
    let (head, body) = ask(address, "HEAD /metrics");
    assert!(
        head.starts_with("http/1.1 200 ") && body.is_empty(),
        "{head}\n{body}"
    );
}

/// Connections that say nothing, half of something, too much, and never read: each has its end, and
/// the broker serves meanwhile.
#[test]
fn no_client_of_the_metrics_stops_the_broker() {
    let keeper = Keeper::start_with(
        &[],
        &["--metrics", "127.0.0.1:0", "--log", "info,broker=debug"],
    );
    let address = address_of(&keeper);
    let gpu = detect()
        .expect("the host is there")
        .first(BackendKind::Host)
        .expect("the host is there");
    let client = Client::builder(gpu)
        .dir(keeper.dir.path())
        .connect()
        .expect("a broker");
    let threads = || {
        let status =
            fs::read_to_string(format!("/proc/{}/status", keeper.broker())).expect("it lives");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("Threads:"));
        line.expect("a number")
            .trim()
            .parse::<u32>()
            .expect("a number")
    };
    scrape(address);
    let before = threads();
    let held: Vec<TcpStream> = (0..60)
        .map(|n| {
            let mut stream = TcpStream::connect(address).expect("it listens");
            // What is written to one that is closed meanwhile is lost, as it should be.
            let _ = match n % 4 {
                0 => Ok(()),
                1 => stream.write_all(b"GET /metr"),
                2 => stream.write_all(&[b'a'; 1 << 17]),
                _ => (0..100).try_for_each(|_| {
                    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                }),
            };
            client.list().expect("the broker answers");
            stream
        })
        .collect();
    assert!(
        threads() <= before + 1,
        "{} threads, {before} before",
        threads()
    );
    // Behind all of them: it is served when they have had their time.
    assert_eq!(value(&scrape(address), "gpu_ipc_broker_up"), 1.0);
    client.list().expect("the broker answers");
    drop(held);
    // Asked often, it asks the broker once a second.
    let asked = || keeper.log().matches("a participant is gone").count() as u64;
    let (start, count) = (Instant::now(), asked());
    (0..50).for_each(|_| drop(scrape(address)));
    assert!(
        asked() - count <= start.elapsed().as_secs() + 2,
        "{} times",
        asked() - count
    );
}

/// Objects matter more than their metrics.
#[test]
fn a_port_that_is_taken_is_no_reason_to_end() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address");
    let keeper = Keeper::start_with(&[], &["--metrics", &address.to_string()]);
    wait_until("it says so", || {
        keeper
            .log()
            .contains("metrics are not served; the address is tried every second")
    });
    text(&run(keeper.dir.path(), &["objects"]));
    drop(taken);
    assert_eq!(address_of(&keeper), address);
    assert_eq!(value(&scrape(address), "gpu_ipc_broker_up"), 1.0);
}
