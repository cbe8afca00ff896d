//! How the hold of a pool ended before the one that is.

use transport::wire::field::Field;
use transport::wire::packet::{Malformed, Reader, Writer, malformed};

/// How the hold of a pool before this one ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Previous {
    /// There was none.
    #[default]
    Never,
    /// Its holder closed it, behind its streams.
    Closed,
    /// Its holder died: a filling may have been under way.
    Died,
}

impl Previous {
    const ALL: [Previous; 3] = [Previous::Never, Previous::Closed, Previous::Died];

    /// Returns the word for it: `never`, `closed` or `died`.
    pub fn name(self) -> &'static str {
        ["never", "closed", "died"][self as usize]
    }

    /// Finds the one of a number.
    pub(crate) fn of(byte: u8) -> Option<Previous> {
        Previous::ALL.get(usize::from(byte)).copied()
    }
}

impl std::fmt::Display for Previous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Field for Previous {
    fn write(&self, w: &mut Writer<'_>) {
        w.u32(*self as u32);
    }

    fn read(r: &mut Reader<'_>) -> Result<Previous, Malformed> {
        let number = r.u32()?;
        let known = u8::try_from(number).ok().and_then(Previous::of);
        known.ok_or_else(|| malformed("how the hold before ended", number, "0, 1 or 2"))
    }
}
