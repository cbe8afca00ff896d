//! Some hosts, and the ledger of what was committed on them: whatever a host shows must be in it,
//! byte for byte.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};

use serde_json::Value;

use crate::content;
use crate::host::{Host, Programs, Pulling, Serving};
use crate::network::Network;
use crate::watch::until;

/// What every case is given.
#[derive(Clone, Debug)]
pub struct Means {
    /// What is tested.
    pub programs: Programs,
    /// An empty folder.
    pub place: PathBuf,
}

/// An object that was committed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Committed {
    /// Its name.
    pub name: String,
    /// Its epoch.
    pub epoch: u64,
    /// What [`content`] calls its bytes.
    pub version: u32,
    /// The host, as an index.
    pub home: usize,
}

/// See the module.
#[derive(Debug)]
pub struct World {
    /// The hosts; the first is the one that the others are told of.
    pub hosts: Vec<Host>,
    /// By identity.
    ledger: RefCell<BTreeMap<String, Committed>>,
    /// Versions whose commit was not answered: a broker died meanwhile.
    unknown: BTreeMap<u32, (String, usize)>,
    last: u32,
}

impl World {
    /// Makes hosts in networks and folders of their own.
    ///
    /// # Errors
    ///
    /// What does not start.
    pub fn create(means: &Means, hosts: u8, serving: &Serving) -> Result<World, String> {
        static WORLDS: AtomicU8 = AtomicU8::new(0);
        let number = WORLDS.fetch_add(1, Ordering::Relaxed);
        let place: &Path = &means.place.join(format!("w{number}"));
        std::fs::create_dir(place).map_err(|e| format!("{}: {e}", place.display()))?;
        let mut world = World {
            hosts: Vec::new(),
            ledger: RefCell::default(),
            unknown: BTreeMap::new(),
            last: 0,
        };
        for host in 1..=hosts {
            let (network, name) = (Network::create(number, host)?, format!("h{host}"));
            let peers = world.hosts.first().map(Host::at).into_iter().collect();
            let dir = place.join(&name);
            world.hosts.push(Host::start(
                &means.programs,
                network,
                &name,
                &dir,
                peers,
                serving,
            )?);
        }
        Ok(world)
    }

    /// Commits a version that was never committed before.
    ///
    /// # Errors
    ///
    /// What the host's broker says.
    pub fn put(&mut self, home: usize, name: &str, bytes: usize) -> Result<Committed, String> {
        self.last += 1;
        let put = self.hosts[home].put(name, &content::make(self.last, bytes));
        let epoch =
            put.inspect_err(|_| drop(self.unknown.insert(self.last, (name.into(), home))))?;
        let committed = Committed {
            name: name.into(),
            epoch,
            version: self.last,
            home,
        };
        // A broker that is killed in this moment comes back with it.
        let identity = until(&format!("{name} of epoch {epoch} in the list"), || {
            let list = self.hosts[home].list()?;
            let row = rows(&list).find(|row| row["name"] == name && row["epoch"] == epoch)?;
            row["identity"].as_str().map(str::to_owned)
        })?;
        self.ledger.borrow_mut().insert(identity, committed.clone());
        Ok(committed)
    }

    /// Reads all that all hosts show, and compares it with what was committed. Returns how many
    /// objects were read.
    ///
    /// # Errors
    ///
    /// What is visible and wrong: bytes, an identity that nobody committed, or one under another
    /// name or epoch.
    pub fn check(&self) -> Result<usize, String> {
        self.check_some(|_| true)
    }

    /// The same of one name.
    ///
    /// # Errors
    ///
    /// As [`check`](World::check).
    pub fn check_of(&self, name: &str) -> Result<usize, String> {
        self.check_some(|row| row["name"] == name)
    }

    fn check_some(&self, of: impl Fn(&Value) -> bool) -> Result<usize, String> {
        let mut read = 0;
        for host in &self.hosts {
            let list = until(&format!("the list of {}", host.name), || host.list())?;
            for row in rows(&list).filter(|row| row["state"] == "visible" && of(row)) {
                read += usize::from(self.check_one(host, row)?);
            }
        }
        Ok(read)
    }

    fn check_one(&self, host: &Host, row: &Value) -> Result<bool, String> {
        let identity = row["identity"].as_str().unwrap_or_default();
        let wrong = |why: String| format!("FINDING: {} shows {row}: {why}", host.name);
        let name = row["name"].as_str().unwrap_or_default();
        let epoch = row["epoch"].as_u64().unwrap_or_default();
        let bytes = until(&format!("the bytes of {row} on {}", host.name), || {
            if let Some(bytes) = host.get(name, epoch).ok()? {
                return Some(Some(bytes));
            }
            // It may have gone meanwhile.
            let list = host.list()?;
            (!rows(&list).any(|other| other["identity"] == identity && other["state"] == "visible"))
                .then_some(None)
        })?;
        let Some(bytes) = bytes else { return Ok(false) };
        let version = content::version(&bytes).map_err(wrong)?;
        let mut ledger = self.ledger.borrow_mut();
        if let (None, Some((of, home))) = (ledger.get(identity), self.unknown.get(&version))
            && of == name
            && !ledger.values().any(|known| known.version == version)
        {
            let committed = Committed {
                name: name.into(),
                epoch,
                version,
                home: *home,
            };
            ledger.insert(identity.into(), committed);
        }
        match ledger.get(identity) {
            None => Err(wrong(format!(
                "nobody committed this identity; its bytes are those of version {version}"
            ))),
            Some(known)
                if (known.name.as_str(), known.epoch, known.version) == (name, epoch, version) =>
            {
                Ok(true)
            }
            Some(known) => Err(wrong(format!(
                "its bytes are those of version {version}, but it is {known:?}"
            ))),
        }
    }

    /// Says whether a host shows an object.
    pub fn shows(&self, host: usize, object: &Committed) -> bool {
        let list = self.hosts[host].list();
        list.is_some_and(|list| {
            rows(&list).any(|row| {
                row["name"] == object.name.as_str()
                    && row["epoch"] == object.epoch
                    && row["state"] == "visible"
            })
        })
    }

    /// Pulls, which must work once nothing is wrong any more.
    ///
    /// # Errors
    ///
    /// It does not, or what it shows is wrong.
    pub fn pulled(&self, host: usize, object: &Committed) -> Result<(), String> {
        let more = vec!["--epoch".to_owned(), object.epoch.to_string()];
        let pull = self.hosts[host].pull(
            &object.name,
            &Pulling {
                more,
                ..Pulling::default()
            },
        )?;
        let ended = pull.end("a pull")?;
        if !ended.success() || !self.shows(host, object) {
            return Err(format!(
                "a pull of {} ended with {ended}, and it is not there\n{}",
                object.name,
                self.log()
            ));
        }
        self.check_of(&object.name).map(drop)
    }

    /// Removes all names where they were committed, and waits until no broker has anything of them:
    /// no replica, none that was begun, and no bytes.
    ///
    /// # Errors
    ///
    /// What stays.
    pub fn emptied(&mut self) -> Result<(), String> {
        for host in &self.hosts {
            let list = until(&format!("the list of {}", host.name), || host.list())?;
            let at_home = rows(&list).filter(|row| row["home"].is_null());
            let mut names: Vec<&str> = at_home.filter_map(|row| row["name"].as_str()).collect();
            names.dedup();
            for name in names {
                // A broker that was killed a moment ago may not serve yet.
                until(&format!("the removal of {name}"), || host.remove(name).ok())?;
            }
        }
        for host in &self.hosts {
            let mut last = None;
            until("nothing left", || {
                last = host.list();
                last.as_ref()
                    .filter(|list| rows(list).next().is_none() && list["bytes"] == 0)
                    .map(drop)
            })
            .map_err(|why| format!("{}: {why}, but {last:?}\n{}", host.name, self.log()))?;
        }
        Ok(())
    }

    /// The last lines of all hosts.
    pub fn log(&self) -> String {
        self.hosts.iter().map(Host::log).collect()
    }
}

fn rows(list: &Value) -> impl Iterator<Item = &Value> {
    list["objects"].as_array().into_iter().flatten()
}
