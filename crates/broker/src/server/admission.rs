//! What a broker does with connections: checks a hello, welcomes, hears, and acts on a death. The
//! rest of the way in is [`transport::server`].

use std::sync::Arc;

use gpu_api::Result;
use transport::os::closer::Foreign;
use transport::os::process;
use transport::os::socket::groups;
use transport::server::{Door, First, Greeting, Newcomer, Proof, Refused, Seat, Server, failed};
use transport::wire::packet::Versions;
use transport::wire::table;

use crate::server::action::{Asker, Participant};
use crate::server::peer::{Peer, Refusals, Slots};
use crate::server::service::Service;
use crate::wire::{MOST_BYTES, RefusalCode, ToBroker, ToClient, VERSIONS};

/// A process that said a good hello, and what it gets.
pub(super) struct Prepared {
    asker: Asker,
    name: String,
    version: u16,
    groups: Vec<u32>,
    newcomer: Newcomer,
    slots: Slots,
}

impl Server for Service {
    type Id = Participant;
    type Said = ToBroker;
    type Prepared = Prepared;
    const TAKES_FDS: bool = true;

    fn door(&mut self) -> &mut Door<Participant> {
        &mut self.door
    }

    fn seat(&self, participant: Participant) -> Option<Arc<Seat>> {
        Some(self.peers.get(&participant)?.seat.clone())
    }

    fn write_refusal((refusal, why): Refused, packet: &mut [u8; MOST_BYTES]) -> usize {
        let refused = ToClient::Refused {
            refusal,
            lowest: VERSIONS.lowest,
            highest: VERSIONS.highest,
            why,
        };
        refused.encode(packet)
    }

    fn greet(
        &mut self,
        from: &Greeting,
        said: ToBroker,
        fds: Vec<Foreign>,
    ) -> Result<First<Prepared>, Refused> {
        let ToBroker::Hello {
            lowest,
            highest,
            shared_context,
            name,
            ..
        } = said
        else {
            return Err((
                RefusalCode::Protocol,
                "the first message must be a hello".into(),
            ));
        };
        let theirs = Versions { lowest, highest };
        let Some(version) = VERSIONS.agree(theirs) else {
            let why = format!("the participant speaks versions {theirs}, the broker {VERSIONS}");
            return Err((RefusalCode::Version, why));
        };
        let most = self.parts.catalogue.limits().participants;
        if self.peers.len() >= most {
            let why = format!("the broker has {most} participants already");
            return Err((RefusalCode::Limit, why));
        }
        let newcomer = Newcomer::of(fds)?;
        let groups = groups(&from.socket).map_err(|e| (RefusalCode::Failed, e.to_string()))?;
        let slots = Slots::new().map_err(|e| failed(&e))?;
        let participant = Participant(self.next_participant);
        self.next_participant += 1;
        let asker = Asker {
            participant,
            uid: from.of.uid,
            shared_context,
        };
        Ok(First::Seat(Prepared {
            asker,
            name,
            version,
            groups,
            newcomer,
            slots,
        }))
    }

    fn admit(&mut self, key: u64, socket: Foreign, prepared: Prepared) {
        let (asker, version) = (prepared.asker, prepared.version);
        let peer = Peer {
            asker,
            command: process::command_of(prepared.newcomer.pid),
            name: prepared.name,
            version,
            seat: Arc::new(prepared.newcomer.sit_down(socket)),
            slots: prepared.slots,
            refusals: Refusals::default(),
        };
        let welcomed = self.welcome(key, &peer);
        if let Err(error) = welcomed {
            self.door.forget(asker.participant, &peer.seat);
            self.refuse(&peer.seat.socket, failed(&error));
            return;
        }
        let catalogue = &mut self.parts.catalogue;
        catalogue.joined(asker.participant, prepared.groups);
        self.peers.insert(asker.participant, peer);
    }

    fn obey(
        &mut self,
        participant: Participant,
        said: ToBroker,
        fds: Vec<Foreign>,
    ) -> Result<(), &'static str> {
        if matches!(said, ToBroker::Hello { .. }) {
            return Err("it said hello before");
        }
        self.answer_message(participant, said, fds);
        Ok(())
    }

    fn noted(&mut self, participant: Participant, proof: Proof) {
        if proof.hung_up {
            self.parts.catalogue.hung_up(participant);
        }
        self.bury(participant, proof);
    }

    fn extra(&mut self, key: u64) {
        if !self.inherited_exited(key) {
            self.keeper_died();
        }
    }
}

impl Service {
    /// Watches and welcomes a participant: the broker's own pidfd and the participant's counter
    /// file go with the welcome.
    fn welcome(&mut self, key: u64, peer: &Peer) -> Result<()> {
        let participant = peer.asker.participant;
        self.door.seat(key, participant, &peer.seat)?;
        let file = peer.slots.file();
        let welcome = ToClient::Welcome {
            lineage: self.parts.catalogue.lineage(),
            participant: participant.0,
            pid: std::process::id(),
            slots: file.slot_count(),
        };
        let mut bytes = [0; MOST_BYTES];
        let len = table::encode(&welcome, &mut bytes, peer.version);
        self.door.welcome(&peer.seat, &bytes[..len], file.fd())
    }
}
