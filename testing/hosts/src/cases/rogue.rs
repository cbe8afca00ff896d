//! A peer with a lease of a small object edits the addresses that it was given, and reads or writes
//! there: what the carrier has, an object that it was not lent, the object itself, a ring. Nothing is
//! harmed: no gateway dies, objects stay what they are, what was not lent is not read, and the next
//! pull is right.

use crate::content;
use crate::host::{Process, Serving};
use crate::watch::until;
use crate::world::{Means, World};

const ORIGIN: usize = 0;
const READER: usize = 1;
const BYTES: usize = 8 << 10;
const SMALL: &str = "small";
const SECRET: &str = "secret";

/// Where the rogue goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    /// The carrier's heap.
    Heap,
    /// The memory that it was lent.
    Object,
    /// Where the gateway has what it has not lent.
    Gateway,
}

pub fn edits_metadata(means: &Means) -> Result<String, String> {
    attack(means, &Serving::default())
}

pub fn edits_metadata_beside_rings(means: &Means) -> Result<String, String> {
    attack(means, &Serving::rings())
}

fn attack(means: &Means, serving: &Serving) -> Result<String, String> {
    let mut world = World::create(means, 2, serving)?;
    let small = world.put(ORIGIN, SMALL, BYTES)?;
    let secret = world.put(ORIGIN, SECRET, BYTES)?;
    let secret_bytes = hexadecimal(&content::make(secret.version, BYTES));
    let (mut said, mut deaths) = (Vec::new(), 0);
    for target in [Target::Heap, Target::Gateway, Target::Object] {
        for write in [false, true] {
            let carrier = carrier(&world)?;
            let address = match target {
                Target::Object => None,
                Target::Heap => Some(mapped(carrier, "[heap]")?),
                Target::Gateway => {
                    let gateway = world.hosts[ORIGIN].gateway.as_ref().map(Process::id);
                    Some(mapped(gateway.unwrap_or_default(), "[heap]")?)
                }
            };
            let got = world.hosts[ORIGIN].attacked(&world.hosts[READER], SMALL, address, write)?;
            if got.contains(&secret_bytes[..64]) {
                return Err(format!("what was not lent was read at {address:?}: {got}"));
            }
            if let Some(ended) = world.hosts[ORIGIN]
                .gateway
                .as_ref()
                .and_then(Process::ended)
            {
                return Err(format!("the gateway ended with {ended}\n{}", world.log()));
            }
            // All that is visible is what was committed, and a pull by the present carrier is right.
            world.check()?;
            let name = format!("after-{}", said.len());
            let object = world.put(ORIGIN, &name, BYTES)?;
            world.pulled(READER, &object)?;
            deaths += u64::from(self::carrier(&world)? != carrier);
            said.push(got.chars().take(7).collect::<String>());
        }
    }
    for object in [&small, &secret] {
        world.pulled(READER, object)?;
    }
    world.check()?;
    Ok(format!(
        "{said:?}; {deaths} carriers died of it, and no gateway"
    ))
}

fn carrier(world: &World) -> Result<u32, String> {
    until("a carrier", || {
        world.hosts[ORIGIN].gateway.as_ref()?.carrier()
    })
}

/// Finds where a process has something.
fn mapped(pid: u32, what: &str) -> Result<u64, String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).map_err(|e| e.to_string())?;
    let line = maps.lines().find(|line| line.ends_with(what));
    let start = line.and_then(|line| line.split('-').next());
    start
        .and_then(|start| u64::from_str_radix(start, 16).ok())
        .ok_or_else(|| format!("process {pid} has no {what}"))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
