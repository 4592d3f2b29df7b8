//! A batch of token rows with their targets.

use std::fmt;

/// Target of a position that is not scored.
pub const IGNORE: i64 = -1;

/// Token rows and the token to be predicted at each position.
///
/// Both are `[batch, time]`, row-major. `targets[t]` is what a model should predict after it has read
/// `tokens[..=t]` of the same row, or [`IGNORE`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TokenBatch {
    /// Token ids, `[batch * time]`.
    pub tokens: Vec<u32>,
    /// Target ids or [`IGNORE`], `[batch * time]`.
    pub targets: Vec<i64>,
    /// Rows.
    pub batch: usize,
    /// Tokens in a row.
    pub time: usize,
    /// Tokens of each document when the one row packs several, which must not see each other; they add up to `time`.
    pub documents: Option<Vec<usize>>,
}

impl TokenBatch {
    /// A batch of no rows yet, of `time` tokens each, with room for `batch` rows.
    pub(crate) fn with_capacity(batch: usize, time: usize) -> Self {
        let room = batch.saturating_mul(time);
        Self {
            tokens: Vec::with_capacity(room),
            targets: Vec::with_capacity(room),
            batch: 0,
            time,
            documents: None,
        }
    }

    /// Positions that are scored.
    pub fn scored(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE).count()
    }

    /// Tokens and targets of each row, in order; of each document when the row packs several.
    pub fn rows(&self) -> impl Iterator<Item = (&[u32], &[i64])> {
        self.cut(&self.tokens).zip(self.cut(&self.targets))
    }

    /// `values`, one for each position, cut like [`TokenBatch::rows`].
    pub(crate) fn cut<'a, T>(&'a self, values: &'a [T]) -> impl Iterator<Item = &'a [T]> {
        let count = self.documents.as_ref().map_or(self.batch, Vec::len);
        let length = move |row: usize| self.documents.as_ref().map_or(self.time, |lengths| lengths[row]);
        (0..count).scan(values, move |rest, row| {
            let (head, tail) = rest.split_at_checked(length(row))?;
            *rest = tail;
            Some(head)
        })
    }
}

/// One line a row or document; a scored position is written `token>target`.
impl fmt::Display for TokenBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (tokens, targets) in self.rows() {
            for (i, (token, &target)) in tokens.iter().zip(targets).enumerate() {
                let space = if i == 0 { "" } else { " " };
                write!(f, "{space}{token}")?;
                if target != IGNORE {
                    write!(f, ">{target}")?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
