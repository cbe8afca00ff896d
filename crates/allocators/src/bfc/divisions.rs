//! Into how many steps sizes between two powers of two are rounded up, by the size.

use gpu_api::{Error, Result};

/// Sizes are told apart from 1 MiB on, by their power of two, up to 32 GiB; what is smaller or
/// larger goes with those.
const CLASSES: usize = 16;
const FIRST: u32 = 20;

/// Into how many steps sizes between two powers of two are rounded up: PyTorch's
/// `roundup_power2_divisions`, with the same intervals.
///
/// # Examples
///
/// ```
/// use allocators::bfc::Divisions;
///
/// const MIB: u64 = 1 << 20;
/// let divisions = Divisions::parse("[256:1,512:2,>:4]")?;
/// // Below 512 MiB up to the next power of two, from 512 MiB on to half steps, from 1 GiB on to quarters.
/// assert_eq!(divisions.rounded(300 * MIB), Some(512 * MIB));
/// assert_eq!(divisions.rounded(600 * MIB), Some(768 * MIB));
/// assert_eq!(divisions.rounded(1100 * MIB), Some(1280 * MIB));
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Divisions([u64; CLASSES]);

impl Divisions {
    /// Rounds sizes of every class up in as many steps, a power of two; 0 rounds none.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for any other number.
    pub fn all(divisions: u64) -> Result<Divisions> {
        Ok(Divisions(
            [steps(divisions, &divisions.to_string())?; CLASSES],
        ))
    }

    /// Reads a number for all sizes, or a list: `[256:1,512:2,>:4]`. Keys are sizes in MiB, powers
    /// of two; a key stands for sizes from there to the next power of two, the first one for
    /// smaller sizes too, and `>` for all that are larger than the key before it. Sizes that no key
    /// stands for are not rounded.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for anything else.
    pub fn parse(text: &str) -> Result<Divisions> {
        let wrong = || invalid(text);
        let Some(list) = text.trim().strip_prefix('[') else {
            return Divisions::all(text.trim().parse().map_err(|_| wrong())?);
        };
        let mut classes = [0; CLASSES];
        let mut last = None;
        for entry in list.strip_suffix(']').ok_or_else(wrong)?.split(',') {
            let (key, divisions) = entry.split_once(':').ok_or_else(wrong)?;
            let divisions = steps(divisions.trim().parse().map_err(|_| wrong())?, text)?;
            if key.trim() == ">" {
                let from = last.map_or(0, |last: usize| last + 1);
                classes[from.min(CLASSES)..].fill(divisions);
                continue;
            }
            let key = power(key.trim().parse().map_err(|_| wrong())?, text)?;
            let class = (key.trailing_zeros() as usize).min(CLASSES - 1);
            let from = if last.is_none() { 0 } else { class };
            classes[from..=class].fill(divisions);
            last = Some(class);
        }
        Ok(Divisions(classes))
    }

    /// Returns the bytes to take for a request; `None` for more than there are.
    pub fn rounded(&self, bytes: u64) -> Option<u64> {
        let class = bytes.checked_ilog2().unwrap_or(0).saturating_sub(FIRST) as usize;
        match self.0[class.min(CLASSES - 1)] {
            0 => Some(bytes),
            divisions => {
                let step = (bytes.checked_next_power_of_two()? / 2 / divisions).max(1);
                bytes.checked_next_multiple_of(step)
            }
        }
    }
}

fn steps(number: u64, of: &str) -> Result<u64> {
    if number == 0 {
        Ok(0)
    } else {
        power(number, of)
    }
}

fn power(number: u64, of: &str) -> Result<u64> {
    if number.is_power_of_two() {
        Ok(number)
    } else {
        Err(invalid(of))
    }
}

fn invalid(got: &str) -> Error {
    Error::invalid(
        "the divisions between two powers of two",
        format!("`{got}`"),
        "a power of two, or a list such as `[256:1,512:2,>:4]` with powers of two for sizes in MiB and divisions",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn rounded(text: &str, bytes: u64) -> u64 {
        Divisions::parse(text)
            .expect("it can be read")
            .rounded(bytes)
            .expect("it fits")
    }

    #[test]
    fn sizes_between_two_powers_are_rounded_up_in_steps() {
        // The example of PyTorch's documentation: 1200 with four divisions.
        let sizes = [1024, 1200, 1280, 1281, 1536, 2000];
        assert_eq!(
            sizes.map(|bytes| rounded("4", bytes)),
            [1024, 1280, 1280, 1536, 1536, 2048]
        );
        let four = Divisions::all(4).expect("a power of two");
        assert_eq!((four.rounded(1), four.rounded(u64::MAX)), (Some(1), None));
    }

    #[test]
    fn a_list_rounds_by_the_size() {
        let list = "[256:1, 512:2 ,1024:4,>:8]";
        assert_eq!(
            rounded(list, 1000),
            1024,
            "the first key stands for what is smaller"
        );
        assert_eq!(rounded(list, 256 * MIB + 1), 512 * MIB);
        assert_eq!(rounded(list, 512 * MIB + 1), 768 * MIB);
        assert_eq!(rounded(list, 1024 * MIB + 1), 1280 * MIB);
        assert_eq!(rounded(list, 2048 * MIB + 1), 2304 * MIB);
        assert_eq!(
            rounded(list, (1 << 40) + 1),
            (1 << 40) + (1 << 37),
            "and the last for what is larger"
        );
        assert_eq!(
            rounded("[64:2,256:4]", 200 * MIB),
            200 * MIB,
            "no key stands for 128 MiB"
        );
        assert_eq!(
            rounded("[64:2,256:4]", 600 * MIB),
            600 * MIB,
            "nor for 512 MiB"
        );
        assert_eq!(rounded("[>:2]", 5), 6);
        assert_eq!(
            (rounded("0", 5), rounded("[256:0,>:2]", 5)),
            (5, 5),
            "0 rounds nothing"
        );
        assert_eq!(
            rounded("[1048576:2,>:4]", 3 * MIB),
            3 * MIB,
            "keys beyond the last class are the last"
        );
    }

    #[test]
    fn what_is_no_power_of_two_is_refused() {
        for wrong in [
            "", "3", "x", "[", "[]", "[256]", "[256:3]", "[300:2]", "[256:1,]", "[256:1", "[0:1]",
            "[-1:2]",
        ] {
            let error = Divisions::parse(wrong).expect_err(wrong);
            assert!(error.to_string().contains("power of two"), "{error}");
        }
    }
}
