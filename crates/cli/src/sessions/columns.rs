//! Tables in as many columns as the terminal has room for, as lines of text.

use gpu_ipc::admin::Holder;

use super::text::{bytes, cut, time};

/// A column of a table.
pub struct Column {
    head: &'static str,
    width: usize,
    /// Of those that do not fit the highest goes first: a number that is cut would be another
    /// number.
    rank: u8,
    digits: bool,
}

/// The columns about a holder.
pub const HOLDER_COLUMNS: [Column; 7] = [
    digits("PID", 8, 0),
    words("HELD BY", 15, 1),
    digits("LEASES", 9, 4),
    digits("BYTES", 10, 2),
    digits("REGIONS", 8, 6),
    digits("OLDEST", 10, 5),
    words("STATE", 7, 3),
];

/// Writes each holder as its cells, the one with the most bytes first.
pub fn holder_cells(holders: &[Holder]) -> Vec<[String; HOLDER_COLUMNS.len()]> {
    let mut holders: Vec<_> = holders.iter().collect();
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    let cells = |holder: &Holder| {
        [
            holder.pid.to_string(),
            cut(&holder.command, 15),
            holder.leases.to_string(),
            bytes(holder.bytes),
            holder.mappings.to_string(),
            if holder.leases == 0 {
                "-".into()
            } else {
                time(holder.oldest)
            },
            if holder.dying { "dying" } else { "alive" }.to_owned(),
        ]
    };
    holders.into_iter().map(cells).collect()
}

/// Begins with its words on the left.
pub const fn words(head: &'static str, width: usize, rank: u8) -> Column {
    Column {
        head,
        width,
        rank,
        digits: false,
    }
}

/// Has its digits below each other.
pub const fn digits(head: &'static str, width: usize, rank: u8) -> Column {
    Column {
        head,
        width,
        rank,
        digits: true,
    }
}

/// The columns of a table that there is room for.
pub struct Shown<'a> {
    columns: &'a [Column],
    /// Those of a lower rank.
    below: u8,
}

impl<'a> Shown<'a> {
    /// Chooses the columns that fit into a terminal of this width.
    pub fn within(width: usize, columns: &'a [Column]) -> Shown<'a> {
        let needed = |below: u8| -> usize {
            let shown = columns.iter().filter(|column| column.rank < below);
            shown
                .map(|column| column.width + 1)
                .sum::<usize>()
                .saturating_sub(1)
        };
        let all = columns.len() as u8;
        // One column at least, however narrow it is.
        let below = (2..=all)
            .rev()
            .find(|&below| needed(below) <= width)
            .unwrap_or(1);
        Shown { columns, below }
    }

    /// Takes what belongs to the columns that are shown.
    fn fitting<T>(&self, of_all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
        let ranks = self.columns.iter().map(|column| column.rank);
        of_all
            .into_iter()
            .zip(ranks)
            .filter(|(_, rank)| *rank < self.below)
            .map(|(one, _)| one)
    }

    /// Writes the heads as a line of text.
    pub fn head(&self) -> String {
        self.line(self.columns.iter().map(|column| column.head.to_owned()))
    }

    /// Writes the cells of all columns as a line of text.
    pub fn line(&self, cells: impl IntoIterator<Item = String>) -> String {
        let pad = |(column, cell): (&Column, String)| {
            let width = column.width;
            if column.digits {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            }
        };
        let cells: Vec<String> = self
            .fitting(self.columns.iter().zip(cells))
            .map(pad)
            .collect();
        cells.join(" ").trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_left_out_by_its_rank() {
        let columns = [words("A", 8, 0), digits("B", 5, 2), digits("C", 5, 1)];
        let shown = |width| {
            Shown::within(width, &columns)
                .fitting(["A", "B", "C"])
                .collect::<String>()
        };
        let cases = [
            (0, "A"),
            (8, "A"),
            (13, "A"),
            (14, "AC"),
            (19, "AC"),
            (20, "ABC"),
            (200, "ABC"),
        ];
        for (width, expected) in cases {
            assert_eq!(shown(width), expected, "{width} columns");
        }
    }
}
