//! The hosts of a run, drawn from a seed.

use std::time::Duration;

use gpu_ipc_gateway_plan::Dice;
use serde::Serialize;

/// Bytes of the object: the weights of a model of 70 billion parameters in 16 bits.
pub const SIZE: f64 = 140e9;
/// Bytes a second of a link, each way: 100 Gbit/s.
pub const LINK: f64 = 12.5e9;

/// What is wrong with a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trouble {
    /// Nothing.
    None,
    /// A quarter of the hosts have a tenth of the link.
    Slow,
    /// A tenth of the hosts die, at any time before their third round: half are killed, half stop
    /// for good.
    Dying,
    /// A tenth of the hosts always report no load, and serve everybody at once.
    Lying,
    /// All of these.
    All,
}

impl Trouble {
    /// Every kind.
    pub const EACH: [Trouble; 5] = [
        Trouble::None,
        Trouble::Slow,
        Trouble::Dying,
        Trouble::Lying,
        Trouble::All,
    ];

    /// Names it for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Trouble::None => "equal hosts",
            Trouble::Slow => "slow links",
            Trouble::Dying => "hosts that die",
            Trouble::Lying => "hosts that lie",
            Trouble::All => "all three",
        }
    }

    fn has(self, one: Trouble) -> bool {
        self == one || self == Trouble::All
    }
}

/// How a host ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// Its connections are reset.
    Killed,
    /// It falls silent.
    Stopped,
}

/// One host.
#[derive(Clone, Debug)]
pub struct Host {
    /// Bytes a second, each way.
    pub link: f64,
    /// Whether it reports no load and serves everybody.
    pub lies: bool,
    /// When and how it dies.
    pub death: Option<(Duration, Death)>,
}

impl Host {
    /// Returns what a read takes over this host's link: a host knows its own.
    #[must_use]
    pub fn expected(&self) -> Duration {
        Duration::from_secs_f64(SIZE / self.link)
    }
}

/// Returns what a read takes over a whole link.
#[must_use]
pub fn one_read() -> Duration {
    Duration::from_secs_f64(SIZE / LINK)
}

/// Draws the hosts. The first has the object, and nothing is wrong with it.
#[must_use]
pub fn hosts(count: u32, trouble: Trouble, seed: u64) -> Vec<Host> {
    let mut dice = Dice::new(seed);
    let draw = |number| {
        let (slow, dies, lies) = (dice.below(4) == 0, dice.below(10) == 0, dice.below(10) == 0);
        let (at, how) = (dice.below(3000) as u32, dice.below(2));
        if number == 0 {
            return Host {
                link: LINK,
                lies: false,
                death: None,
            };
        }
        let death = (
            one_read() * at / 1000,
            if how == 0 {
                Death::Killed
            } else {
                Death::Stopped
            },
        );
        Host {
            link: if slow && trouble.has(Trouble::Slow) {
                LINK / 10.0
            } else {
                LINK
            },
            lies: lies && trouble.has(Trouble::Lying),
            death: Some(death).filter(|_| dies && trouble.has(Trouble::Dying)),
        }
    };
    (0..count).map(draw).collect()
}
