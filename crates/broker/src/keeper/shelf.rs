//! What a keeper keeps: descriptors by name. Pure.

use std::collections::BTreeMap;

/// Descriptors by name.
#[derive(Debug)]
pub struct Shelf<F> {
    rows: BTreeMap<String, F>,
    most: usize,
    refused: u64,
}

impl<F> Shelf<F> {
    /// Makes one that holds at most this many.
    pub fn new(most: usize) -> Shelf<F> {
        Shelf {
            rows: BTreeMap::new(),
            most,
            refused: 0,
        }
    }

    /// Keeps a descriptor in place of what has its name; refuses it when it is full, which nobody
    /// is told: the sender reads back.
    pub fn store(&mut self, name: String, file: F) -> bool {
        if self.rows.len() >= self.most && !self.rows.contains_key(&name) {
            self.refused += 1;
            return false;
        }
        self.rows.insert(name, file);
        true
    }

    /// Lets go of a descriptor.
    pub fn remove(&mut self, name: &str) -> Option<F> {
        self.rows.remove(name)
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

    /// Counts the descriptors.
    pub fn len(&self) -> usize {
        self.rows.len()
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
    }
}
