//! Shares to be read only, as far as one process can see: what is refused, and what a participant of
//! the producer's own process is given. Other processes are in `tests/processes/read_only.rs`.

use std::time::Duration;

use backend_host::{HostBackend, HostConfig};
use gpu_api::{Access, DeviceId, Error, Gpu, Sharing};
use ipc_rc::{
    AdoptToken, After, Claims, Participant, SentBlock, Session, ShareOptions, Stream, To, Wait,
};

/// A wait that is longer will never end.
const PATIENCE: Duration = Duration::from_secs(120);

struct Stage {
    gpu: Gpu,
    session: Session,
    participant: Participant,
    _dir: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let host = HostBackend::new(HostConfig::default()).expect("it opens");
        let gpu = Gpu::new(host, DeviceId(0)).expect("a device");
        let session = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        let participant = Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected");
        Stage {
            gpu,
            session,
            participant,
            _dir: dir,
        }
    }

    /// Adopts memory that other processes reach this way.
    fn adopted(&self, sharing: Sharing) -> SentBlock {
        let memory = self
            .gpu
            .backend()
            .alloc(self.gpu.device(), 1 << 16, sharing)
            .expect("room");
        // SAFETY: `adopt` asks for memory that lives until its token comes back: nobody frees it.
        unsafe { self.session.adopt(memory.base, 1 << 16, AdoptToken(1)) }.expect("adopted")
    }
}

fn read_only() -> ShareOptions {
    ShareOptions::default().read_only()
}

#[test]
fn memory_that_is_opened_by_a_handle_is_refused_with_the_remedy_and_grants_nothing() {
    let stage = Stage::new();
    let (by_handle, by_fd) = (stage.adopted(Sharing::Handle), stage.adopted(Sharing::Fd));
    let to = To::Participant(stage.participant.id());
    for to in [to, To::Ticket(Claims::Once), To::Ticket(Claims::Unlimited)] {
        let refused = by_handle.share_with(to, After::Done, &read_only());
        let error = refused.expect_err("a handle is always writable");
        let text = error.to_string();
        assert!(
            matches!(error, Error::Unsupported { .. })
                && text.contains("always writable")
                && text.contains("share it writable"),
            "{text}"
        );
    }
    let stream = Stream::create(&stage.gpu).expect("a stream");
    let both = [(&by_fd, to), (&by_handle, to)];
    let refused = stage
        .session
        .share_many(&both, After::Stream(&stream), &read_only());
    assert!(
        matches!(refused, Err(Error::Unsupported { .. })),
        "{refused:?}"
    );
    assert_eq!((by_fd.outstanding(), by_handle.outstanding()), (0, 0));
    assert_eq!(stage.session.stats().tickets, 0);
    // Writable it can be shared, and the other read-only.
    by_handle.share(to, After::Done).expect("shared");
    by_fd
        .share_with(to, After::Done, &read_only())
        .expect("shared");
}

#[test]
fn a_lent_block_that_is_opened_by_a_handle_is_refused_too() {
    let stage = Stage::new();
    let loan = stage
        .session
        .lend(stage.adopted(Sharing::Handle), After::Done)
        .expect("lent");
    let refused = loan.share_with(To::Ticket(Claims::Unlimited), &read_only());
    assert!(
        matches!(refused, Err(Error::Unsupported { .. })),
        "{refused:?}"
    );
    loan.share(To::Ticket(Claims::Unlimited)).expect("shared");
}

#[test]
fn in_the_producers_own_process_the_library_writes_nothing() {
    let stage = Stage::new();
    let block = stage.session.alloc(4096).expect("room");
    let to = To::Participant(stage.participant.id());
    let claim = |descriptor: &ipc_rc::Descriptor| {
        stage
            .participant
            .claim(descriptor.as_bytes(), Wait::Host, Some(PATIENCE))
            .expect("claimed")
    };
    let descriptor = block.share(to, After::Done).expect("shared");
    let read_too = block
        .share_with(to, After::Done, &read_only())
        .expect("shared");
    assert!(!descriptor.is_read_only() && read_too.is_read_only());
    assert_eq!(
        read_too.fields().region.with_access(Access::ReadWrite),
        descriptor.fields().region
    );
    let (written, read) = (claim(&descriptor), claim(&read_too));
    assert_eq!(read.device_ptr(), written.device_ptr());
    assert!(!written.is_read_only() && read.is_read_only());
    let stream = Stream::create(&stage.gpu).expect("a stream");
    stream.write(&written, &[7; 8]).expect("written");
    for refused in [
        stream.write(&read, &[1]),
        stream.fill(&read.slice(..4).expect("inside"), 1),
    ] {
        let text = refused.expect_err("it is only read").to_string();
        assert!(text.contains("shared without `read_only`"), "{text}");
    }
    assert!(read.host_bytes().is_none() && written.host_bytes().is_some());
    let mut bytes = [0; 8];
    stream.read(&read, &mut bytes).expect("read");
    assert_eq!(bytes, [7; 8]);
}
