//! A peer that sends garbage to every port, and one that holds connections and says nothing, while
//! an object is pulled.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use gateway::plan::Dice;
use rustix::process::Signal;

use super::stop::stopped_at;
use crate::host::{Pulling, Serving};
use crate::network::Network;
use crate::relay::ports;
use crate::world::{Means, World};

const ORIGIN: usize = 0;
const REPLICA: usize = 1;
const BYTES: usize = 4 << 20;
/// Silent connections to each port: more than the transport of tests takes at a time.
const SILENT: usize = 70;
/// How long the attacker waits for something to be taken or answered.
const PATIENCE: Duration = Duration::from_millis(100);

pub fn on_every_port(means: &Means) -> Result<String, String> {
    let mut world = World::create(means, 2, &Serving::default())?;
    let object = world.put(ORIGIN, "model", BYTES)?;
    let mut pull = stopped_at(
        &world,
        REPLICA,
        &object,
        "pull.granted",
        &Pulling::default(),
    )?;
    let networks = [
        world.hosts[ORIGIN].network.clone(),
        world.hosts[REPLICA].network.clone(),
    ];
    let mut dice = Dice::new(u64::from(std::process::id()));
    let (mut attacked, mut silent) = (0, Vec::new());
    for (victim, from) in [
        (&networks[ORIGIN], &networks[REPLICA]),
        (&networks[REPLICA], &networks[ORIGIN]),
    ] {
        let open = ports(victim);
        // The gateway's questions and bytes; at the replica the pull's bytes too.
        if open.len() < 2 {
            return Err(format!("{} listens on {open:?} alone", victim.address()));
        }
        for port in open {
            let at = SocketAddr::from((victim.address(), port));
            for bytes in garbage(&mut dice) {
                from.within(|| send(at, &bytes))??;
            }
            silent.extend(hold(from, at)?);
            attacked += 1;
        }
    }
    pull.signal(Signal::CONT);
    let ended = pull
        .end("the pull")
        .map_err(|why| format!("{why}\n{}", world.log()))?;
    drop(silent);
    let alive = world
        .hosts
        .iter_mut()
        .all(|host| host.gateway.as_mut().is_some_and(|it| it.ended().is_none()));
    if !ended.success() || !alive {
        return Err(format!(
            "the pull ended with {ended}, all gateways live: {alive}\n{}",
            world.log()
        ));
    }
    world.check()?;
    world.emptied()?;
    Ok(format!("{attacked} ports"))
}

/// Nothing, a byte, lengths that are too great, noise, zeros, and text.
fn garbage(dice: &mut Dice) -> Vec<Vec<u8>> {
    let noise = |dice: &mut Dice, bytes: usize| {
        (0..bytes / 8)
            .flat_map(|_| dice.throw().to_le_bytes())
            .collect()
    };
    vec![
        Vec::new(),
        vec![0],
        vec![0xff; 64],
        noise(dice, 32),
        noise(dice, 64 << 10),
        vec![0; 256 << 10],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ]
}

/// Sends as much as is taken, and reads what is answered.
fn send(at: SocketAddr, bytes: &[u8]) -> Result<(), String> {
    let mut stream =
        TcpStream::connect(at).map_err(|e| format!("{at} takes no connection: {e}"))?;
    let _ = (
        stream.set_write_timeout(Some(PATIENCE)),
        stream.set_read_timeout(Some(PATIENCE)),
    );
    let _ = (stream.write_all(bytes), stream.shutdown(Shutdown::Write));
    let _ = stream.read(&mut [0; 4_096]);
    Ok(())
}

fn hold(from: &Network, at: SocketAddr) -> Result<Vec<TcpStream>, String> {
    from.within(|| {
        (0..SILENT)
            .filter_map(|_| TcpStream::connect_timeout(&at, PATIENCE).ok())
            .collect()
    })
}
