//! An object as the broker sent it: leased, checked, its memory imported, nothing mapped.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use gpu_api::Error;

use super::connection::nonsense;
use super::link::Link;
use transport::shared::sealed_file;

use crate::error::Result;
use crate::memory::range::Imported;
use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::{MOST_MANIFEST, Manifest};
use crate::wire::{Selector, ToBroker, ToClient};

/// A lease of an object. Dropped, it ends.
#[derive(Debug)]
pub(super) struct Lease {
    link: Arc<Link>,
    identity: Identity,
}

impl Lease {
    pub(super) fn note(link: &Arc<Link>, identity: Identity) -> Lease {
        link.hold(identity);
        Lease {
            link: link.clone(),
            identity,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.link.let_go(self.identity);
    }
}

/// An object that is leased and not mapped.
#[derive(Debug)]
pub(super) struct Opened {
    pub lease: Lease,
    pub manifest: Manifest,
    pub imported: Imported,
}

impl Opened {
    /// Asks the broker for an object.
    pub(super) fn ask(link: &Arc<Link>, selector: &Selector) -> Result<Opened> {
        Opened::ask_unless(link, selector, None)?.ok_or_else(nonsense)
    }

    /// As [`ask`](Opened::ask), and nothing if it is the one that the asker leases already: its
    /// memory is not imported a second time.
    pub(super) fn ask_for_another(
        link: &Arc<Link>,
        selector: &Selector,
        known: Identity,
    ) -> Result<Option<Opened>> {
        Opened::ask_unless(link, selector, Some(known))
    }

    fn ask_unless(
        link: &Arc<Link>,
        selector: &Selector,
        known: Option<Identity>,
    ) -> Result<Option<Opened>> {
        let question = |request| ToBroker::Open {
            request,
            selector: selector.clone(),
        };
        let (answer, files) = link.ask(question, Vec::new())?;
        let ToClient::Opened {
            identity, epoch, ..
        } = answer
        else {
            return Err(nonsense());
        };
        if known == Some(identity) {
            return Ok(None);
        }
        let lease = Lease::note(link, identity);
        let (manifest, imported) = check(link, selector, identity, epoch, &files)?;
        Ok(Some(Opened {
            lease,
            manifest,
            imported,
        }))
    }
}

/// Checks what a broker sent, and imports its memory.
fn check(
    link: &Link,
    selector: &Selector,
    identity: Identity,
    epoch: Epoch,
    files: &[OwnedFd],
) -> Result<(Manifest, Imported)> {
    let Some((file, regions)) = files.split_first() else {
        return Err(nonsense());
    };
    let manifest = Manifest::decode(&sealed_file::read(file.as_fd(), 0..=MOST_MANIFEST)?)?;
    if manifest.layout.journal() > 0 {
        return Err(Error::Invalid {
            what: "the object to open",
            got: format!("{}, which is a pool", manifest.name),
            must: "an object; hold a pool with `adopt`, or read it with `read_pool`",
        }
        .into());
    }
    let asked = match selector {
        Selector::Latest(name) => *name == manifest.name,
        Selector::Epoch(name, epoch) => *name == manifest.name && *epoch == manifest.epoch,
        Selector::Identity(identity) => *identity == manifest.identity,
    };
    let whole = manifest.layout.regions().len() == regions.len() && manifest.granularity > 0;
    if !asked || !whole || manifest.identity != identity || manifest.epoch != epoch {
        return Err(nonsense());
    }
    let gpu = link.gpu();
    // What has no memory lies nowhere: the roll of a group is read on every device.
    if !regions.is_empty() && (manifest.backend != gpu.kind() || manifest.device != gpu.uuid()) {
        return Err(Error::mismatch(
            "the object's device",
            format!("{} {}", manifest.backend, manifest.device),
            format!("{} {}", gpu.kind(), gpu.uuid()),
            "connect a client with the object's device",
        )
        .into());
    }
    let imported = Imported::of(gpu, regions, manifest.mapped_regions())?;
    Ok((manifest, imported))
}

/// Another epoch for one reader's addresses: leased, imported and checked, not mapped.
///
/// [`Reader::prepare`](crate::Reader::prepare) makes it and
/// [`Reader::switch`](crate::Reader::switch) takes it. Dropped, its lease ends.
pub struct Prepared {
    pub(super) opened: Opened,
    /// Those of the reader that prepared it.
    pub(super) addresses: Arc<()>,
}

impl Prepared {
    /// Returns its epoch.
    pub fn epoch(&self) -> Epoch {
        self.opened.manifest.epoch
    }

    /// Returns its identity.
    pub fn identity(&self) -> Identity {
        self.opened.manifest.identity
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let manifest = &self.opened.manifest;
        f.debug_struct("Prepared")
            .field("name", &manifest.name)
            .field("epoch", &manifest.epoch)
            .finish_non_exhaustive()
    }
}
