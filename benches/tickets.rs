//! What a ticket's claim costs beside a bare request and reply over the same kind of socket between two threads, in the
//! same run: `cargo bench --bench tickets`.

use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use divan::Bencher;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Claims, Descriptor, DeviceId, Gpu, Participant, SentBlock, Session, ShareOptions, To, Wait};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

fn main() {
    divan::main();
}

/// A thread that answers each packet of 40 bytes with one of 72: what one ticket takes.
fn echo() -> (OwnedFd, JoinHandle<()>) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a pair");
    let answering = std::thread::spawn(move || {
        let mut bytes = [0; 40];
        while recv(&theirs, &mut bytes, RecvFlags::empty()).is_ok_and(|(got, _)| got == 40) {
            if send(&theirs, &[0; 72], SendFlags::empty()).is_err() {
                return;
            }
        }
    });
    (ours, answering)
}

#[divan::bench(sample_count = 200, sample_size = 100)]
fn bare_request_and_reply(bencher: Bencher<'_, '_>) {
    let (socket, answering) = echo();
    bencher.bench_local(|| {
        send(&socket, &[0; 40], SendFlags::empty()).expect("sent");
        recv(&socket, &mut [0; 72], RecvFlags::empty()).expect("answered");
    });
    drop(socket);
    answering.join().expect("it ends");
}

struct Pair {
    session: Session,
    participant: Participant,
    block: SentBlock,
    _dir: tempfile::TempDir,
}

fn pair() -> Pair {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
    let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
    let participant = Participant::builder(gpu).connect(session.socket_path()).expect("connected");
    let block = session.alloc(4096).expect("there is room");
    Pair { session, participant, block, _dir: dir }
}

impl Pair {
    fn tickets(&self, count: usize) -> Vec<Descriptor> {
        let grants = vec![(&self.block, To::Ticket(Claims::Once)); count];
        self.session.share_many(&grants, After::Done, &ShareOptions::default()).expect("tickets")
    }
}

/// Claim and drop.
#[divan::bench(sample_count = 200, sample_size = 100)]
fn claim_a_ticket(bencher: Bencher<'_, '_>) {
    let pair = pair();
    // The region is mapped by the first claim.
    let first = pair.tickets(1);
    let mapped = pair.participant.claim(first[0].as_bytes(), Wait::None, None).expect("claimed");
    bencher.with_inputs(|| pair.tickets(1)).bench_local_refs(|tickets| {
        drop(pair.participant.claim(tickets[0].as_bytes(), Wait::None, None).expect("claimed"));
    });
    drop(mapped);
}

/// 64 in one round trip: divide by 64 for the time of each.
#[divan::bench(sample_count = 200, sample_size = 10)]
fn claim_64_tickets(bencher: Bencher<'_, '_>) {
    let pair = pair();
    let first = pair.tickets(1);
    let mapped = pair.participant.claim(first[0].as_bytes(), Wait::None, None).expect("claimed");
    bencher.with_inputs(|| pair.tickets(64)).bench_local_refs(|tickets| {
        let claimed = pair.participant.claim_many(tickets, Wait::None, None);
        assert!(claimed.iter().all(Result::is_ok));
    });
    drop(mapped);
}
