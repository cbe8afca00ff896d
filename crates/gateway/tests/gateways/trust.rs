//! Who is let in: certificates of one authority, of another, none, and garbage.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};

use crate::host::{Host, address, contents, watch};

/// An authority, and the certificate that it gave to a host: the arguments of `--tls`.
fn certificates(folder: &Path, name: &str, host: &Host) -> Vec<String> {
    let ip = host
        .address
        .trim_start_matches("tcp/")
        .split(':')
        .next()
        .and_then(|ip| ip.parse().ok())
        .expect("an address");
    let mut authority = CertificateParams::new(Vec::new()).expect("no names");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().expect("a key"))
        .expect("an authority");
    let mut own = CertificateParams::new(vec![host.name.clone()]).expect("a name");
    own.subject_alt_names.push(SanType::IpAddress(ip));
    let key = KeyPair::generate().expect("a key");
    let own = own.signed_by(&key, &authority).expect("a certificate");
    let file = |kind: &str, text: String| {
        let path = folder.join(format!("{name}-{kind}.pem"));
        std::fs::write(&path, text).expect("a file");
        path.to_str().expect("text").to_owned()
    };
    let files = [
        file("own", own.pem()),
        file("key", key.serialize_pem()),
        file("authority", authority.pem()),
    ];
    std::iter::once("--tls".to_owned()).chain(files).collect()
}

pub fn a_certificate_of_another_authority_and_none_are_not_let_in() {
    let hosts = [Host::new(0)];
    let _brokers = Host::brokers(&hosts);
    let host = &hosts[0];
    host.put("model", &contents(4096, 1));
    let folder = tempfile::tempdir().expect("a folder");
    let ours = certificates(folder.path(), "ours", host);
    let others = certificates(folder.path(), "others", host);
    let _gateway = host.gateway(&host.address, &address(), &ours);
    host.hears_of("model");
    let seen_with = |trust: &[String]| {
        let mut args = vec!["--peer", host.address.as_str()];
        args.extend(trust.iter().map(String::as_str));
        host.objects(&args).map(|all| all.len())
    };
    assert_eq!(
        seen_with(&ours),
        Some(1),
        "a certificate of the same authority"
    );
    assert_eq!(
        seen_with(&others),
        None,
        "a certificate of another authority"
    );
    assert_eq!(seen_with(&["--insecure".into()]), None, "no certificate");
    // Ours is shown with the others' authority: this side does not believe the gateway.
    let mixed = [&ours[..3], &others[3..]].concat();
    assert_eq!(seen_with(&mixed), None, "a gateway of another authority");
    assert_eq!(seen_with(&ours), Some(1), "a certificate let in before");
}

pub fn garbage_on_every_port_costs_nobody_else_anything() {
    let hosts = [Host::new(0), Host::new(1)];
    let _brokers = Host::brokers(&hosts);
    let bytes = contents(1 << 20, 2);
    hosts[0].put("model", &bytes);
    let insecure = ["--insecure".to_owned()];
    let gateways = hosts
        .each_ref()
        .map(|host| host.gateway(&host.address, &hosts[0].address, &insecure));
    hosts[1].hears_of("model");
    // Those that stay open hold their places while others want to be served.
    let mut open = Vec::new();
    for gateway in &gateways {
        let ports = gateway.listens();
        assert!(
            ports.len() >= 2,
            "the port of questions and that of bytes: {ports:?}"
        );
        for port in ports {
            for (round, garbage) in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 70_000], &[0; 64]]
                .into_iter()
                .enumerate()
            {
                let Ok(mut stream) = TcpStream::connect(port) else {
                    panic!("{port} does not listen")
                };
                // It may be closed in the middle.
                let _ = stream.write_all(garbage);
                if round > 0 {
                    open.push(stream);
                }
            }
        }
    }
    let pulled = hosts[1].json("pull", &["model"]);
    assert_eq!(pulled["from"], "host-0", "{pulled}");
    assert!(hosts[1].get("model") == bytes);
    assert_eq!(
        (hosts[0].gateways(), hosts[1].gateways()),
        (1, 1),
        "both still run"
    );
}

pub fn either_of_two_gateways_of_one_broker_serves() {
    let hosts = [Host::new(0), Host::new(1)];
    let _brokers = Host::brokers(&hosts);
    let second = address();
    let insecure = ["--insecure".to_owned()];
    let mut one = Some(hosts[0].gateway(&hosts[0].address, &second, &insecure));
    let _two = hosts[0].gateway(&second, &hosts[0].address, &insecure);
    let _reader = hosts[1].gateway(&hosts[1].address, &second, &insecure);
    assert_eq!(hosts[0].gateways(), 2);
    for (name, seed) in [("both", 3), ("one", 4)] {
        if name == "one" {
            drop(one.take());
        }
        hosts[0].put(name, &contents(4096, seed));
        hosts[1].hears_of(name);
        let pulled = hosts[1].json("pull", &[name]);
        assert_eq!(
            (&pulled["from"], &pulled["epoch"]),
            (&"host-0".into(), &1.into()),
            "{pulled}"
        );
        assert!(hosts[1].get(name) == contents(4096, seed));
    }
    assert_eq!(hosts[0].gateways(), 1, "the other is known to be dead");
}

/// The options are those of keeper and broker.
pub fn a_gateway_logs_its_start_and_what_it_was_told_to() {
    let host = Host::new(0);
    let _brokers = Host::brokers(std::slice::from_ref(&host));
    for (args, words) in [
        (
            &[][..],
            &[
                "INFO",
                "the gateway serves",
                "host=\"host-0\"",
                "carrier=tcp",
            ][..],
        ),
        (
            &["--log-json"],
            &[
                "\"level\":\"INFO\"",
                "\"message\":\"the gateway serves\"",
                "\"carrier\":\"tcp\"",
            ],
        ),
    ] {
        let (gateway, file) = host.logging(args);
        let log = || std::fs::read_to_string(&file).unwrap_or_default();
        watch("its start is a line", || {
            log()
                .lines()
                .any(|line| words.iter().all(|word| line.contains(word)))
        });
        drop(gateway);
    }
    let (gateway, file) = host.logging(&["--log", "off"]);
    watch("it runs", || host.gateways() > 0);
    drop(gateway);
    assert_eq!(std::fs::read_to_string(file).expect("a file"), "");
}
