//! A gateway that calls itself by another host's name: it has what that host has not, and says that
//! everything was removed there. Its certificate is whose it is given.

use std::path::PathBuf;
use std::process::ExitCode;

use gateway::message::{Again, Has, Home, Incarnation};
use gateway::net::call::{Answer, Answered, Question, read_question, reply};
use gateway::net::key::Gateway;
use gateway::net::session::{Address, Network, Trust};
use zenoh::Wait;

/// What it does.
#[derive(clap::Args)]
pub struct Impostor {
    #[arg(long)]
    listen: Address,
    #[arg(long)]
    peer: Address,
    /// Certificate, key and authority.
    #[arg(long, num_args = 3)]
    tls: Vec<PathBuf>,
    /// Whose name it takes.
    host: String,
}

impl Impostor {
    /// Answers until it is killed, and prints what it was asked.
    ///
    /// # Errors
    ///
    /// It never came so far.
    pub fn run(&self) -> Result<ExitCode, String> {
        let [certificate, key, authority] = &self.tls[..] else {
            return Err("three files are wanted".into());
        };
        let network = Network {
            listen: Some(self.listen),
            peers: vec![self.peer],
            trust: Trust::Certificates {
                certificate: certificate.clone(),
                key: key.clone(),
                authority: authority.clone(),
            },
        };
        let session = network.open().map_err(|e| e.to_string())?;
        // The lowest, which is asked first.
        let gateway = Gateway {
            host: self.host.clone(),
            incarnation: Incarnation([0; 16]),
        };
        let (ours, host) = (session.clone(), self.host.clone());
        let lie = move |query: zenoh::query::Query| {
            let bytes = query
                .payload()
                .map(|bytes| bytes.to_bytes().into_owned())
                .unwrap_or_default();
            let Ok(question) = read_question(&bytes) else {
                return;
            };
            reply(&ours, &query, &Answered::plain(said(&host, &question)));
            if let Question::Removed(_) = question {
                println!("impostor: asked for removals");
            }
        };
        let text = |e: zenoh::Error| e.to_string();
        let _queryable = session
            .declare_queryable(format!("{}/ask", gateway.key()))
            .callback(lie)
            .wait()
            .map_err(text)?;
        let _token = session
            .liveliness()
            .declare_token(format!("{}/live", gateway.key()))
            .wait()
            .map_err(text)?;
        loop {
            std::thread::park();
        }
    }
}

fn said(host: &str, question: &Question) -> Answer {
    match question {
        Question::Find(_) => Answer::Found(vec![Has {
            epoch: 1,
            identity: "e".repeat(32),
            bytes: 4096,
            origin: true,
            home: Home::read(host),
            reads: 0,
            limit: 1,
            admitted: 0,
        }]),
        Question::Removed(removed) => {
            let all = removed.names.iter().map(|name| (name.clone(), 1_000));
            Answer::Removed(all.collect())
        }
        Question::Gateways => Answer::Gateways(Vec::new()),
        _ => Answer::Declined {
            why: "the impostor was believed".into(),
            again: Again::Never,
        },
    }
}
