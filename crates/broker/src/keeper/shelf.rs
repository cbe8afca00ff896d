//! What a keeper keeps: descriptors by name. Pure.

use std::collections::BTreeMap;

/// Files of a broker that are no object's (tombs, history), which have room of their own: something
/// can be taken out of a full shelf only after they were written anew.
const MOST_ASIDE: usize = 8;

/// Descriptors by name.
#[derive(Debug)]
pub struct Shelf<F> {
    rows: BTreeMap<String, F>,
    most: usize,
    /// How many of them are no object's.
    aside: usize,
    refused: u64,
}

fn is_aside(name: &str) -> bool {
    name.starts_with(['t', 'h'])
}

impl<F> Shelf<F> {
    /// Makes one that holds at most this many of objects.
    pub fn new(most: usize) -> Shelf<F> {
        Shelf {
            rows: BTreeMap::new(),
            most,
            aside: 0,
            refused: 0,
        }
    }

    /// Keeps a descriptor in place of what has its name; refuses it when it is full, which nobody
    /// is told: the sender reads back.
    pub fn store(&mut self, name: String, file: F) -> bool {
        let aside = is_aside(&name);
        let is_full = if aside {
            self.aside >= MOST_ASIDE
        } else {
            self.len() >= self.most
        };
        if is_full && !self.rows.contains_key(&name) {
            self.refused += 1;
            return false;
        }
        if self.rows.insert(name, file).is_none() {
            self.aside += usize::from(aside);
        }
        true
    }

    /// Lets go of a descriptor.
    pub fn remove(&mut self, name: &str) -> Option<F> {
        let removed = self.rows.remove(name)?;
        self.aside -= usize::from(is_aside(name));
        Some(removed)
    }

    /// Returns up to `count` rows behind `after`, in the order of their names.
    pub fn page<'a>(
        &'a self,
        after: Option<&str>,
        count: usize,
    ) -> impl Iterator<Item = (&'a str, &'a F)> + use<'a, F> {
        let from = match after {
            Some(after) => std::ops::Bound::Excluded(after.to_owned()),
            None => std::ops::Bound::Unbounded,
        };
        self.rows
            .range((from, std::ops::Bound::Unbounded))
            .take(count)
            .map(|(name, file)| (name.as_str(), file))
    }

    /// Says whether something is kept under a name.
    pub fn has(&self, name: &str) -> bool {
        self.rows.contains_key(name)
    }

    /// Returns the most that it holds of objects.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Counts the descriptors of objects.
    pub fn len(&self) -> usize {
        self.rows.len() - self.aside
    }

    /// Says whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Counts the descriptors that it refused.
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_shelf_refuses_new_names_and_replaces_old_ones() {
        let mut shelf = Shelf::new(2);
        assert!(shelf.store("a".into(), 1) && shelf.store("b".into(), 2));
        assert!(!shelf.store("c".into(), 3));
        assert!(shelf.store("a".into(), 4), "in place of the old one");
        assert_eq!(
            shelf.page(None, 9).collect::<Vec<_>>(),
            [("a", &4), ("b", &2)]
        );
        assert_eq!(shelf.page(Some("a"), 9).collect::<Vec<_>>(), [("b", &2)]);
        assert_eq!((shelf.remove("a"), shelf.remove("a")), (Some(4), None));
        assert!(shelf.store("c".into(), 3));
        assert_eq!((shelf.len(), shelf.refused()), (2, 1));
        assert!(shelf.has("c") && !shelf.has("a") && shelf.most() == 2);
        for number in 0..MOST_ASIDE {
            assert!(
                shelf.store(format!("t{number}"), 5),
                "it is full, and takes tombs"
            );
        }
        assert!(!shelf.store("h1".into(), 6), "and not without end");
        assert_eq!((shelf.len(), shelf.remove("t0")), (2, Some(5)));
        assert!(shelf.store("h1".into(), 6) && !shelf.store("d".into(), 7));
        assert_eq!((shelf.remove("h1"), shelf.remove("h1")), (Some(6), None));
    }
}
