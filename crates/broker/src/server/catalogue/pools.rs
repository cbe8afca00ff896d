//! Pools: the first record, the hold, its end.

use std::time::{Duration, Instant};

use super::Catalogue;
use super::reading::why_not_admitted;
use crate::object::identity::Identity;
use crate::object::manifest::Manifest;
use crate::pool::Previous;
use crate::server::action::{Action, Answer, Asker, KeepError, Participant};
use crate::server::hold::{Hold, Holder, Pool};
use crate::server::leaving::Leaving;
use crate::server::listing::{PoolRow, Process};
use crate::server::object::{Object, Stage};
use crate::server::record::{Kept, MOST_PROCESSES, Phase, Record};
use crate::wire::RefusalCode;
use transport::server::Refused;

/// A pool that may be asked for, and what is answered of it.
struct Found<F> {
    identity: Identity,
    manifest: F,
    regions: Vec<F>,
    owner: u32,
    quarantine: Duration,
}

impl<F: Clone> Catalogue<F> {
    /// Says whether an object is a pool.
    pub(super) fn is_pool(&self, identity: Identity) -> bool {
        let manifest = self
            .objects
            .get(identity)
            .and_then(|of| of.manifest.as_ref());
        manifest.is_some_and(|of| of.layout.journal() > 0)
    }

    /// Refuses a pool beside what the name has, and anything beside a pool.
    pub(super) fn check_kind(&self, manifest: &Manifest) -> Result<(), Refused> {
        let Some((epoch, is)) = self.names.latest(&manifest.name) else {
            return Ok(());
        };
        let name = &manifest.name;
        let why = match (self.is_pool(is), manifest.layout.journal() > 0) {
            (false, false) => return Ok(()),
            (true, true) => format!("{name} is a pool already"),
            (true, false) => format!("{name} is a pool, and an object was to be committed"),
            (false, true) => {
                format!("{name} has an object, epoch {epoch}, and a pool was to be made")
            }
        };
        Err((RefusalCode::Pool, why))
    }

    /// Gives the keeper the first record of a pool that it has: only then the pool is visible.
    pub(super) fn first_record(&mut self, identity: Identity, manifest: F) -> Vec<Action<F>> {
        let pool = Pool {
            generation: 0,
            previous: Previous::Never,
            hold: Hold::First { manifest },
            coming: None,
            record: None,
        };
        self.pools.insert(identity, pool);
        let token = Identity([0; 16]);
        self.give_record(identity, 0, Phase::Never, token, Vec::new())
    }

    fn give_record(
        &mut self,
        pool: Identity,
        generation: u64,
        phase: Phase,
        token: Identity,
        processes: Vec<F>,
    ) -> Vec<Action<F>> {
        let seq = self.next_seq;
        self.next_seq += 1;
        let Some(row) = self.pools.get_mut(pool) else {
            return Vec::new();
        };
        row.coming = Some((seq, processes.clone()));
        let record = Record {
            pool,
            generation,
            phase,
            previous: row.previous,
            token,
            processes: processes.len(),
        };
        vec![Action::KeepRecord {
            seq,
            record,
            processes,
        }]
    }

    fn find_pool(&self, name: &str) -> Result<Found<F>, Refused> {
        let Some((epoch, identity)) = self.names.latest(name) else {
            let why = self.names.why_not_found(name);
            return Err((RefusalCode::NotFound, why));
        };
        let object = self.objects.get(identity);
        let Some(Object {
            stage: Stage::Visible { manifest: file },
            manifest: Some(manifest),
            ..
        }) = object
        else {
            return Err((RefusalCode::NotFound, "it is not visible yet".into()));
        };
        if manifest.layout.journal() == 0 {
            let why = format!("{name} is no pool, but an object, at epoch {epoch}: open it");
            return Err((RefusalCode::NotFound, why));
        }
        Ok(Found {
            identity,
            manifest: file.clone(),
            regions: object.map(Object::files).unwrap_or_default(),
            owner: manifest.owner,
            quarantine: manifest.backend.quarantine_unseen(),
        })
    }

    /// Makes a participant the holder of a pool. No answer means: not yet. The asker repeats.
    /// `processes` tell of its death and of its children's.
    ///
    /// A pool whose holder died is free when its GPU work can have ended, too: after the quarantine.
    pub fn adopt(
        &mut self,
        asker: Asker,
        request: u64,
        (name, token): (&str, Identity),
        processes: Result<Vec<F>, Refused>,
        who: Process,
        now: Instant,
    ) -> Vec<Action<F>> {
        let decline = |(refusal, why)| {
            let answer = Answer::Declined(refusal, why);
            vec![Action::Answer(asker.participant, request, answer)]
        };
        let found = match self.find_pool(name) {
            Ok(found) => found,
            Err(refused) => return decline(refused),
        };
        if found.owner != asker.uid {
            let why = format!("{name} belongs to uid {}, not {}", found.owner, asker.uid);
            return decline((RefusalCode::User, why));
        }
        if asker.shared_context {
            let why = "the participant is a client of MPS, so its death would not prove that its writes have ended";
            return decline((RefusalCode::SharedContext, why.into()));
        }
        let Some(row) = self.pools.get_mut(found.identity) else {
            return decline((RefusalCode::Failed, "its record is not there".into()));
        };
        let next = row.generation + 1;
        match &mut row.hold {
            Hold::Held(holder) if holder.token == token => {
                return vec![self.answer_pool(asker.participant, request, found)];
            }
            Hold::Taking {
                asker: of,
                request: last,
                holder,
                ..
            } if holder.token == token => {
                (*of, *last) = (asker, request);
                return Vec::new();
            }
            Hold::Closing { .. } | Hold::First { .. } => return Vec::new(),
            Hold::Held(holder) | Hold::Taking { holder, .. } => {
                let Process {
                    pid,
                    command,
                    name: called,
                } = &holder.who;
                let why = format!(
                    "{name} is held by process {pid} ({command} {called}) for {} s, and was asked for by process {} ({} {})",
                    holder.since.elapsed().as_secs(),
                    who.pid,
                    who.command,
                    who.name
                );
                return decline((RefusalCode::Held, why));
            }
            Hold::Free { since } => {
                let (ago, quarantine) = (now.saturating_duration_since(*since), found.quarantine);
                if row.previous == Previous::Died && ago < quarantine {
                    let why = format!(
                        "the holder of {name} died {} ms ago, and its GPU work may go on for {}",
                        ago.as_millis(),
                        quarantine.as_millis()
                    );
                    return decline((RefusalCode::Held, why));
                }
            }
        }
        let processes = match processes {
            Ok(processes) if processes.len() <= MOST_PROCESSES => processes,
            Ok(processes) => {
                let why = format!(
                    "{} processes have the device's files open for this participant, and a pool's holder may have {}",
                    processes.len() - 1,
                    MOST_PROCESSES - 1
                );
                return decline((RefusalCode::Limit, why));
            }
            Err(refused) => return decline(refused),
        };
        row.hold = Hold::Taking {
            asker,
            request,
            holder: Holder {
                token,
                by: Some(asker.participant),
                alive: 0,
                dead: false,
                who,
                since: Instant::now(),
            },
            given_up: false,
        };
        self.pools.holds_now(asker.participant, found.identity);
        self.give_record(found.identity, next, Phase::Begun, token, processes)
    }

    fn answer_pool(&self, to: Participant, request: u64, found: Found<F>) -> Action<F> {
        let row = self.pools.get(found.identity);
        let answer = Answer::Pool {
            identity: found.identity,
            generation: row.map_or(0, |row| row.generation),
            previous: row.map_or(Previous::Never, |row| row.previous),
            manifest: found.manifest,
            regions: found.regions,
        };
        Action::Answer(to, request, answer)
    }

    /// Leases a pool for reading.
    pub fn read_pool(&mut self, asker: Asker, request: u64, name: &str) -> Action<F> {
        let decline = |(refusal, why)| {
            Action::Answer(asker.participant, request, Answer::Declined(refusal, why))
        };
        let found = match self.find_pool(name) {
            Ok(found) => found,
            Err(refused) => return decline(refused),
        };
        let groups = self.groups_of(asker.participant);
        let manifest = self
            .objects
            .get(found.identity)
            .and_then(|of| of.manifest.as_ref());
        if let Some(of) = manifest
            && !of.readers.admit(of.owner, asker.uid, groups)
        {
            let why = why_not_admitted("pool", of, asker.uid);
            return decline((RefusalCode::User, why));
        }
        self.objects.read(found.identity, asker.participant);
        self.answer_pool(asker.participant, request, found)
    }

    /// Ends a hold in order, for the process that shows its token. One that has ended is noted too.
    pub fn release(
        &mut self,
        asker: Asker,
        request: u64,
        name: &str,
        token: Identity,
    ) -> Vec<Action<F>> {
        let noted = vec![Action::Answer(asker.participant, request, Answer::Noted)];
        let Ok(found) = self.find_pool(name) else {
            return noted;
        };
        let Some(row) = self.pools.get_mut(found.identity) else {
            return noted;
        };
        let generation = row.generation;
        match &mut row.hold {
            Hold::Held(holder) if holder.token == token => {
                row.hold = Hold::Closing {
                    to: asker.participant,
                    request,
                    holder: holder.clone(),
                };
                self.give_record(found.identity, generation, Phase::Closed, token, Vec::new())
            }
            Hold::Closing {
                to,
                request: last,
                holder,
            } if holder.token == token => {
                (*to, *last) = (asker.participant, request);
                Vec::new()
            }
            Hold::Taking {
                holder, given_up, ..
            } if holder.token == token => {
                *given_up = true;
                noted
            }
            _ => noted,
        }
    }

    /// Goes on when the keeper has taken a record, or has not.
    pub fn recorded(
        &mut self,
        seq: u64,
        record: Record,
        kept: Result<F, KeepError>,
    ) -> Vec<Action<F>> {
        let identity = record.pool;
        let pool = self.pools.get_mut(identity);
        let Some(row) = pool.filter(|row| row.coming.as_ref().is_some_and(|(of, _)| *of == seq))
        else {
            // The pool was removed meanwhile.
            return self.forget_records(vec![(seq, record.processes)]);
        };
        let processes = row
            .coming
            .take()
            .map(|(_, files)| files)
            .unwrap_or_default();
        let mut actions = Vec::new();
        let kept = kept.map(|file| {
            let kept = Kept {
                seq,
                record: record.clone(),
                file,
                processes,
            };
            row.record.replace(kept)
        });
        let former = match &kept {
            Ok(former) => former.as_ref().map(|of| (of.seq, of.processes.len())),
            Err(_) => None,
        };
        let since = Instant::now();
        let hold = std::mem::replace(&mut row.hold, Hold::Free { since });
        match (hold, kept) {
            (Hold::First { manifest }, Ok(_)) => {
                actions.extend(self.settle(identity, Ok(manifest)));
            }
            (Hold::First { .. }, Err(error)) => {
                self.pools.remove(identity);
                let object = self.objects.get(identity);
                let gone = object.map(|of| (of.seq, of.regions.len()));
                actions.extend(self.settle(identity, Err(error)));
                actions.extend(self.forget_records(gone.into_iter().collect()));
            }
            (
                Hold::Taking {
                    asker,
                    request,
                    holder,
                    given_up,
                },
                Ok(_),
            ) => {
                row.generation = record.generation;
                row.hold = Hold::Held(holder.clone());
                if holder.dead {
                    row.end_by_death();
                    self.pools.holds_no_more(asker.participant, identity);
                } else if given_up {
                    actions.extend(self.close_abandoned(identity, asker, holder));
                } else if let Some(found) = self.found(identity) {
                    actions.push(self.answer_pool(asker.participant, request, found));
                }
                actions.extend(self.tell_watchers(identity));
            }
            (Hold::Taking { asker, request, .. }, Err(error)) => {
                self.pools.holds_no_more(asker.participant, identity);
                if let KeepError::Refused(why) = error {
                    let answer = Answer::Declined(RefusalCode::Keeper, why);
                    actions.push(Action::Answer(asker.participant, request, answer));
                }
            }
            (Hold::Closing { holder, .. }, Err(KeepError::Absent)) if holder.dead => {
                row.end_by_death();
                if let Some(by) = holder.by {
                    self.pools.holds_no_more(by, identity);
                }
            }
            (Hold::Closing { holder, .. }, Err(KeepError::Absent)) => {
                // The question comes again.
                row.hold = Hold::Held(holder);
            }
            (
                Hold::Closing {
                    to,
                    request,
                    holder,
                },
                _,
            ) => {
                row.previous = Previous::Closed;
                if let Some(by) = holder.by {
                    self.pools.holds_no_more(by, identity);
                }
                actions.push(Action::Answer(to, request, Answer::Noted));
            }
            (hold @ (Hold::Free { .. } | Hold::Held(_)), _) => row.hold = hold,
        }
        actions.extend(self.forget_records(former.into_iter().collect()));
        actions
    }

    /// Ends a hold that was given to a process which had given up waiting for it.
    fn close_abandoned(
        &mut self,
        identity: Identity,
        asker: Asker,
        holder: Holder,
    ) -> Vec<Action<F>> {
        let (token, generation) = (
            holder.token,
            self.pools.get(identity).map(|of| of.generation),
        );
        if let Some(row) = self.pools.get_mut(identity) {
            row.hold = Hold::Closing {
                to: asker.participant,
                request: 0,
                holder,
            };
        }
        self.give_record(
            identity,
            generation.unwrap_or_default(),
            Phase::Closed,
            token,
            Vec::new(),
        )
    }

    fn found(&self, identity: Identity) -> Option<Found<F>> {
        let name = &self.objects.get(identity)?.manifest.as_ref()?.name;
        self.find_pool(name).ok()
    }

    fn tell_watchers(&mut self, identity: Identity) -> Vec<Action<F>> {
        let manifest = self
            .objects
            .get(identity)
            .and_then(|of| of.manifest.as_ref());
        let Some(name) = manifest.map(|of| of.name.clone()) else {
            return Vec::new();
        };
        let told = self.watches.of(&name);
        told.into_iter()
            .filter_map(|participant| self.look_for_newer(participant, &name))
            .collect()
    }

    fn forget_records(&mut self, gone: Vec<(u64, usize)>) -> Vec<Action<F>> {
        if gone.is_empty() {
            return Vec::new();
        }
        vec![Action::Forget {
            token: self.leaving.begin(Leaving::Retired),
            objects: gone,
            bequest: None,
        }]
    }

    /// Takes the record of a pool that goes.
    pub(super) fn take_record(&mut self, identity: Identity) -> Option<(u64, usize)> {
        let record = self.pools.remove(identity)?.record?;
        Some((record.seq, record.processes.len()))
    }

    /// Ends what a participant holds that is proven dead.
    pub(super) fn holder_died(&mut self, participant: Participant) {
        let held: Vec<Identity> = self.pools.held_by(participant).collect();
        for identity in held {
            let Some(row) = self.pools.get_mut(identity) else {
                continue;
            };
            match &mut row.hold {
                // What becomes of the record decides.
                Hold::Taking { holder, .. } | Hold::Closing { holder, .. } => {
                    holder.dead = true;
                    continue;
                }
                Hold::Held(_) => row.end_by_death(),
                Hold::First { .. } | Hold::Free { .. } => {}
            }
            self.pools.holds_no_more(participant, identity);
        }
    }

    /// Notes that a process has exited of a hold that a former broker gave.
    pub fn process_exited(&mut self, identity: Identity, token: Identity) {
        if let Some(row) = self.pools.get_mut(identity)
            && let Hold::Held(holder) | Hold::Closing { holder, .. } = &mut row.hold
            && holder.token == token
            && holder.by.is_none()
        {
            holder.alive = holder.alive.saturating_sub(1);
            holder.dead = holder.alive == 0;
            if holder.dead && matches!(row.hold, Hold::Held(_)) {
                row.end_by_death();
            }
        }
    }

    /// Takes the records that a keeper kept. Returns what is to be taken out of it: a pool without a
    /// record may have a holder that is not known, and goes.
    pub fn inherit(&mut self, records: Vec<(Kept<F>, Process)>) -> Vec<Action<F>> {
        let mut gone = self.restore_records(records);
        let lacks = |(identity, _): &(&Identity, &Object<F>)| {
            self.is_pool(**identity) && self.pools.get(**identity).is_none()
        };
        let lost: Vec<Identity> = self
            .objects
            .iter()
            .filter(lacks)
            .map(|(of, _)| *of)
            .collect();
        self.evict(&lost);
        gone.extend(self.take_out(&lost));
        self.forget_records(gone)
    }

    /// Says whether a participant holds a pool, or is about to.
    pub fn holds(&self, participant: Participant) -> bool {
        self.pools.held_by(participant).next().is_some()
    }

    /// Lists the processes of the holds that a former broker gave, each with the pool and the token
    /// of its hold.
    pub fn inherited_processes(&self) -> Vec<(Identity, Identity, F)> {
        let rows = self.pools.iter();
        rows.flat_map(|(identity, row)| {
            let token = match &row.hold {
                Hold::Held(holder) if holder.by.is_none() => Some(holder.token),
                _ => None,
            };
            let files = row
                .record
                .iter()
                .flat_map(|record| record.processes.clone());
            token
                .into_iter()
                .flat_map(move |token| files.clone().map(move |file| (*identity, token, file)))
                .collect::<Vec<_>>()
        })
        .collect()
    }

    /// Says whether a record is on its way to the keeper.
    pub fn is_recording(&self) -> bool {
        self.pools.iter().any(|(_, row)| row.coming.is_some())
    }

    /// Lists the records that a keeper must have, in the form of objects.
    pub(super) fn records(&self) -> impl Iterator<Item = (u64, F, Vec<F>)> + '_ {
        let records = self.pools.iter().filter_map(|(_, row)| row.record.as_ref());
        records.map(|of| (of.seq, of.file.clone(), of.processes.clone()))
    }

    /// Takes the records that a keeper kept, the last of each pool. Returns what is to be taken out
    /// of the keeper: former records, and those of pools that are not there.
    fn restore_records(&mut self, mut records: Vec<(Kept<F>, Process)>) -> Vec<(u64, usize)> {
        let mut gone = Vec::new();
        records.sort_by_key(|(of, _)| std::cmp::Reverse(of.seq));
        for (kept, who) in records {
            self.next_seq = self.next_seq.max(kept.seq + 1);
            let pool = kept.record.pool;
            if self.is_pool(pool) && self.pools.get(pool).is_none() {
                self.pools.insert(pool, Pool::restored(kept, who));
            } else {
                gone.push((kept.seq, kept.processes.len()));
            }
        }
        gone
    }

    /// Says what a pool's row of the listing has beside that of an object.
    pub(super) fn pool_row(&self, identity: Identity) -> Option<(PoolRow, u64)> {
        let row = self.pools.get(identity)?;
        let (holder, since) = row.holder();
        let pool = PoolRow {
            generation: row.generation,
            previous: row.previous.name().into(),
            holder: holder.map(|of| of.who.clone()),
            age_s: since.map_or(0, |since| since.elapsed().as_secs()),
        };
        Some((pool, row.record.as_ref().map_or(0, |of| of.seq)))
    }

    /// Lists the pools that no process has held for as long as a pool may be free.
    pub(super) fn pools_over(&self, now: Instant) -> Vec<Identity> {
        let Some(ttl) = self.limits.pool_ttl else {
            return Vec::new();
        };
        let is_over = |(identity, row): &(&Identity, &Pool<F>)| {
            let manifest = self
                .objects
                .get(**identity)
                .and_then(|of| of.manifest.as_ref());
            let pinned = manifest.is_none_or(|of| self.limits.is_pinned(&of.name));
            matches!(row.hold, Hold::Free { since } if now.saturating_duration_since(since) >= ttl)
                && !pinned
        };
        let over = self.pools.iter().filter(is_over);
        over.map(|(identity, _)| *identity).collect()
    }
}
