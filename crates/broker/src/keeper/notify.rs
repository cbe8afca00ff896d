//! The datagrams that a broker sends its keeper: lines of `NAME=value`, as systemd's notify
//! protocol has them.
//!
//! | lines | descriptors | meaning |
//! |---|---|---|
//! | `FDSTORE=1`, `FDNAME=name`, `FDPOLL=0` | 1 | keep the descriptor under the name, in place of what has it |
//! | `FDSTOREREMOVE=1`, `FDNAME=name` | | let go of what has the name |
//! | `READY=1` | | the broker serves: should it die, start it again at once |
//! | `BARRIER=1` | 1 | all before has been done once this descriptor is closed |
//! | `X_GPU_IPC_LIST=1` | 1, a socket | write the names to the socket |
//! | `X_GPU_IPC_READ=1` | 1, a socket | write the names with their descriptors to the socket |
//! | `X_GPU_IPC_HAS=name,name` | 1, a socket | write those of up to 64 names that are kept to the socket, and close it |
//! | `X_GPU_IPC_HAND_OVER=1` | 1, a socket | as a read; then take no datagram until a packet comes back on the socket, and end, or until it hangs up, and go on |
//!
//! The last four are ours: in systemd's protocol the sender of a descriptor is not told when it is
//! refused. Packets come back, each with up to 64 names, a line each, and for a read as many
//! descriptors; the last packet is empty but for `.` and the keeper's incarnation. After `HAS` three
//! numbers follow the incarnation, u64 each: descriptors that are kept, the most that are kept, and
//! brokers that were started. The keeper holds the socket of a list from then on: its hang-up tells
//! of the keeper's end. What was sent before a question has been done when the answer comes.
//!
//! A datagram has at most 4,096 bytes, as in systemd (`NOTIFY_BUFFER_MAX`). Other lines (`STATUS=`)
//! are passed over. sd_notify(3), sd_pid_notify_with_fds(3).

/// The most bytes of a name.
pub const MOST_NAME: usize = 12;
/// Names in a packet of a listing.
pub const NAMES_A_PACKET: usize = 64;

/// What a datagram asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request {
    /// Keep the descriptors under this name.
    Store(String),
    /// Let go of what has this name.
    Remove(String),
    /// Close the descriptor once all before is done.
    Barrier,
    /// Write the names to the socket that came.
    List,
    /// Write names and descriptors to it.
    Read,
    /// Write those of these names that are kept to it, and how many are kept.
    Has(Vec<String>),
    /// Write names and descriptors to it, and let its other end keep them from then on.
    HandOver,
    /// The broker serves.
    Ready,
    /// Nothing that a keeper does.
    Other,
}

/// Reads a datagram.
///
/// # Errors
///
/// The mistake, for the log: the sender is not told.
pub fn parse(bytes: &[u8], fds: usize) -> Result<Request, String> {
    let text = str::from_utf8(bytes).map_err(|_| "the datagram is not UTF-8 text".to_owned())?;
    let (mut kind, mut name, mut polls) = (Request::Other, None, false);
    for line in text.lines() {
        match line.split_once('=') {
            Some(("FDSTORE", "1")) => kind = Request::Store(String::new()),
            Some(("FDSTOREREMOVE", "1")) => kind = Request::Remove(String::new()),
            Some(("READY", "1")) => kind = Request::Ready,
            Some(("BARRIER", "1")) => kind = Request::Barrier,
            Some(("X_GPU_IPC_LIST", "1")) => kind = Request::List,
            Some(("X_GPU_IPC_READ", "1")) => kind = Request::Read,
            Some(("X_GPU_IPC_HAS", names)) => {
                let names = names.split(',').filter(|name| !name.is_empty());
                kind = Request::Has(names.map(str::to_owned).collect());
            }
            Some(("X_GPU_IPC_HAND_OVER", "1")) => kind = Request::HandOver,
            Some(("FDNAME", value)) => name = Some(value),
            Some(("FDPOLL", value)) => polls = value != "0",
            _ => {}
        }
    }
    let named = |name: Option<&str>| match name {
        Some(name)
            if !name.is_empty()
                && name.len() <= MOST_NAME
                && name.bytes().all(|b| b.is_ascii_graphic()) =>
        {
            Ok(name.to_owned())
        }
        Some(name) => Err(format!(
            "the name {name:?} has not 1 to {MOST_NAME} printable characters"
        )),
        None => Err("a descriptor without FDNAME".into()),
    };
    let (request, expected) = match kind {
        Request::Store(_) if polls => {
            return Err("FDPOLL must be 0: a device's descriptor may poll as anything".into());
        }
        Request::Store(_) => (Request::Store(named(name)?), 1),
        Request::Remove(_) => (Request::Remove(named(name)?), 0),
        Request::Has(names) if names.len() > NAMES_A_PACKET => {
            let count = names.len();
            return Err(format!(
                "{count} names were asked for, at most {NAMES_A_PACKET}"
            ));
        }
        Request::Other => return Ok(Request::Other),
        Request::Ready => (Request::Ready, 0),
        other => (other, 1),
    };
    if fds == expected {
        Ok(request)
    } else {
        Err(format!(
            "{request:?} came with {fds} descriptors, not {expected}"
        ))
    }
}

/// Writes a datagram.
pub fn encode(request: &Request) -> String {
    match request {
        Request::Store(name) => format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"),
        Request::Remove(name) => format!("FDSTOREREMOVE=1\nFDNAME={name}"),
        Request::Barrier => "BARRIER=1".into(),
        Request::List => "X_GPU_IPC_LIST=1".into(),
        Request::Read => "X_GPU_IPC_READ=1".into(),
        Request::Has(names) => format!("X_GPU_IPC_HAS={}", names.join(",")),
        Request::HandOver => "X_GPU_IPC_HAND_OVER=1".into(),
        Request::Ready => "READY=1".into(),
        Request::Other => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_written_is_read() {
        let name = || "r1.0".to_owned();
        for (request, fds) in [
            (Request::Store(name()), 1),
            (Request::Remove(name()), 0),
            (Request::Barrier, 1),
            (Request::List, 1),
            (Request::Read, 1),
            (Request::Has(Vec::new()), 1),
            (Request::Has(vec![name(), "m1".into()]), 1),
            (Request::HandOver, 1),
            (Request::Ready, 0),
        ] {
            assert_eq!(parse(encode(&request).as_bytes(), fds), Ok(request.clone()));
            parse(encode(&request).as_bytes(), fds + 1).expect_err("another number of descriptors");
        }
    }

    #[test]
    fn what_systemd_would_take_otherwise_is_refused() {
        for (bytes, why) in [
            (&b"FDSTORE=1\nFDPOLL=0"[..], "without FDNAME"),
            (b"FDSTORE=1\nFDNAME=r1.0\nFDPOLL=1", "FDPOLL must be 0"),
            (b"FDSTORE=1\nFDNAME=0123456789abc", "printable characters"),
            (b"FDSTORE=1\nFDNAME=a b", "printable characters"),
            (b"\xff", "not UTF-8 text"),
        ] {
            let error = parse(bytes, 1).expect_err(why);
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(parse(b"STATUS=x", 0), Ok(Request::Other));
        let many = encode(&Request::Has(vec!["r1.0".into(); NAMES_A_PACKET + 1]));
        let error = parse(many.as_bytes(), 1).expect_err("more names than a packet has");
        assert_eq!(error, "65 names were asked for, at most 64");
        assert!(
            encode(&Request::Has(vec!["x".repeat(MOST_NAME); NAMES_A_PACKET])).len() < 4_096,
            "a datagram of systemd's"
        );
    }

    proptest! {
        #[test]
        fn no_datagram_panics(bytes in proptest::collection::vec(any::<u8>(), 0..100), fds in 0usize..3) {
            let _ = parse(&bytes, fds);
        }
    }
}
