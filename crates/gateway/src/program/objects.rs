//! `gpu-ipc-gateway objects --all-hosts`: what all hosts have, page by page.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde::Serialize;
use zenoh::Wait;

use super::args::ObjectsOptions;
use super::state::network_of;
use crate::error::{Error, Result};
use crate::message::{List, Listed};
use crate::net::call::{Answer, Question, ask};
use crate::net::key::Gateway;
use crate::net::live::Live;
use crate::net::session::Session;

/// How long the first gateway may take to be reached, and those that it knows of.
const REACHED: Duration = Duration::from_secs(10);
/// How often they are looked for.
const LOOK: Duration = Duration::from_millis(20);
/// How long a gateway may take for one page.
const PATIENCE: Duration = Duration::from_secs(30);

/// The most pages of one gateway: a broker has 65,536 names.
const MOST_PAGES: usize = 4_096;

#[derive(Serialize)]
struct Row<'a> {
    #[serde(flatten)]
    gateway: &'a Gateway,
    name: &'a str,
    epoch: u64,
    identity: &'a str,
    bytes: u64,
    home: &'a str,
}

/// Lists them: what was printed stays, also when a gateway does not answer.
///
/// # Errors
///
/// What keeps it from asking, and [`Error::Unavailable`] where no gateway was reached, or one did
/// not give its whole list: a list that is short would say that the rest is not there.
pub fn run(options: &ObjectsOptions) -> Result<()> {
    let (network, _) = network_of(&options.place, &options.net)?;
    let session = network.open()?;
    let live = Live::listen(&session)?;
    let mut out = Out::begin(options.json);
    let silent = each(&session, &live, None, |gateway, listed| {
        out.row(gateway, listed)
    });
    let Some(silent) = silent else {
        let _ = session.close().wait();
        return Err(Error::Unavailable {
            what: "the list of objects".into(),
            why: format!("no gateway was reached within {} s", REACHED.as_secs()),
            remedy: "check `--peer` and `--tls`, and that a gateway runs there",
        });
    };
    let _ = session.close().wait();
    let printed = out.end();
    if silent.is_empty() {
        return printed;
    }
    let silent: Vec<String> = silent.into_iter().collect();
    Err(Error::Unavailable {
        what: "the whole list".into(),
        why: format!("the gateways of {} did not answer", silent.join(", ")),
        remedy: "see that they run, and ask again",
    })
}

/// Gives each object of each host, or of one, page by page. Returns the hosts that did not give
/// their whole list; nothing where no gateway was reached.
pub fn each(
    session: &Session,
    live: &Live,
    host: Option<&str>,
    mut give: impl FnMut(&Gateway, &Listed),
) -> Option<BTreeSet<String>> {
    let (mut gateways, mut silent) = all(session, live);
    if let Some(host) = host {
        gateways.retain(|gateway| gateway.host == host);
        silent.retain(|silent| silent == host);
    }
    if gateways.is_empty() && silent.is_empty() {
        return None;
    }
    for gateway in &gateways {
        if !list(session, gateway, &mut give) {
            silent.insert(gateway.host.clone());
        }
    }
    Some(silent)
}

/// Finds all gateways: those that are heard, and those that they know of. Returns those that were
/// reached, and the hosts of the others.
fn all(session: &Session, live: &Live) -> (Vec<Gateway>, BTreeSet<String>) {
    let until = Instant::now() + REACHED;
    let mut known: BTreeSet<Gateway> = BTreeSet::new();
    let mut asked: BTreeSet<Gateway> = BTreeSet::new();
    loop {
        let there = live.gateways(None);
        for gateway in &there {
            if !asked.insert(gateway.clone()) {
                continue;
            }
            let left = until.saturating_duration_since(Instant::now()).max(LOOK);
            let answer = ask(session, gateway, &Question::Gateways, left);
            let answer = answer.ok().and_then(|asked| asked.wait());
            if let Some(Answer::Gateways(others)) = answer.map(|answered| answered.answer) {
                known.extend(others);
            }
        }
        let missing = known.iter().filter(|known| !there.contains(known));
        let missing: BTreeSet<String> = missing.map(|gateway| gateway.host.clone()).collect();
        let reached = !there.is_empty() && missing.is_empty();
        if reached || Instant::now() > until {
            return (there, missing);
        }
        std::thread::sleep(LOOK);
    }
}

/// Gives all objects of a gateway, and says whether it gave them all.
fn list(session: &Session, gateway: &Gateway, give: &mut impl FnMut(&Gateway, &Listed)) -> bool {
    let (mut after, mut pages) = (None, 0);
    loop {
        let question = Question::List(List {
            after: after.clone(),
        });
        let answer = ask(session, gateway, &question, PATIENCE);
        let answer = answer.ok().and_then(|asked| asked.wait());
        let Some(Answer::Listed(page, more)) = answer.map(|answered| answered.answer) else {
            return false;
        };
        for listed in &page {
            give(gateway, listed);
        }
        pages += 1;
        let last = page.last().map(|last| (last.name.clone(), last.epoch));
        // A gateway that lies would be asked without end.
        let goes_on = last > after && pages < MOST_PAGES;
        match (more, goes_on) {
            (false, _) => return true,
            (true, false) => return false,
            (true, true) => after = last,
        }
    }
}

/// What is printed: a page in memory at a time.
struct Out {
    to: io::BufWriter<io::Stdout>,
    json: bool,
    rows: u64,
    failed: Option<io::Error>,
}

impl Out {
    fn begin(json: bool) -> Out {
        Out {
            to: io::BufWriter::new(io::stdout()),
            json,
            rows: 0,
            failed: None,
        }
    }

    fn write(&mut self, text: &str) {
        if self.failed.is_none() {
            self.failed = self.to.write_all(text.as_bytes()).err();
        }
    }

    fn row(&mut self, gateway: &Gateway, listed: &Listed) {
        let Listed {
            name,
            epoch,
            identity,
            bytes,
            origin,
            home,
        } = listed;
        let host = &gateway.host;
        let line = if self.json {
            let row = Row {
                gateway,
                name,
                epoch: *epoch,
                identity,
                bytes: *bytes,
                home: &home.host,
            };
            let comma = if self.rows > 0 { "," } else { "[" };
            let row = serde_json::to_string(&row).expect("texts and numbers have a JSON");
            format!("{comma}{row}")
        } else {
            let what = if *origin {
                "home".to_owned()
            } else {
                format!("replica from {}", home.host)
            };
            format!("{host}  {name}  epoch {epoch}  {bytes} bytes  {identity}  {what}\n")
        };
        self.rows += 1;
        self.write(&line);
    }

    fn end(mut self) -> Result<()> {
        let none = if self.rows == 0 {
            "no host has an object\n"
        } else {
            ""
        };
        let end = if self.rows == 0 { "[]\n" } else { "]\n" };
        self.write(if self.json { end } else { none });
        let failed = self.failed.take().or_else(|| self.to.flush().err());
        match failed {
            None => Ok(()),
            Some(error) => Err(Error::Unavailable {
                what: "the list of objects".into(),
                why: error.to_string(),
                remedy: "see that what reads it goes on",
            }),
        }
    }
}
