//! The processes of an example: this program in another role, and two that own memory: a keeper and
//! its broker.

use std::error::Error;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;

use gpu_ipc::broker::keeper::process::Keeper;
use gpu_ipc::broker::{Broker, Client, Limits, Options as BrokerOptions};
use harness::program::this_program;
use harness::{Child, die_with_the_tests, play, role, wait_until};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::common::{end, open};
use super::options::Options;

/// What a process is.
#[derive(Serialize, Deserialize)]
enum Role<R> {
    Keeper(Place),
    Broker(Place),
    Own(R),
}

/// Where a broker is, and on which backend.
#[derive(Clone, Serialize, Deserialize)]
pub struct Place {
    dir: PathBuf,
    backend: String,
}

/// Runs the example of this name, or one of its processes in its role.
pub fn run<R: DeserializeOwned>(
    name: &str,
    demonstrate: impl FnOnce(&Options) -> Result<(), Box<dyn Error>>,
    live: impl FnOnce(R) -> Result<(), Box<dyn Error>>,
) -> ExitCode {
    let role = role::<Role<R>>();
    if role.is_some() {
        die_with_the_tests();
    }
    let done = match role {
        None => Options::parse(name).and_then(|options| demonstrate(&options)),
        Some(Role::Keeper(place)) => keep(&place),
        Some(Role::Broker(place)) => serve(place),
        Some(Role::Own(role)) => live(role),
    };
    end(name, done)
}

/// Starts this program in a role.
pub fn start<T: Serialize, A: DeserializeOwned>(role: impl Serialize) -> Child<T, A> {
    Child::start(&Role::Own(role))
}

/// A keeper with its broker, as `gpu-ipc keep -- gpu-ipc broker` starts them, in a directory of
/// their own.
pub struct Owner {
    _keeper: Child<(), ()>,
    _dir: tempfile::TempDir,
    place: Place,
}

impl Owner {
    /// Starts both.
    pub fn start(backend: &str) -> Result<Owner, Box<dyn Error>> {
        let dir = tempfile::tempdir()?;
        let place = Place {
            dir: dir.path().into(),
            backend: backend.into(),
        };
        Ok(Owner {
            _keeper: Child::start(&Role::<()>::Keeper(place.clone())),
            _dir: dir,
            place,
        })
    }

    /// Returns where it is: all that readers and writers need to know.
    pub fn place(&self) -> Place {
        self.place.clone()
    }
}

impl Place {
    /// Opens the device, and connects to the broker, which may still be starting.
    pub fn connect(&self, name: &str) -> Result<Client, Box<dyn Error>> {
        let gpu = open(&self.backend)?;
        let mut client = None;
        wait_until("the broker to serve", || {
            let builder = Client::builder(gpu.clone()).dir(&self.dir).name(name);
            client = builder.connect().ok();
            client.is_some()
        });
        client.ok_or_else(|| "no broker".into())
    }
}

fn keep(place: &Place) -> Result<(), Box<dyn Error>> {
    let end = Keeper::open(&place.dir, None)?.run(|| {
        let mut command = this_program();
        play(&mut command, &Role::<()>::Broker(place.clone()));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    })?;
    Err(format!("the keeper ended: {end:?}").into())
}

fn serve(Place { dir, backend }: Place) -> Result<(), Box<dyn Error>> {
    let find = move || {
        let refused = |error: Box<dyn Error>| gpu_ipc::Error::Refused {
            why: error.to_string(),
            remedy: "choose another backend",
        };
        Ok(vec![open(&backend).map_err(refused)?])
    };
    let options = BrokerOptions {
        dir,
        gpus: Arc::new(find),
        limits: Limits::default(),
        allowed: Default::default(),
        keeper: std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from),
    };
    Broker::open(options)?.run()
}
