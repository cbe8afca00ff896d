//! The state machine of a pull. Pure: no clock, no broker, no network.

use std::time::Duration;

use crate::message::{Again, Confirm, Grant, LeaseId, Renew};

/// How long each step may take.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Patience {
    /// Until the answer to a question; then it is asked again.
    pub answer: Duration,
    /// Without a byte, until a transfer counts as one that never ends.
    pub stall: Duration,
    /// Between renewals, where a third of a lease's life is not shorter.
    pub renew: Duration,
    /// While nobody has room to serve, or another process of this host is pulling it, in a row; and
    /// while a gateway says that it is registering the object.
    pub busy: Duration,
    /// Attempts in all.
    pub attempts: u32,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            answer: Duration::from_secs(10),
            stall: Duration::from_secs(60),
            renew: Duration::from_secs(8),
            busy: Duration::from_secs(600),
            attempts: 5,
        }
    }
}

/// What a pull obeys. Only tests have other rules than these.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(hidden)]
pub struct Rules {
    /// Commits only what was confirmed. Else whatever was read, also when a renewal said that the
    /// lease has ended.
    pub confirms: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { confirms: true }
    }
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Event {
    /// A lease was granted to the question with this number.
    Granted(u64, Grant),
    /// The question with this number was refused: for good, or for this moment.
    Declined(u64, String, Again),
    /// The host that has the object has no room, or another process here is pulling it: look again
    /// after this time. Nothing has failed.
    Busy(u64, String, Duration),
    /// The object of the question with this number is being registered yet.
    Registering(u64),
    /// The object is there to be filled.
    Created,
    /// It could not be made, or its memory could not be registered: for good, or for this moment.
    NotCreated(String, Again),
    /// So many bytes have arrived.
    Progress(u64),
    /// The transfer has ended.
    Read,
    /// The transfer has failed: nothing is written any more.
    ReadFailed(String),
    /// The device sees the bytes, and they are digested.
    Flushed,
    /// The origin renewed the lease, or did not.
    Renewed(LeaseId, bool),
    /// The origin answered the confirmation with this number.
    Confirmed(u64, bool),
    /// The origin's object has other bytes than this confirmation named.
    Differs(u64),
    /// The origin cannot say yet what the confirmation with this number asks.
    NotYet(u64),
    /// The confirmation with this number will have no answer: nobody is there to give it.
    Unheard(u64),
    /// The object is visible.
    Committed,
    /// The broker refused the commit.
    NotCommitted(String),
    /// Time has passed.
    Tick,
}

/// What is to be done, in order.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// Ask for a lease with this number. The caller chooses the host, another at each attempt if
    /// there is one.
    Ask(u64),
    /// Ask the same host the same question, with the same number.
    Repeat(u64),
    /// Make the object, with this identity and epoch, and register its memory.
    Create(Grant),
    /// Read all of it.
    Read(Grant),
    /// Make the device see what was read, and digest it.
    Flush,
    /// Ask the origin if the lease was alive; the caller adds the digest.
    Confirm(Confirm),
    /// Keep the lease alive.
    Renew(Renew),
    /// Make the object visible.
    Commit,
    /// Give the object up and its memory back: nothing is written to it any more.
    Drop,
    /// Tell the origin that the lease has ended.
    Release(LeaseId),
    /// It is over.
    End(Outcome),
}

/// What became of a pull.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Outcome {
    /// The object is visible on this host.
    Done,
    /// It is not, and everything was given back.
    Failed(String),
    /// It is not, and a transfer may be writing yet: this process must end.
    Stuck(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Stage {
    Asking {
        number: u64,
        /// When it was asked first.
        first: Duration,
    },
    Creating {
        grant: Grant,
        lost: bool,
    },
    Reading {
        grant: Grant,
        bytes: u64,
        lost: bool,
    },
    Flushing {
        grant: Grant,
        lost: bool,
    },
    Confirming {
        grant: Grant,
        number: u64,
        asked: u32,
        /// Until it is asked again.
        patience: Duration,
    },
    Committing {
        grant: Grant,
    },
    /// Until somebody is asked again, in another attempt or in the same.
    Waiting {
        pause: Duration,
        counts: bool,
    },
    Ended,
}

/// A pull of one object.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Pull {
    patience: Patience,
    rules: Rules,
    stage: Stage,
    /// When this stage began, or its last byte arrived.
    since: Duration,
    renewed: Duration,
    number: u64,
    attempt: u32,
    /// Since when it waits for room, or for another process.
    busy: Option<Duration>,
}

/// How often a confirmation is asked for: an answer may be lost.
const CONFIRMATIONS: u32 = 3;
/// How long to wait before another attempt, and before a confirmation is asked for again that
/// nobody was there to answer.
const PAUSE: Duration = Duration::from_millis(200);

impl Pull {
    /// Begins, and returns the first thing to do.
    pub fn begin(now: Duration, patience: Patience, rules: Rules) -> (Pull, Vec<Action>) {
        let stage = Stage::Asking {
            number: 1,
            first: now,
        };
        let pull = Pull {
            patience,
            rules,
            stage,
            since: now,
            renewed: now,
            number: 1,
            attempt: 1,
            busy: None,
        };
        (pull, vec![Action::Ask(1)])
    }

    /// Says which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Takes what happened, and returns what is to be done. What belongs to another stage or number
    /// changes nothing.
    pub fn happened(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let stage = std::mem::replace(&mut self.stage, Stage::Ended);
        match (stage, event) {
            (Stage::Asking { number, .. }, Event::Granted(to, grant)) if to == number => {
                (self.renewed, self.busy) = (now, None);
                self.go(
                    now,
                    Stage::Creating { grant, lost: false },
                    vec![Action::Create(grant)],
                )
            }
            (Stage::Asking { number, .. }, Event::Declined(to, why, again)) if to == number => {
                self.again(now, why, again, Vec::new())
            }
            (Stage::Asking { number, .. }, Event::Busy(to, why, pause)) if to == number => {
                let since = *self.busy.get_or_insert(now);
                if now.saturating_sub(since) >= self.patience.busy {
                    let why = format!("{why}; waited {} s", self.patience.busy.as_secs());
                    return vec![Action::End(Outcome::Failed(why))];
                }
                self.go(
                    now,
                    Stage::Waiting {
                        pause,
                        counts: false,
                    },
                    Vec::new(),
                )
            }
            (stage @ Stage::Asking { number, first }, Event::Registering(to)) if to == number => {
                if now.saturating_sub(first) < self.patience.busy {
                    return self.go(now, stage, vec![Action::Repeat(number)]);
                }
                let seconds = self.patience.busy.as_secs();
                let why = format!("its gateway has been registering it for {seconds} s");
                self.again(now, why, Again::Later, Vec::new())
            }
            (Stage::Asking { .. }, Event::Tick) if self.is_over(now, self.patience.answer) => {
                self.again(now, "no gateway answered".into(), Again::Later, Vec::new())
            }
            (Stage::Creating { grant, lost: true }, Event::Created) if self.rules.confirms => {
                let why = "the origin ended the lease before the object was made here".into();
                self.throw_away(now, grant, why)
            }
            (Stage::Creating { grant, .. }, Event::Created) => self.go(
                now,
                Stage::Reading {
                    grant,
                    bytes: 0,
                    lost: false,
                },
                vec![Action::Read(grant)],
            ),
            (Stage::Creating { grant, .. }, Event::NotCreated(why, again)) => {
                self.again(now, why, again, vec![Action::Release(grant.lease)])
            }
            (Stage::Reading { grant, bytes, lost }, Event::Progress(more)) => {
                self.stage = Stage::Reading {
                    grant,
                    bytes: bytes.max(more),
                    lost,
                };
                if more > bytes {
                    self.since = now;
                }
                Vec::new()
            }
            (Stage::Creating { grant, .. }, Event::Renewed(lease, false))
                if lease == grant.lease =>
            {
                self.stage = Stage::Creating { grant, lost: true };
                Vec::new()
            }
            (Stage::Reading { grant, bytes, .. }, Event::Renewed(lease, false))
                if lease == grant.lease =>
            {
                self.stage = Stage::Reading {
                    grant,
                    bytes,
                    lost: true,
                };
                Vec::new()
            }
            (Stage::Flushing { grant, .. }, Event::Renewed(lease, false))
                if lease == grant.lease =>
            {
                self.stage = Stage::Flushing { grant, lost: true };
                Vec::new()
            }
            (Stage::Reading { grant, lost, .. }, Event::Read) => {
                self.go(now, Stage::Flushing { grant, lost }, vec![Action::Flush])
            }
            (Stage::Reading { grant, .. }, Event::ReadFailed(why)) => {
                self.throw_away(now, grant, why)
            }
            (Stage::Reading { .. }, Event::Tick) if self.is_over(now, self.patience.stall) => {
                let why = format!(
                    "no byte came for {} s, and the transfer does not fail",
                    self.patience.stall.as_secs()
                );
                // The origin may be answering yet, so its timer ends the lease.
                vec![Action::End(Outcome::Stuck(why))]
            }
            (
                stage @ (Stage::Creating { grant, .. }
                | Stage::Reading { grant, .. }
                | Stage::Flushing { grant, .. }),
                Event::Tick,
            ) if now.saturating_sub(self.renewed) >= self.renews_after(grant) => {
                self.stage = stage;
                self.renewed = now;
                self.number += 1;
                vec![Action::Renew(Renew {
                    lease: grant.lease,
                    number: self.number,
                })]
            }
            (Stage::Flushing { grant, lost: true }, Event::Flushed) if self.rules.confirms => self
                .throw_away(
                    now,
                    grant,
                    "the origin ended the lease while it was read".into(),
                ),
            (Stage::Flushing { grant, .. }, Event::Flushed) => {
                if self.rules.confirms {
                    self.confirm(now, grant, 1)
                } else {
                    self.go(now, Stage::Committing { grant }, vec![Action::Commit])
                }
            }
            (Stage::Flushing { grant, .. }, Event::ReadFailed(why)) => {
                self.throw_away(now, grant, why)
            }
            (Stage::Confirming { grant, number, .. }, Event::Confirmed(to, yes))
                if to == number =>
            {
                if yes {
                    self.go(now, Stage::Committing { grant }, vec![Action::Commit])
                } else {
                    self.throw_away(
                        now,
                        grant,
                        "the origin did not confirm that the lease was alive".into(),
                    )
                }
            }
            (Stage::Confirming { grant, number, .. }, Event::Differs(to)) if to == number => {
                let why =
                    "the bytes that came are not the origin's: something altered them on the way";
                self.throw_away(now, grant, why.into())
            }
            (Stage::Confirming { grant, number, .. }, Event::NotYet(to)) if to == number => {
                self.confirm(now, grant, 1)
            }
            (
                Stage::Confirming {
                    grant,
                    number,
                    asked,
                    ..
                },
                Event::Unheard(to),
            ) if to == number => {
                let patience = PAUSE * asked;
                let stage = Stage::Confirming {
                    grant,
                    number,
                    asked,
                    patience,
                };
                self.go(now, stage, Vec::new())
            }
            (
                Stage::Confirming {
                    grant,
                    asked,
                    patience,
                    ..
                },
                Event::Tick,
            ) if self.is_over(now, patience) => {
                if asked < CONFIRMATIONS {
                    self.confirm(now, grant, asked + 1)
                } else {
                    self.throw_away(now, grant, "the origin does not answer any more".into())
                }
            }
            (Stage::Committing { grant }, Event::Committed) => {
                vec![Action::Release(grant.lease), Action::End(Outcome::Done)]
            }
            (Stage::Committing { grant }, Event::NotCommitted(why)) => {
                vec![
                    Action::Drop,
                    Action::Release(grant.lease),
                    Action::End(Outcome::Failed(why)),
                ]
            }
            (Stage::Waiting { pause, counts }, Event::Tick) if self.is_over(now, pause) => {
                self.attempt += u32::from(counts);
                self.number += 1;
                let number = self.number;
                let stage = Stage::Asking { number, first: now };
                self.go(now, stage, vec![Action::Ask(number)])
            }
            (stage, _) => {
                self.stage = stage;
                Vec::new()
            }
        }
    }

    fn is_over(&self, now: Duration, patience: Duration) -> bool {
        now.saturating_sub(self.since) >= patience
    }

    fn renews_after(&self, grant: Grant) -> Duration {
        self.patience
            .renew
            .min(Duration::from_millis(grant.lives_ms) / 3)
    }

    fn go(&mut self, now: Duration, stage: Stage, actions: Vec<Action>) -> Vec<Action> {
        self.stage = stage;
        self.since = now;
        actions
    }

    fn confirm(&mut self, now: Duration, grant: Grant, asked: u32) -> Vec<Action> {
        self.number += 1;
        let number = self.number;
        let confirm = Confirm {
            lease: grant.lease,
            identity: grant.identity,
            number,
            digest: None,
        };
        let stage = Stage::Confirming {
            grant,
            number,
            asked,
            patience: self.patience.answer,
        };
        self.go(now, stage, vec![Action::Confirm(confirm)])
    }

    fn throw_away(&mut self, now: Duration, grant: Grant, why: String) -> Vec<Action> {
        self.again(
            now,
            why,
            Again::Later,
            vec![Action::Drop, Action::Release(grant.lease)],
        )
    }

    /// Waits for another attempt, if there is one.
    fn again(
        &mut self,
        now: Duration,
        why: String,
        again: Again,
        mut first: Vec<Action>,
    ) -> Vec<Action> {
        if again == Again::Never || self.attempt >= self.patience.attempts {
            first.push(Action::End(Outcome::Failed(why)));
            return first;
        }
        let pause = PAUSE * self.attempt.min(16);
        self.go(
            now,
            Stage::Waiting {
                pause,
                counts: true,
            },
            first,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Incarnation, LeaseNumber};

    const SECOND: Duration = Duration::from_secs(1);

    fn begun(attempts: u32) -> Pull {
        let patience = Patience {
            attempts,
            busy: SECOND * 60,
            ..Patience::default()
        };
        let (pull, actions) = Pull::begin(Duration::ZERO, patience, Rules::default());
        assert_eq!(actions, [Action::Ask(1)]);
        pull
    }

    fn grant(lives_ms: u64) -> Grant {
        let lease = LeaseId {
            incarnation: Incarnation([1; 16]),
            lease: LeaseNumber([4; 16]),
            asker: Incarnation([5; 16]),
        };
        Grant {
            lease,
            identity: [2; 16],
            epoch: 3,
            lives_ms,
        }
    }

    #[test]
    fn a_busy_gateway_is_no_attempt_until_patience_ends() {
        let mut pull = begun(1);
        for number in 1..60 {
            let now = SECOND * number as u32;
            assert_eq!(
                pull.happened(now, Event::Busy(number, "2 of 2".into(), SECOND)),
                []
            );
            assert_eq!(pull.happened(now, Event::Tick), [], "not before its time");
            assert_eq!(
                pull.happened(now + SECOND, Event::Tick),
                [Action::Ask(number + 1)]
            );
        }
        assert_eq!(pull.attempt(), 1);
        let ended = pull.happened(SECOND * 61, Event::Busy(60, "2 of 2".into(), SECOND));
        assert_eq!(
            ended,
            [Action::End(Outcome::Failed("2 of 2; waited 60 s".into()))]
        );
    }

    #[test]
    fn a_lease_resets_the_wait_and_what_fails_is_an_attempt() {
        let mut pull = begun(2);
        pull.happened(SECOND, Event::Busy(1, "full".into(), SECOND));
        assert_eq!(pull.happened(SECOND * 50, Event::Tick), [Action::Ask(2)]);
        assert_eq!(
            pull.happened(SECOND * 50, Event::Granted(2, grant(30_000))),
            [Action::Create(grant(30_000))]
        );
        pull.happened(SECOND * 50, Event::Created);
        pull.happened(SECOND * 50, Event::ReadFailed("cut".into()));
        assert_eq!(pull.happened(SECOND * 90, Event::Tick), [Action::Ask(3)]);
        assert_eq!(
            pull.happened(SECOND * 90, Event::Busy(3, "full".into(), SECOND)),
            [],
            "the wait begins anew"
        );
        assert_eq!(pull.happened(SECOND * 91, Event::Tick), [Action::Ask(4)]);
        let ended = pull.happened(SECOND * 91, Event::Declined(4, "gone".into(), Again::Later));
        assert_eq!(
            ended,
            [Action::End(Outcome::Failed("gone".into()))],
            "the second attempt was the last"
        );
    }

    #[test]
    fn a_gateway_that_registers_is_told_from_one_that_is_silent() {
        let answer = Patience::default().answer;
        let almost = answer - Duration::from_millis(1);
        let mut pull = begun(1);
        let mut now = Duration::ZERO;
        while now + almost < SECOND * 60 {
            now += almost;
            assert_eq!(pull.happened(now, Event::Tick), []);
            assert_eq!(
                pull.happened(now, Event::Registering(2)),
                [],
                "of a question that was not asked"
            );
            assert_eq!(
                pull.happened(now, Event::Registering(1)),
                [Action::Repeat(1)]
            );
        }
        let mut silent = pull.clone();
        assert_eq!(
            silent.happened(now + answer, Event::Tick),
            [Action::End(Outcome::Failed("no gateway answered".into()))]
        );
        let mut endless = pull.clone();
        let why = "its gateway has been registering it for 60 s".into();
        assert_eq!(
            endless.happened(now + almost, Event::Registering(1)),
            [Action::End(Outcome::Failed(why))]
        );
        assert_eq!(
            pull.happened(now + almost, Event::Granted(1, grant(30_000))),
            [Action::Create(grant(30_000))]
        );
        assert_eq!(
            pull.happened(now + almost, Event::Registering(1)),
            [],
            "it came late"
        );
    }

    /// A pull of one attempt whose bytes have arrived, at `now`.
    fn confirming(now: Duration) -> (Pull, u64) {
        let mut pull = begun(1);
        pull.happened(now, Event::Granted(1, grant(30_000)));
        pull.happened(now, Event::Created);
        pull.happened(now, Event::Read);
        match pull.happened(now, Event::Flushed)[..] {
            [Action::Confirm(confirm)] => (pull, confirm.number),
            ref other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_origin_that_is_not_there_to_confirm_costs_no_patience() {
        let (mut pull, mut number) = confirming(SECOND);
        let mut now = SECOND;
        for asked in 1..=CONFIRMATIONS {
            assert_eq!(
                pull.happened(now, Event::Unheard(number + 1)),
                [],
                "of a question that was not asked"
            );
            assert_eq!(pull.happened(now, Event::Unheard(number)), []);
            now += PAUSE * asked;
            match pull.happened(now, Event::Tick)[..] {
                [Action::Confirm(confirm)] if asked < CONFIRMATIONS => number = confirm.number,
                [
                    Action::Drop,
                    Action::Release(_),
                    Action::End(Outcome::Failed(ref why)),
                ] if asked == CONFIRMATIONS => {
                    assert_eq!(why, "the origin does not answer any more");
                }
                ref other => panic!("asked {asked} times: {other:?}"),
            }
        }
        assert!(now < SECOND * 3, "{now:?}");
    }

    #[test]
    fn an_answer_that_comes_after_all_counts() {
        let (mut pull, number) = confirming(SECOND);
        pull.happened(SECOND, Event::Unheard(number));
        assert_eq!(
            pull.happened(SECOND, Event::Confirmed(number, true)),
            [Action::Commit]
        );
    }

    #[test]
    fn a_lease_is_renewed_while_the_object_is_made_and_what_was_lost_is_not_read() {
        let mut pull = begun(2);
        pull.happened(Duration::ZERO, Event::Granted(1, grant(900)));
        let now = Duration::from_millis(300);
        let renewals = pull.happened(now, Event::Tick);
        assert!(matches!(renewals[..], [Action::Renew(_)]), "{renewals:?}");
        let lease = grant(900).lease;
        assert_eq!(pull.happened(now, Event::Renewed(lease, false)), []);
        assert_eq!(
            pull.happened(now, Event::Created),
            [Action::Drop, Action::Release(lease)]
        );
        assert_eq!(pull.happened(SECOND, Event::Tick), [Action::Ask(3)]);
    }

    #[test]
    fn a_short_lease_is_renewed_three_times_in_its_life() {
        for (lives_ms, renewed) in [
            (900, Duration::from_millis(300)),
            (60_000, Patience::default().renew),
        ] {
            let mut pull = begun(1);
            pull.happened(Duration::ZERO, Event::Granted(1, grant(lives_ms)));
            pull.happened(Duration::ZERO, Event::Created);
            assert_eq!(
                pull.happened(renewed - Duration::from_millis(1), Event::Tick),
                []
            );
            let renewals = pull.happened(renewed, Event::Tick);
            assert!(matches!(renewals[..], [Action::Renew(_)]), "{renewals:?}");
        }
    }
}
