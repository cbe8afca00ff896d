//! A gateway whose transport takes as long as it is told to register an object.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use gateway::Result;
use gateway::message::{Ask, Confirm, Incarnation, LeaseId, LeaseNumber, Wanted};
use gateway::net::call::{Answer, Question, ask};
use gateway::net::key::Gateway;
use gateway::net::live::Live;
use gateway::net::session::{Address, Network, Trust};
use gateway::origin::Limits;
use gateway::origin::rings::Slots;
use gateway::origin::serve::Server;
use gateway::replica::driver::Fetch;
use gateway::replica::sources::Order;
use gateway::replica::{Patience, Rules};
use gateway::transport::tcp::{Faults, Tcp};
use gateway::transport::{Peer, Registration, Span, Transport};
use gpu_ipc::broker::Readers;
use harness::program::Running;

use crate::host::{Host, WATCHDOG, contents, json, watch};

/// Plain TCP that registers nothing before it is let.
#[derive(Debug)]
struct Slow {
    tcp: Tcp,
    registrations: AtomicU64,
    let_go: Mutex<bool>,
    told: Condvar,
}

impl Slow {
    fn new() -> Slow {
        Slow {
            tcp: Tcp::listen([127, 0, 0, 1].into(), Faults::default()).expect("loopback"),
            registrations: AtomicU64::new(0),
            let_go: Mutex::new(false),
            told: Condvar::new(),
        }
    }

    fn let_go(&self) {
        *self.let_go.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.told.notify_all();
    }
}

impl Transport for Slow {
    fn kind(&self) -> &'static str {
        "tcp"
    }

    unsafe fn register(&self, memory: &[Span]) -> Result<Box<dyn Registration>> {
        self.registrations.fetch_add(1, Ordering::Relaxed);
        let held = self.let_go.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.told.wait_while(held, |let_go| !*let_go));
        // SAFETY: `register` asks for what our caller promises.
        unsafe { self.tcp.register(memory) }
    }

    fn metadata(&self, of: &[u64]) -> Result<Vec<u8>> {
        self.tcp.metadata(of)
    }

    fn load_peer(&self, metadata: &[u8]) -> Result<Box<dyn Peer>> {
        self.tcp.load_peer(metadata)
    }

    fn flush(&self) -> Result<()> {
        self.tcp.flush()
    }
}

/// A gateway in this process.
struct Serving {
    slow: Arc<Slow>,
    gateway: Gateway,
    ticks: Arc<AtomicU64>,
    told: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Serving {
    fn begin(host: &Host) -> Serving {
        let listen = host.address.parse().expect("an address");
        let slow = Arc::new(Slow::new());
        let gateway = Gateway {
            host: host.name.clone(),
            incarnation: Incarnation::random().expect("random bits"),
        };
        let session = network(Some(listen), Vec::new()).open().expect("a session");
        let limits = Limits {
            time: WATCHDOG,
            ..Limits::default()
        };
        let pace = gateway::plan::Pace::default();
        let server = Server::new(
            gateway.clone(),
            host.local(),
            slow.clone(),
            session,
            limits,
            pace,
            Slots::default(),
        )
        .expect("a session");
        let [ticks, told] = [Arc::<AtomicU64>::default(), Arc::default()];
        let over = Arc::<AtomicBool>::default();
        let (ticked, tells, ended) = (ticks.clone(), told.clone(), over.clone());
        let run = move || {
            server.run(|figures, _| {
                tells.store(figures.told, Ordering::Relaxed);
                ticked.fetch_add(1, Ordering::Relaxed);
                !ended.load(Ordering::Relaxed)
            })
        };
        Serving {
            slow,
            gateway,
            ticks,
            told,
            over,
            thread: std::thread::spawn(run),
        }
    }

    /// Ends it, and says how often it has registered something.
    fn end(self) -> u64 {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().expect("no panic").expect("served");
        self.slow.registrations.load(Ordering::Relaxed)
    }
}

fn network(listen: Option<Address>, peers: Vec<Address>) -> Network {
    Network {
        listen,
        peers,
        trust: Trust::Everybody,
    }
}

pub fn questions_are_answered_while_an_object_is_registered() {
    let host = Host::new(0);
    let _brokers = Host::brokers(std::slice::from_ref(&host));
    host.put("model", &contents(1 << 20, 0));
    let serving = Serving::begin(&host);
    let Serving {
        slow,
        gateway,
        ticks,
        ..
    } = &serving;

    let session = network(None, vec![host.address.parse().expect("an address")])
        .open()
        .expect("a session");
    let answer = |question: &Question| {
        let asked = ask(&session, gateway, question, WATCHDOG).expect("a question");
        asked.wait().map(|answered| answered.answer)
    };
    let anything = Question::Gateways;
    watch("the gateway answers", || {
        matches!(answer(&anything), Some(Answer::Gateways(_)))
    });
    let wanted = Wanted {
        name: "model".into(),
        epoch: None,
        identity: None,
    };
    let asker = Incarnation([9; 16]);
    let lease = Question::Ask(Ask {
        asker,
        host: "other".into(),
        number: 1,
        wanted,
        others: 0,
        last_resort: false,
    });
    let waits = ask(&session, gateway, &lease, WATCHDOG).expect("a question");
    watch("the registration begins", || {
        slow.registrations.load(Ordering::Relaxed) == 1
    });

    // It is held, and everything else goes on.
    assert!(matches!(answer(&anything), Some(Answer::Gateways(_))));
    let id = LeaseId {
        incarnation: gateway.incarnation,
        lease: LeaseNumber([1; 16]),
        asker,
    };
    let confirm = Question::Confirm(Confirm {
        lease: id,
        identity: [0; 16],
        number: 7,
        digest: None,
    });
    assert_eq!(
        answer(&confirm),
        Some(Answer::Is(false)),
        "no lease lives before its memory is registered"
    );
    let before = ticks.load(Ordering::Relaxed);
    watch("the gateway looks at its leases", || {
        ticks.load(Ordering::Relaxed) > before + 1
    });

    // Who asks is told that it goes on, and asks the same again, twice: one of both is lost.
    assert_eq!(
        waits.wait().map(|answered| answered.answer),
        Some(Answer::Registering)
    );
    drop(ask(&session, gateway, &lease, WATCHDOG).expect("a question"));
    assert_eq!(answer(&lease), Some(Answer::Registering));
    let waits = ask(&session, gateway, &lease, WATCHDOG).expect("a question");
    slow.let_go();
    let granted = match waits.wait().map(|answered| answered.answer) {
        // Told in the moment in which it was let go.
        Some(Answer::Registering) => answer(&lease),
        granted => granted,
    };
    let Some(Answer::Granted(granted)) = granted else {
        panic!("no lease: {granted:?}")
    };
    assert_eq!(granted.grant.lease.asker, asker);
    let confirm = Confirm {
        lease: granted.grant.lease,
        identity: granted.grant.identity,
        number: 8,
        digest: None,
    };
    assert_eq!(answer(&Question::Confirm(confirm)), Some(Answer::Is(true)));
    assert_eq!(serving.end(), 1);
}

/// A pull waits for a long registration, which is not begun anew and costs no attempt.
pub fn a_pull_waits_for_a_long_registration() {
    let hosts = [Host::new(0), Host::new(1)];
    let _brokers = Host::brokers(&hosts);
    let bytes = contents(1 << 20, 1);
    hosts[0].put("model", &bytes);
    let serving = Serving::begin(&hosts[0]);
    let network = ["--peer", &hosts[0].address, "--insecure"];
    hosts[1].hears_by("model", &network);
    let mut pull = hosts[1].command("pull");
    let patience = WATCHDOG.as_secs().to_string();
    pull.args([
        "model",
        "--json",
        "--transport",
        "tcp",
        "--answer-s",
        &patience,
    ])
    .args(network);
    let pull = Running::start(&mut pull);
    watch("the pull is told twice that it goes on", || {
        serving.told.load(Ordering::Relaxed) >= 2
    });
    serving.slow.let_go();
    let report = json(&pull.end(WATCHDOG));
    assert_eq!(
        (&report["bytes"], &report["retries"]),
        (&bytes.len().into(), &0.into()),
        "{report}"
    );
    assert!(hosts[1].get("model") == bytes);
    assert_eq!(serving.end(), 1);
}

/// The replica's memory takes longer to register than a lease lives without a renewal.
pub fn a_lease_is_renewed_while_the_object_is_made() {
    let hosts = [Host::new(0), Host::new(1)];
    let _brokers = Host::brokers(&hosts);
    let bytes = contents(1 << 20, 1);
    hosts[0].put("model", &bytes);
    let trust = ["--insecure", "--lease-ms", "3000"].map(str::to_owned);
    let _gateway = hosts[0].gateway(&hosts[0].address, &hosts[0].address, &trust);
    let slow = Arc::new(Slow::new());
    let (local, transport) = (hosts[1].local(), Arc::clone(&slow));
    let peers = vec![hosts[0].address.parse().expect("an address")];
    let pull = std::thread::spawn(move || {
        let session = network(None, peers).open().expect("a session");
        let fetch = Fetch {
            local: &local,
            live: Arc::new(Live::listen(&session).expect("a session")),
            session: &session,
            transport,
            patience: Patience {
                answer: WATCHDOG,
                ..Patience::default()
            },
            pace: gateway::plan::Pace::default(),
            way: None,
            land: None,
            readers: Readers::Owner,
            rules: Rules::default(),
        };
        let order = Order {
            name: "model".into(),
            epoch: None,
            from: None,
        };
        fetch.run(&order, |_, _| {})
    });
    let (mut last, mut renewals) = (u64::MAX, 0);
    watch("the lease is renewed three times", || {
        let lease = &hosts[0].json("status", &[])[0]["leases"][0];
        let lives = lease["lives_ms"].as_u64().unwrap_or(u64::MAX);
        renewals += u32::from(lives > last && lives != u64::MAX);
        last = lives;
        renewals >= 3
    });
    slow.let_go();
    let report = pull.join().expect("no panic").expect("pulled");
    assert_eq!((report.retries, report.from.as_str()), (0, "host-0"));
    assert!(hosts[1].get("model") == bytes);
}
