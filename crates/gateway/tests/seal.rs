//! Answers of hosts whose certificates `gpu-ipc-gateway certs` made, and what is not one.

use std::path::Path;

use gateway::message::Incarnation;
use gateway::net::key::Gateway;
use gateway::net::seal::{Asked, Seal};
use gateway::program::certs::{CertsOptions, run};
use proptest::prelude::*;

const ANSWER: &[u8] = b"an answer";
const ASKED: Asked<'static> = Asked {
    number: [7; 16],
    key: "gpu-ipc/2/a/ask",
    question: b"a question",
};

/// Makes an authority with certificates for `a` and `e`.
fn authority(dir: &Path) -> [Seal; 2] {
    let hosts = ["a=10.0.0.1", "e=10.0.0.2"].map(|host| host.parse().expect("a host"));
    run(&CertsOptions {
        dir: dir.to_owned(),
        hosts: hosts.into(),
    })
    .expect("made");
    ["a", "e"].map(|host| {
        let file = |name: String| dir.join(name);
        let (own, key) = (file(format!("{host}.pem")), file(format!("{host}.key")));
        Seal::read(&own, &key, &file("authority.pem".into())).expect("its own files")
    })
}

fn gateway(host: &str) -> Gateway {
    Gateway {
        host: host.into(),
        incarnation: Incarnation([1; 16]),
    }
}

#[test]
fn an_answer_is_believed_of_the_host_in_its_certificate_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let [a, e] = authority(dir.path());
    let sealed = a.sign(&ASKED, ANSWER).expect("signed");
    e.check(&gateway("a"), &ASKED, ANSWER, &sealed)
        .expect("a's");
    for other in ["e", "A", "a.", "", "*"] {
        let why = e.check(&gateway(other), &ASKED, ANSWER, &sealed);
        let why = why.expect_err(other);
        assert_eq!(
            why,
            format!("its certificate is for [a], and not for {other}")
        );
    }
    a.is_of("a").expect("its own name");
    let why = e.is_of("a").expect_err("another's").to_string();
    assert!(
        why.contains("for [e], and not for a") && why.contains("gpu-ipc-gateway certs"),
        "{why}"
    );
}

#[test]
fn a_seal_is_of_one_question_and_one_answer() {
    let dir = tempfile::tempdir().expect("a folder");
    let [a, e] = authority(dir.path());
    let sealed = a.sign(&ASKED, ANSWER).expect("signed");
    let others = [
        Asked {
            number: [8; 16],
            ..ASKED
        },
        Asked {
            key: "gpu-ipc/2/a/asked",
            ..ASKED
        },
        Asked {
            question: b"another",
            ..ASKED
        },
    ];
    let others = others.iter().map(|asked| (asked, ANSWER));
    for (asked, answer) in others.chain([(&ASKED, &b"another"[..])]) {
        let why = e.check(&gateway("a"), asked, answer, &sealed);
        assert_eq!(
            why.expect_err("altered"),
            "its signature is of something else"
        );
    }
    // The certificate of one and the signature of another.
    let length = |seal: &[u8]| 4 + u32::from_le_bytes(seal[..4].try_into().expect("four")) as usize;
    let own = e.sign(&ASKED, ANSWER).expect("signed");
    let stolen = [&own[..length(&own)], &sealed[length(&sealed)..]].concat();
    let why = e.check(&gateway("a"), &ASKED, ANSWER, &stolen);
    assert_eq!(
        why.expect_err("not a's"),
        "its signature is of something else"
    );
}

#[test]
fn a_certificate_of_another_authority_and_no_seal_are_not_believed() {
    let [ours, theirs] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let ([a, _], [stranger, _]) = (authority(ours.path()), authority(theirs.path()));
    let sealed = stranger.sign(&ASKED, ANSWER).expect("signed");
    let check = |seal: &[u8]| a.check(&gateway("a"), &ASKED, ANSWER, seal);
    let why = check(&sealed).expect_err("another authority's");
    assert!(why.starts_with("its certificate: "), "{why}");
    assert_eq!(check(&[]).expect_err("none"), "it has no certificate");
    let cut = &sealed[..sealed.len() - 1];
    assert_eq!(check(cut).expect_err("cut"), "its seal makes no sense");
}

#[test]
fn a_key_in_another_form_is_refused_with_the_way_to_convert_it() {
    let dir = tempfile::tempdir().expect("a folder");
    authority(dir.path());
    let file = |name: &str| dir.path().join(name);
    let why = Seal::read(&file("a.pem"), &file("a.pem"), &file("authority.pem"))
        .expect_err("no key")
        .to_string();
    assert!(
        why.contains("a.pem") && why.contains("openssl pkcs8"),
        "{why}"
    );
    let why = Seal::read(&file("a.key"), &file("a.key"), &file("authority.pem"))
        .expect_err("no certificate")
        .to_string();
    assert!(why.contains("it has no certificate"), "{why}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_seal_panics(at in any::<proptest::sample::Index>(), byte: u8, cut in any::<proptest::sample::Index>()) {
        let dir = tempfile::tempdir().expect("a folder");
        let [a, _] = authority(dir.path());
        let mut sealed = a.sign(&ASKED, ANSWER).expect("signed");
        let at = at.index(sealed.len());
        prop_assume!(sealed[at] != byte);
        sealed[at] = byte;
        let end = cut.index(sealed.len() + 1);
        prop_assert!(a.check(&gateway("a"), &ASKED, ANSWER, &sealed[..end]).is_err());
    }
}
