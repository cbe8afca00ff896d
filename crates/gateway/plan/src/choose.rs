//! From whom to read.

use std::time::Duration;

use crate::dice::Dice;
use crate::view::{Source, View};

/// What a host that wants the object does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<H> {
    /// Asks this host for a lease.
    Read {
        /// The host.
        host: H,
        /// Says to an origin that the others failed or kept this host waiting, so that it does not
        /// point to them.
        last_resort: bool,
    },
    /// Looks again after this time, or when it hears something.
    Wait(Duration),
    /// Nobody else announces the object.
    Nobody,
}

/// Decides from whom to read, or to wait.
///
/// - A host that refused, failed or was slow is not asked again before its bar has ended. The bar
///   doubles with each time.
/// - A host that says it is full is not asked; an origin says so once it has stepped aside. A host
///   that has waited long, or that no replica serves, is desperate and asks those too: a false
///   report cannot starve it.
/// - Of two drawn among the rest the one with the fewer reads is taken ("the power of two choices",
///   Mitzenmacher 2001), and if it is full too, the host waits. So a host that always reports no
///   load draws at most two in as many readers as there are sources, not all that find the others
///   busy.
///
/// ```
/// use std::time::Duration;
/// use gpu_ipc_gateway_plan::{Step, View, choose};
///
/// let zero = Duration::ZERO;
/// let view = View { me: 1, now: zero, wanted_since: zero, expected: zero, sources: &[], troubles: &[], seed: 0 };
/// assert_eq!(choose(&view), Step::Nobody);
/// ```
#[must_use]
pub fn choose<H: Copy + Ord>(view: &View<'_, H>) -> Step<H> {
    let others = view.others();
    if others.is_empty() {
        return Step::Nobody;
    }
    let mut dice = Dice::new(view.seed);
    let replicas = others.iter().filter(|source| !source.origin).count();
    let serving: Vec<_> = others
        .iter()
        .copied()
        .filter(|s| !s.origin && !view.has_failed(s.host))
        .collect();
    let desperate = view.out_of_patience(&serving) || (replicas > 0 && serving.is_empty());

    let rested: Vec<_> = others
        .iter()
        .copied()
        .filter(|source| view.barred_until(source.host).is_none())
        .collect();
    let drawn = lighter_of_two(&rested, &mut dice);
    if let Some(source) = drawn.filter(|source| desperate || source.reads < source.limit) {
        return Step::Read {
            host: source.host,
            last_resort: source.origin && desperate,
        };
    }
    let first_end = others
        .iter()
        .filter_map(|source| view.barred_until(source.host))
        .min();
    let bar = first_end
        .filter(|_| rested.is_empty())
        .map(|end| end.saturating_sub(view.now));
    Step::Wait(
        bar.unwrap_or_default()
            .max(drawn_pause(view.pause(), &mut dice)),
    )
}

/// Draws two, or the only one, and takes the one with fewer reads; `None` of none.
fn lighter_of_two<H: Copy>(sources: &[Source<H>], dice: &mut Dice) -> Option<Source<H>> {
    let count = sources.len() as u64;
    let one = dice.below(count);
    let two = (one + 1 + dice.below(count.saturating_sub(1))) % count.max(1);
    let (one, two) = (sources.get(one as usize)?, sources.get(two as usize)?);
    Some(if two.reads < one.reads { *two } else { *one })
}

/// Returns half a pause to one and a half.
fn drawn_pause(pause: Duration, dice: &mut Dice) -> Duration {
    pause / 2 + pause * (dice.below(1024) as u32) / 1024
}
