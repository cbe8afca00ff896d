//! `gpu-ipc-gateway certs`: an authority, and a certificate for each host of a network.

use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args as Arguments;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};

use crate::error::{Error, Result};

/// The authority's files.
const AUTHORITY: &str = "authority";

/// Options of `certs`.
#[derive(Arguments, Clone, Debug)]
pub struct CertsOptions {
    /// The folder of the certificates; the authority's key in it signs for further hosts, and belongs
    /// on none of them
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Each host's name, and the address in its --listen: one=10.0.0.1
    #[arg(required = true, value_name = "HOST=IP")]
    pub hosts: Vec<Named>,
}

/// A host and its address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    /// Its name.
    pub host: String,
    /// Its address.
    pub address: IpAddr,
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Named, String> {
        let parts = text.split_once('=').and_then(|(host, address)| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            let named = !host.is_empty() && !host.starts_with('.') && host.chars().all(is_plain);
            let address = address.parse().ok()?;
            (named && host != AUTHORITY).then(|| Named {
                host: host.into(),
                address,
            })
        });
        parts.ok_or_else(|| {
            format!("{text:?} is no host and address; write NAME=IP, as one=10.0.0.1")
        })
    }
}

/// Makes the files, and prints the arguments of each host.
///
/// # Errors
///
/// [`Error::Unavailable`] for a folder that cannot be written to, or an authority that is damaged.
/// Nothing is written over.
pub fn run(options: &CertsOptions) -> Result<()> {
    std::fs::create_dir_all(&options.dir).map_err(|e| unavailable(&options.dir, &e))?;
    let issuer = authority(&options.dir)?;
    for Named { host, address } in &options.hosts {
        let mut params = CertificateParams::new(vec![host.clone()]).map_err(made)?;
        params.distinguished_name = named(host);
        params.subject_alt_names.push(SanType::IpAddress(*address));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // A gateway connects to others, and others connect to it.
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().map_err(made)?;
        let certificate = params.signed_by(&key, &issuer).map_err(made)?;
        let file = |kind: &str| options.dir.join(format!("{host}.{kind}"));
        write(&file("key"), &key.serialize_pem(), 0o600)?;
        write(&file("pem"), &certificate.pem(), 0o644)?;
        println!(
            "{host}: --host {host} --tls {} {} {}",
            file("pem").display(),
            file("key").display(),
            options.dir.join(format!("{AUTHORITY}.pem")).display()
        );
    }
    Ok(())
}

/// Reads the authority of a folder, or makes it.
fn authority(dir: &Path) -> Result<Issuer<'static, KeyPair>> {
    let file = |kind: &str| dir.join(format!("{AUTHORITY}.{kind}"));
    let read = |path: &Path| std::fs::read_to_string(path).map_err(|e| unavailable(path, &e));
    if file("key").exists() {
        let key = KeyPair::from_pem(&read(&file("key"))?).map_err(made)?;
        return Issuer::from_ca_cert_pem(&read(&file("pem"))?, key).map_err(made);
    }
    let mut params = CertificateParams::new(Vec::new()).map_err(made)?;
    params.distinguished_name = named("gpu-ipc gateways");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().map_err(made)?;
    let certificate = params.self_signed(&key).map_err(made)?;
    write(&file("pem"), &certificate.pem(), 0o644)?;
    write(&file("key"), &key.serialize_pem(), 0o600)?;
    Ok(Issuer::new(params, key))
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|e| unavailable(path, &e))
}

fn unavailable(path: &Path, error: &std::io::Error) -> Error {
    Error::Unavailable {
        what: path.display().to_string(),
        why: error.to_string(),
        remedy: "give a folder that this user may write to; what is there already is not written over",
    }
}

fn made(error: rcgen::Error) -> Error {
    Error::Unavailable {
        what: "a certificate".into(),
        why: error.to_string(),
        remedy: "remove an authority that is damaged, and its certificates",
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_host_is_a_plain_name_and_an_address() {
        let one = "one=10.0.0.1".parse::<Named>().expect("it is one");
        assert_eq!(
            (one.host.as_str(), one.address),
            ("one", [10, 0, 0, 1].into())
        );
        for wrong in [
            "one",
            "=10.0.0.1",
            "one=",
            "../x=10.0.0.1",
            "a/b=1.2.3.4",
            "authority=1.2.3.4",
        ] {
            wrong.parse::<Named>().expect_err(wrong);
        }
    }

    #[test]
    fn keys_are_for_the_owner_alone_and_nothing_is_written_over() {
        let place = tempfile::tempdir().expect("a folder");
        let options = |hosts: &[&str]| CertsOptions {
            dir: place.path().join("certs"),
            hosts: hosts
                .iter()
                .map(|host| host.parse().expect("a host"))
                .collect(),
        };
        run(&options(&["one=10.0.0.1"])).expect("made");
        let authority = std::fs::read(place.path().join("certs/authority.pem")).expect("a file");
        run(&options(&["two=10.0.0.2"])).expect("made, by the same authority");
        let again = std::fs::read(place.path().join("certs/authority.pem")).expect("a file");
        assert_eq!(authority, again);
        for key in ["authority", "one", "two"] {
            let file = place.path().join(format!("certs/{key}.key"));
            let mode = std::fs::metadata(file)
                .expect("a file")
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o600, "{key}");
        }
        let why = run(&options(&["one=10.0.0.1"]))
            .expect_err("it is there")
            .to_string();
        assert!(
            why.contains("one.key") && why.contains("written over"),
            "{why}"
        );
    }
}
