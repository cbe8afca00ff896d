//! Whose an answer is: signed with the key of a host's certificate, which names the host.
//!
//! A connection says that its other end was let in, and not who it is; and an answer may come by
//! others. So a question has a number of its own as its attachment, and the answer a seal:
//!
//! ```text
//! question: attachment = 16 random bytes
//! answer:   attachment = u32 bytes of signature, signature, (u32 bytes, certificate as DER)*
//! signed:   "gpu-ipc answer 2", the 16 bytes, BLAKE3 of the key, of the question and of the answer
//! ```
//!
//! Numbers are little-endian. The first certificate is the host's, the rest leads to the authority.
//! An answer counts if the authority vouches for the certificate, the certificate has the host's
//! name as a DNS name, letter by letter, and its key made the signature. A repeated answer answers
//! the same question of the same asker, and no other.
//!
//! Without certificates (`--insecure`) nothing is signed, and no name is compared.

// Tests: below, `crates/gateway/tests/gateways/trust.rs`, `testing/hosts/src/cases/names.rs`.

use std::path::Path;

use rcgen::{KeyPair, SigningKey};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, SignatureVerificationAlgorithm, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert, ring};

use super::key::Gateway;
use crate::error::{Error, Result};

/// The most bytes of a seal.
pub const MOST_SEAL: usize = 32 << 10;
/// What a signature is for.
const PURPOSE: &[u8; 16] = b"gpu-ipc answer 2";
/// What keys of hosts and authorities sign with.
const ALGORITHMS: &[&dyn SignatureVerificationAlgorithm] = &[
    ring::ECDSA_P256_SHA256,
    ring::ECDSA_P256_SHA384,
    ring::ECDSA_P384_SHA256,
    ring::ECDSA_P384_SHA384,
    ring::ED25519,
    ring::RSA_PKCS1_2048_8192_SHA256,
    ring::RSA_PKCS1_2048_8192_SHA384,
    ring::RSA_PKCS1_2048_8192_SHA512,
];

/// What is signed besides the answer.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The question's own number.
    pub number: [u8; 16],
    /// The key that it was sent to.
    pub key: &'a str,
    /// The question, as bytes.
    pub question: &'a [u8],
}

impl Asked<'_> {
    /// Draws a question's number.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where a sandbox forbids `getrandom`.
    pub fn number() -> Result<[u8; 16]> {
        crate::message::Incarnation::random().map(|drawn| drawn.0)
    }

    fn text(&self, answer: &[u8]) -> Vec<u8> {
        let mut text = [&PURPOSE[..], &self.number].concat();
        for part in [self.key.as_bytes(), self.question, answer] {
            text.extend_from_slice(blake3::hash(part).as_bytes());
        }
        text
    }
}

/// A host's certificate and key, and the authority that it believes.
pub struct Seal {
    key: KeyPair,
    chain: Vec<CertificateDer<'static>>,
    authorities: Vec<TrustAnchor<'static>>,
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seal").finish_non_exhaustive()
    }
}

impl Seal {
    /// Reads certificate, key and authority, PEM files.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for a file that is none of these.
    pub fn read(certificate: &Path, key: &Path, authority: &Path) -> Result<Seal> {
        let pem = std::fs::read_to_string(key)
            .map_err(|e| unavailable(key, e.to_string(), "give a file that this user may read"))?;
        let pair = KeyPair::from_pem(&pem).map_err(|e| {
            let remedy = "convert it with `openssl pkcs8 -topk8 -nocrypt`";
            unavailable(key, e.to_string(), remedy)
        })?;
        let authorities = certificates(authority)?
            .iter()
            .map(|one| anchor_from_trusted_cert(one).map(|anchor| anchor.to_owned()))
            .collect::<std::result::Result<_, _>>()
            .map_err(|e| {
                unavailable(authority, e.to_string(), "give the authority's certificate")
            })?;
        Ok(Seal {
            key: pair,
            chain: certificates(certificate)?,
            authorities,
        })
    }

    /// Says whether other hosts will believe that a host's answers are its own.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the names that the certificate has.
    pub fn is_of(&self, host: &str) -> Result<()> {
        let refused = |got| Error::Invalid {
            what: "the certificate of --tls",
            got,
            must: "for the name in --host, and of the authority: `gpu-ipc-gateway certs` makes one",
        };
        let gateway = Gateway {
            host: host.into(),
            incarnation: crate::message::Incarnation([0; 16]),
        };
        let asked = Asked {
            number: [0; 16],
            key: "",
            question: &[],
        };
        let seal = self.sign(&asked, &[]).map_err(&refused)?;
        self.check(&gateway, &asked, &[], &seal).map_err(refused)
    }

    /// Signs an answer.
    ///
    /// # Errors
    ///
    /// Why the key does not sign.
    pub fn sign(&self, asked: &Asked<'_>, answer: &[u8]) -> std::result::Result<Vec<u8>, String> {
        let signature = self
            .key
            .sign(&asked.text(answer))
            .map_err(|e| e.to_string())?;
        let mut seal = Vec::new();
        let parts = self.chain.iter().map(|one| &one[..]);
        for part in std::iter::once(&signature[..]).chain(parts) {
            seal.extend_from_slice(&(part.len() as u32).to_le_bytes());
            seal.extend_from_slice(part);
        }
        Ok(seal)
    }

    /// Compares a seal with the gateway whose answer it is said to be.
    ///
    /// # Errors
    ///
    /// What is wrong, for people.
    pub fn check(
        &self,
        gateway: &Gateway,
        asked: &Asked<'_>,
        answer: &[u8],
        seal: &[u8],
    ) -> std::result::Result<(), String> {
        let parts = parts(seal).ok_or("its seal makes no sense")?;
        let [signature, own, chain @ ..] = &parts[..] else {
            return Err("it has no certificate".into());
        };
        let own = CertificateDer::from(*own);
        let chain: Vec<CertificateDer<'_>> =
            chain.iter().map(|&one| CertificateDer::from(one)).collect();
        let certificate = EndEntityCert::try_from(&own).map_err(|e| e.to_string())?;
        certificate
            .verify_for_usage(
                ALGORITHMS,
                &self.authorities,
                &chain,
                UnixTime::now(),
                KeyUsage::server_auth(),
                None,
                None,
            )
            .map_err(|e| format!("its certificate: {e}"))?;
        let names: Vec<&str> = certificate.valid_dns_names().collect();
        if !names.contains(&gateway.host.as_str()) {
            let names = names.join(", ");
            return Err(format!(
                "its certificate is for [{names}], and not for {}",
                gateway.host
            ));
        }
        let text = asked.text(answer);
        let signed = |algorithm: &&dyn SignatureVerificationAlgorithm| {
            certificate
                .verify_signature(*algorithm, &text, signature)
                .is_ok()
        };
        let is_signed = ALGORITHMS.iter().any(signed);
        is_signed
            .then_some(())
            .ok_or_else(|| "its signature is of something else".into())
    }
}

/// Takes a seal apart.
fn parts(mut seal: &[u8]) -> Option<Vec<&[u8]>> {
    let mut parts = Vec::new();
    if seal.len() > MOST_SEAL {
        return None;
    }
    while let Some((length, rest)) = seal.split_first_chunk::<4>() {
        let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        parts.push(part);
        seal = rest;
    }
    seal.is_empty().then_some(parts)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let remedy = "give certificates as PEM, of a file that this user may read";
    let all: std::result::Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(path).and_then(|all| all.collect());
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(unavailable(path, "it has no certificate".into(), remedy)),
        Err(error) => Err(unavailable(path, error.to_string(), remedy)),
    }
}

fn unavailable(path: &Path, why: String, remedy: &'static str) -> Error {
    Error::Unavailable {
        what: path.display().to_string(),
        why,
        remedy,
    }
}
