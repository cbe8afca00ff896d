//! The servers that the cases run over, each with its client: a session and a broker.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use broker::{Broker, Client, Layout, Limits, ObjectError, Options, PartSpec, Reader};
use gpu_ipc::{After, Error, Gpu, Participant, ReceivedBlock, Session, To, Wait};
use harness::WATCHDOG;

use crate::wait_until;

/// Why a connect failed.
#[derive(Debug)]
#[expect(
    dead_code,
    reason = "the texts are for the message of a case that fails"
)]
pub enum Failed {
    /// No answer came in time.
    Late,
    /// The other side refused, or is gone.
    Told(String),
    /// A call failed here.
    Here(String),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        match error {
            Error::Deadline { .. } => Failed::Late,
            Error::Refused { .. } | Error::Connect { .. } => Failed::Told(error.to_string()),
            error => Failed::Here(error.to_string()),
        }
    }
}

impl From<ObjectError> for Failed {
    fn from(error: ObjectError) -> Failed {
        match error {
            ObjectError::Gpu(error) => error.into(),
            ObjectError::Refused { .. } => Failed::Told(error.to_string()),
            error => Failed::Here(error.to_string()),
        }
    }
}

/// A server of this process.
pub trait Server: Sized + 'static {
    /// What connects to it.
    type Client: Send + 'static;
    /// Threads of who connects, by their names as the kernel cuts them.
    const NEWCOMER: &'static [&'static str];
    /// Threads of the server that serve connections.
    const SERVER: &'static [&'static str];
    /// The library's threads with one honest client, sorted.
    const THREADS: &'static [&'static str];
    /// Files that are then mapped, and registered.
    const FILES: (usize, usize);
    /// Fewer steps than these, of a newcomer's connect, of a server that lets it in, and of a
    /// server that is killed as it does, and the injector missed some.
    const LEAST: (u32, u32, u32);
    /// The same for a client that leaves.
    const LEAST_GOODBYE: u32;

    /// Serves in a directory.
    fn open(dir: &Path, gpu: &Gpu) -> Self;
    /// Connects.
    fn connect(gpu: &Gpu, dir: &Path, patience: Duration) -> Result<Self::Client, Failed>;
    /// Gets memory from the server.
    fn serve(&self, client: &Self::Client);
    /// What an honest client holds.
    type Held;
    /// Has an honest client hold memory.
    fn hold(&self, client: &Self::Client) -> Self::Held;
    /// Looks whether it still does, while the server may stand still.
    fn check(&self, client: &Self::Client, held: &Self::Held);
    /// Says what the server's tables have beside the honest client.
    fn is_alone(&self, client: &Self::Client) -> Result<(), String>;
    /// Leaves.
    fn leave(client: Self::Client);
}

impl Server for Session {
    type Client = Participant;
    type Held = ReceivedBlock;
    const NEWCOMER: &'static [&'static str] = &["newcomer", "gpu-ipc-partici"];
    const SERVER: &'static [&'static str] = &["gpu-ipc-session"];
    const THREADS: &'static [&'static str] =
        &["gpu-ipc-blockin", "gpu-ipc-partici", "gpu-ipc-session"];
    /// A counter file has two mappings and two registrations, one at each side, and the region has
    /// one.
    const FILES: (usize, usize) = (3, 2);
    const LEAST: (u32, u32, u32) = (20, 15, 15);
    const LEAST_GOODBYE: u32 = 1;

    fn open(dir: &Path, gpu: &Gpu) -> Session {
        let builder = Session::builder(gpu.clone())
            .socket(dir.join("s"))
            .quarantine(Duration::ZERO);
        builder.open().expect("a session")
    }

    fn connect(gpu: &Gpu, dir: &Path, patience: Duration) -> Result<Participant, Failed> {
        let builder = Participant::builder(gpu.clone()).timeout(Some(patience));
        Ok(builder.connect(dir.join("s"))?)
    }

    fn serve(&self, to: &Participant) {
        drop(self.hold(to));
    }

    fn hold(&self, to: &Participant) -> ReceivedBlock {
        let block = self.alloc(4096).expect("there is room");
        let descriptor = block
            .share(To::Participant(to.id()), After::Done)
            .expect("who is welcome can be shared with");
        to.claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("who is welcome can claim")
    }

    fn check(&self, honest: &Participant, held: &ReceivedBlock) {
        assert_eq!(held.len(), 4096);
        self.serve(honest);
    }

    fn is_alone(&self, honest: &Participant) -> Result<(), String> {
        self.collect();
        let rows = self.participants();
        if rows == [honest.id()] {
            Ok(())
        } else {
            Err(format!("{rows:?} are in the table"))
        }
    }

    fn leave(client: Participant) {
        // It may be the server that has gone.
        let _ = client.close(Some(WATCHDOG));
    }
}

/// A broker of this process. It serves until the process ends; its thread, and those that wait for
/// the driver and the keeper, stay.
pub struct Brokered;

/// Brokers that were opened in this process.
static BROKERS: AtomicUsize = AtomicUsize::new(0);

/// The library's threads of all brokers that were opened in this process, sorted.
pub fn threads_of_brokers() -> Vec<String> {
    let brokers = BROKERS.load(Ordering::Relaxed);
    let each = ["gpu-ipc-deposit", "gpu-ipc-worksho"];
    let names = each.map(|name| vec![name.to_owned(); brokers]);
    names.concat()
}

const OBJECT: &str = "held";
const BYTES: [u8; 5] = *b"bytes";

fn read_object(reader: &Reader) {
    assert_eq!(reader.read("w").expect("it is mapped"), BYTES);
}

impl Server for Brokered {
    type Client = Client;
    type Held = Reader;
    const NEWCOMER: &'static [&'static str] = &["newcomer", "gpu-ipc-objects"];
    const SERVER: &'static [&'static str] = &["a-broker"];
    const THREADS: &'static [&'static str] =
        &["gpu-ipc-deposit", "gpu-ipc-objects", "gpu-ipc-worksho"];
    /// A counter file has two mappings, one at each side, and the client's registration; the
    /// object is mapped by the client.
    const FILES: (usize, usize) = (3, 1);
    const LEAST: (u32, u32, u32) = (14, 15, 15);
    /// It only closes its socket, which takes nothing.
    const LEAST_GOODBYE: u32 = 0;

    fn open(dir: &Path, gpu: &Gpu) -> Brokered {
        let gpu = gpu.clone();
        let options = Options {
            dir: dir.to_owned(),
            gpus: Arc::new(move || Ok(vec![gpu.clone()])),
            limits: Limits::default(),
            allowed: Default::default(),
            keeper: None,
        };
        let broker = Broker::open(options).expect("a broker");
        BROKERS.fetch_add(1, Ordering::Relaxed);
        std::thread::Builder::new()
            .name("a-broker".into())
            .spawn(move || broker.run())
            .expect("a thread");
        Brokered
    }

    fn connect(gpu: &Gpu, dir: &Path, patience: Duration) -> Result<Client, Failed> {
        let builder = Client::builder(gpu.clone()).patience(patience);
        Ok(builder.dir(dir).connect()?)
    }

    fn serve(&self, to: &Client) {
        read_object(&to.open(OBJECT).expect("it is there"));
    }

    fn hold(&self, honest: &Client) -> Reader {
        let part = PartSpec::bytes("w", BYTES.len() as u64).expect("a part");
        let layout = Layout::pack([part], b"").expect("a layout");
        let mut writer = honest.create(OBJECT, layout).expect("there is room");
        writer.write("w", &BYTES).expect("it fits");
        let commit = writer.commit(&[]).expect("nothing is captured");
        commit.wait().expect("the broker lives");
        honest.open(OBJECT).expect("it is there")
    }

    fn check(&self, _honest: &Client, held: &Reader) {
        read_object(held);
    }

    /// A participant that stays has a mapped file and two descriptors in this process, which are
    /// counted.
    fn is_alone(&self, _honest: &Client) -> Result<(), String> {
        Ok(())
    }

    fn leave(client: Client) {
        drop(client);
    }
}

/// Waits until this process has no mapping of a participant's file any more.
pub fn await_nobody() {
    wait_until("who came to go", || {
        let maps = fs::read_to_string("/proc/self/maps").expect("proc is mounted");
        if maps.contains("/memfd:gpu-ipc-counters") {
            Err("its file is mapped".to_owned())
        } else {
            Ok(())
        }
    });
}
