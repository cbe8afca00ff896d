//! Peers that lie, guess, flood and say nothing, and names that two machines have.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use gateway::message::{
    Ask, Confirm, Fill, Grant, Has, Home, Incarnation, LeaseId, LeaseNumber, Release, Renew, Wanted,
};
use gateway::net::call::{Answer, Answered, Granted, Question, ask, read_question};
use gateway::net::key::Gateway;
use gateway::net::session::{Network, Session, Trust};
use gateway::transport::choice::Way;
use gpu_ipc::broker::{Epoch, Selector};
use harness::program::{Running, run_to_end};
use zenoh::Wait;

use crate::host::{Host, WATCHDOG, contents, is_stopped, json, watch};

const INSECURE: &str = "--insecure";

pub fn session_to(host: &Host) -> Session {
    let network = Network {
        listen: None,
        peers: vec![host.address.parse().expect("an address")],
        trust: Trust::Everybody,
    };
    network.open().expect("a session")
}

fn answer(session: &Session, gateway: &Gateway, question: &Question) -> Option<Answer> {
    let asked = ask(session, gateway, question, WATCHDOG).expect("a question");
    asked.wait().map(|answered| answered.answer)
}

/// Asks until there is an answer: nobody answers before the connection stands.
pub fn answered(session: &Session, gateway: &Gateway, question: &Question) -> Answer {
    let mut said = None;
    watch("an answer", || {
        said = answer(session, gateway, question);
        said.is_some()
    });
    said.expect("it was watched for")
}

pub fn a_lease_that_is_anothers_is_not_renewed_filled_confirmed_or_ended() {
    let host = Host::new(0);
    let _brokers = Host::brokers(std::slice::from_ref(&host));
    host.put("model", &contents(4096, 1));
    let _gateway = host.gateway(&host.address, &host.address, &[INSECURE.into()]);
    let (session, gateway) = (session_to(&host), host.serving());
    let asker = Incarnation([5; 16]);
    let wanted = Wanted {
        name: "model".into(),
        epoch: None,
        identity: None,
    };
    let lease = Question::Ask(Ask {
        asker,
        host: "reader".into(),
        number: 1,
        wanted,
        others: 0,
        last_resort: false,
    });
    let Answer::Granted(granted) = answered(&session, &gateway, &lease) else {
        panic!("no lease")
    };
    let Grant {
        lease, identity, ..
    } = granted.grant;
    assert_eq!(
        (lease.asker, lease.incarnation),
        (asker, gateway.incarnation)
    );
    let all = |lease: LeaseId| {
        [
            Question::Renew(Renew { lease, number: 9 }),
            Question::Fill(Fill {
                lease,
                way: Way::PinnedRing,
                number: 9,
                pieces: vec![(0, 0, 64)],
            }),
            Question::Confirm(Confirm {
                lease,
                identity,
                number: 9,
                digest: None,
            }),
            Question::Release(Release { lease }),
        ]
    };
    let counted = |number: u8| {
        let mut counted = [0; 16];
        counted[15] = number;
        LeaseNumber(counted)
    };
    let forged = [
        LeaseId {
            asker: Incarnation([6; 16]),
            ..lease
        },
        LeaseId {
            lease: counted(1),
            ..lease
        },
        LeaseId {
            incarnation: asker,
            ..lease
        },
    ];
    for question in forged.into_iter().flat_map(all) {
        assert_eq!(
            answered(&session, &gateway, &question),
            Answer::Is(false),
            "{question:?}"
        );
    }
    // It lives yet, for the process that has it.
    let [renew, _, confirm, release] = all(lease);
    for question in [confirm, renew, release] {
        assert_eq!(
            answered(&session, &gateway, &question),
            Answer::Is(true),
            "{question:?}"
        );
    }
}

/// A gateway that says that it has `model`, and grants what it has of another name.
struct Liar {
    _session: Session,
}

impl Liar {
    fn begin(address: &str, host: &Host) -> Liar {
        let network = Network {
            listen: Some(address.parse().expect("an address")),
            peers: Vec::new(),
            trust: Trust::Everybody,
        };
        let session = network.open().expect("a session");
        let gateway = Gateway {
            host: "evil".into(),
            incarnation: Incarnation([0xee; 16]),
        };
        let local = host.local();
        let reader = local.client.open_one(&Selector::Latest("other".into()));
        let reader = Arc::new(reader.expect("an object"));
        let me = gateway.clone();
        let lie = move |query: zenoh::query::Query| {
            let bytes = query
                .payload()
                .map(|payload| payload.to_bytes().into_owned());
            let said = match read_question(&bytes.unwrap_or_default()) {
                Ok(Question::Find(_)) => Answered::plain(Answer::Found(vec![Has {
                    epoch: 1,
                    identity: reader.identity().to_string(),
                    bytes: 4096,
                    origin: true,
                    home: Home::read("evil"),
                    reads: 0,
                    limit: 1,
                    admitted: 0,
                }])),
                Ok(Question::Ask(ask)) => {
                    let manifest = reader.manifest().encode().expect("its own");
                    let grant = Grant {
                        lease: LeaseId {
                            incarnation: me.incarnation,
                            lease: LeaseNumber([1; 16]),
                            asker: ask.asker,
                        },
                        identity: reader.identity().0,
                        epoch: 1,
                        lives_ms: 30_000,
                    };
                    let regions = reader.regions().into_iter();
                    let granted = Granted {
                        grant,
                        home: Home::read("evil"),
                        transport: "tcp".into(),
                        regions: regions.map(|(at, bytes)| (at.0, bytes, None)).collect(),
                        direct: true,
                        rings: Vec::new(),
                        manifest: manifest.len(),
                    };
                    Answered {
                        answer: Answer::Granted(Box::new(granted)),
                        attached: manifest,
                    }
                }
                _ => Answered::plain(Answer::Is(true)),
            };
            let _ = query.reply(query.key_expr().clone(), said.encode()).wait();
        };
        session
            .declare_queryable(format!("{}/ask", gateway.key()))
            .callback(lie)
            .background()
            .wait()
            .expect("a queryable");
        let token = session
            .liveliness()
            .declare_token(format!("{}/live", gateway.key()))
            .wait()
            .expect("a token");
        std::mem::forget(token);
        Liar { _session: session }
    }
}

pub fn a_gateway_that_grants_another_object_puts_nothing_here() {
    let hosts = [Host::new(0), Host::new(1)];
    let _brokers = Host::brokers(&hosts);
    hosts[0].put("other", &contents(4096, 1));
    let _liar = Liar::begin(&hosts[0].address, &hosts[0]);
    let mut pull = hosts[1].command("pull");
    pull.args(["model", "--json", "--transport", "tcp", "--attempts", "1"]);
    pull.args(["--peer", &hosts[0].address, INSECURE]);
    let ended = run_to_end(&mut pull, WATCHDOG);
    let said = json(&ended);
    let why = said["error"].as_str().unwrap_or_default();
    assert!(
        why.contains("an object called other, and model was asked for"),
        "{said}"
    );
    assert_eq!(hosts[1].local().list().expect("a list").objects.len(), 0);
}

pub fn what_was_removed_here_is_not_said_to_be_here() {
    let hosts = [Host::new(0), Host::new(1)];
    let _brokers = Host::brokers(&hosts);
    let bytes = contents(4096, 1);
    hosts[0].put("model", &bytes);
    let gateway = |host: &Host| host.gateway(&host.address, &hosts[0].address, &[INSECURE.into()]);
    let _gateways = hosts.each_ref().map(gateway);
    let pulled = |was_here: bool| {
        let report = hosts[1].json("pull", &["model"]);
        assert_eq!(report["was_here"], was_here, "{report}");
        assert!(hosts[1].get("model") == bytes);
    };
    pulled(false);
    pulled(true);
    let client = hosts[1].local().client;
    client.remove_epoch("model", Epoch(1)).expect("removed");
    pulled(false);
    // A name that was removed as a whole was removed for good, and the pull says so.
    client.remove("model").expect("removed");
    let refused = hosts[1].json("pull", &["model"]);
    assert_eq!(
        (&refused["ok"], &refused["kind"]),
        (&false.into(), &"refused".into()),
        "{refused}"
    );
    assert!(
        refused["error"]
            .as_str()
            .is_some_and(|why| why.contains("removed up to epoch 1")),
        "{refused}"
    );
}

/// Connections that say nothing: more than Zenoh lets wait by itself.
const SILENT: usize = 300;

pub fn silent_connections_keep_no_newcomer_out() {
    let host = Host::new(0);
    let _brokers = Host::brokers(std::slice::from_ref(&host));
    host.put("model", &contents(4096, 1));
    let gateway = host.gateway(&host.address, &host.address, &[INSECURE.into()]);
    let at = host.address.trim_start_matches("tcp/");
    assert!(gateway.listens().iter().any(|port| port.to_string() == at));
    let silent: Vec<TcpStream> = (0..SILENT)
        .map(|_| TcpStream::connect(at).expect("it listens"))
        .collect();
    let seen = host.objects(&["--peer", &host.address, INSECURE]);
    assert_eq!(seen.map(|all| all.len()), Some(1));
    drop(silent);
}

pub fn questions_that_are_too_long_cost_no_memory() {
    let host = Host::new(0);
    let _brokers = Host::brokers(std::slice::from_ref(&host));
    let gateway = host.gateway(&host.address, &host.address, &[INSECURE.into()]);
    let before = gateway.peak_kib();
    let named = host.serving();
    for bytes in [4_097, 1 << 20, 64 << 20, 64 << 20, 64 << 20, 64 << 20] {
        let session = session_to(&host);
        answered(&session, &named, &Question::Gateways);
        let asked = session
            .get(format!("{}/ask", named.key()))
            .payload(vec![b' '; bytes])
            .timeout(Duration::from_secs(2))
            .wait()
            .expect("a question");
        let said = asked.recv().ok().and_then(|reply| {
            let sample = reply.into_result().ok()?;
            Answered::decode(&sample.payload().to_bytes()).ok()
        });
        match said.map(|said| said.answer) {
            Some(Answer::Declined { why, .. }) => assert!(why.contains("4096"), "{why}"),
            // What has more bytes than any message may have is not put together.
            None => assert!(bytes > 8 << 20, "{bytes} bytes without an answer"),
            other => panic!("{other:?}"),
        }
        let _ = session.close().wait();
    }
    let more = gateway.peak_kib() - before;
    assert!(more < 64 << 10, "{more} KiB more than before");
    answered(&session_to(&host), &named, &Question::Gateways);
}

pub fn an_origin_that_is_gone_before_the_confirmation_costs_no_patience() {
    let hosts = [Host::new(0), Host::new(1)];
    let _brokers = Host::brokers(&hosts);
    hosts[0].put("model", &contents(1 << 20, 1));
    let origin = hosts[0].gateway(&hosts[0].address, &hosts[0].address, &[INSECURE.into()]);
    // Longer than the watchdog: it must not be waited for.
    let patience = (10 * WATCHDOG).as_secs().to_string();
    let mut pull = hosts[1].command("pull");
    pull.args(["model", "--json", "--transport", "tcp", "--attempts", "1"]);
    pull.args([
        "--answer-s",
        &patience,
        "--peer",
        &hosts[0].address,
        INSECURE,
    ]);
    pull.env("GPU_IPC_GATEWAY_STEP", "stop:pull.confirming");
    let pull = Running::start(&mut pull);
    watch("the pull has read all", || is_stopped(pull.pid()));
    drop(origin);
    pull.signal(rustix::process::Signal::CONT);
    let said = json(&pull.end(WATCHDOG));
    let why = said["error"].as_str().unwrap_or_default();
    assert!(why.contains("does not answer any more"), "{said}");
    assert_eq!(hosts[1].local().list().expect("a list").objects.len(), 0);
}

pub fn a_namesake_of_the_home_removes_nothing() {
    let mut hosts = [Host::new(0), Host::new(1), Host::new(2)];
    hosts[2].name = hosts[0].name.clone();
    let _brokers = Host::brokers(&hosts);
    let bytes = contents(4096, 1);
    for name in ["model", "gone"] {
        hosts[0].put(name, &bytes);
        // Its own, which it removes.
        hosts[2].put(name, &contents(4096, 2));
    }
    hosts[2].local().client.remove("model").expect("removed");
    let gateway = |host: &Host| host.gateway(&host.address, &hosts[0].address, &[INSECURE.into()]);
    let _gateways = hosts[..2].iter().map(gateway).collect::<Vec<_>>();
    for name in ["model", "gone"] {
        let pulled = hosts[1].json("pull", &[name]);
        assert_eq!(pulled["home"], "host-0", "{pulled}");
    }
    let _namesake = gateway(&hosts[2]);
    // A removal at the true home is followed, by a look that asks both.
    watch("both are heard", || {
        let all = hosts[1].objects(&[]).unwrap_or_default();
        all.iter().filter(|row| row["host"] == "host-0").count() == 3
    });
    hosts[0].local().client.remove("gone").expect("removed");
    let here = || {
        let list = hosts[1].local().list().expect("a list").objects;
        list.into_iter().map(|row| row.name).collect::<Vec<_>>()
    };
    watch("the removal is followed", || {
        !here().contains(&"gone".into())
    });
    assert_eq!(here(), ["model"]);
    assert!(hosts[1].get("model") == bytes);
}

/// Objects of one host: more than a page has, and than Zenoh's channels hold.
const MANY: usize = 1_300;

pub fn the_list_of_many_objects_is_whole() {
    let hosts = [Host::new(0), Host::new(1)];
    let _brokers = Host::brokers(&hosts);
    let gateway = |host: &Host| host.gateway(&host.address, &hosts[0].address, &[INSECURE.into()]);
    let _gateways = hosts.each_ref().map(gateway);
    let names: Vec<String> = (0..MANY).map(|n| format!("object-{n:05}")).collect();
    names
        .iter()
        .for_each(|name| hosts[0].put(name, &contents(64, 1)));
    let mut seen = Vec::new();
    watch("both gateways are heard", || {
        let all = hosts[1].objects(&[]).unwrap_or_default();
        let listed = all.iter().filter_map(|row| row["name"].as_str());
        seen = listed.map(str::to_owned).collect();
        !seen.is_empty()
    });
    assert_eq!(seen, names);
    // The last of them, and none that is not there.
    let pulled = hosts[1].json("pull", &[names[MANY - 1].as_str()]);
    assert_eq!(pulled["from"], "host-0", "{pulled}");
    let none = hosts[1].json("pull", &["object", "--attempts", "1"]);
    assert_eq!(none["kind"], "not_found", "{none}");
}
