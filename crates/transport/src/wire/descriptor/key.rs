//! The keys of descriptors: what a carrier of a descriptor does not have.

use std::fmt;

use gpu_api::{Error, Result};
use zeroize::Zeroize;

/// The bytes of a key.
pub const KEY_BYTES: usize = 16;

/// A secret that descriptors are sealed with. Never shown, and wiped when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct SealKey([u8; KEY_BYTES]);

impl SealKey {
    /// Draws a key from the kernel's random numbers.
    ///
    /// # Errors
    ///
    /// [`Error::System`] where a sandbox forbids `getrandom`.
    pub fn random() -> Result<SealKey> {
        let mut key = SealKey([0; KEY_BYTES]);
        rustix::rand::getrandom(&mut key.0, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::system("getrandom", "allow getrandom in this sandbox", e))?;
        Ok(key)
    }

    /// Takes the bytes of a key that the producer sent.
    pub const fn from_bytes(bytes: [u8; KEY_BYTES]) -> SealKey {
        SealKey(bytes)
    }

    /// Returns its bytes.
    pub const fn as_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl Drop for SealKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealKey(..)")
    }
}
