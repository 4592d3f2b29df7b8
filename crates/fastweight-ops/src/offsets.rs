//! Documents packed in one row.

use std::ops::Range;

use crate::OpError;

/// Boundaries `[0, n1, n1 + n2, ..., T]` of the documents packed in one row of `T` tokens.
///
/// Every state (memory, short convolution, positions) restarts at each boundary.
/// Two equal neighbours are an empty document, whose final state is its initial state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offsets(Vec<usize>);

impl Offsets {
    /// Checks that `offsets` start at 0, never decrease and end at `time`.
    ///
    /// # Errors
    /// [`OpError::Offsets`] names the rule that is broken.
    pub fn new(offsets: &[usize], time: usize) -> Result<Self, OpError> {
        let fail = |reason: String| Err(OpError::Offsets { offsets: offsets.to_vec(), time, reason });
        let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
            return fail("they are empty; one document is [0, time]".into());
        };
        if offsets.len() < 2 {
            return fail("at least a start and an end are needed; one document is [0, time]".into());
        }
        if first != 0 {
            return fail(format!("they must start at 0, not {first}"));
        }
        if let Some(i) = offsets.windows(2).position(|w| w[1] < w[0]) {
            return fail(format!("entry {} is smaller than entry {i}", i + 1));
        }
        if last != time {
            return fail(format!("they must end at {time}, not {last}"));
        }
        Ok(Self(offsets.to_vec()))
    }

    /// Offsets of documents with the given lengths.
    pub fn from_lengths(lengths: &[usize]) -> Self {
        let mut offsets = vec![0];
        let mut total = 0;
        for n in lengths {
            total += n;
            offsets.push(total);
        }
        if offsets.len() == 1 {
            offsets.push(0);
        }
        Self(offsets)
    }

    /// The boundaries, `documents() + 1` of them.
    pub fn as_slice(&self) -> &[usize] {
        &self.0
    }

    /// How many documents the row holds.
    pub fn documents(&self) -> usize {
        self.0.len() - 1
    }

    /// Tokens in the row.
    pub fn time(&self) -> usize {
        self.0[self.0.len() - 1]
    }

    /// The token ranges of the documents, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.0.windows(2).map(|w| w[0]..w[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_offsets_name_the_broken_rule() {
        for (offsets, word) in [
            (vec![], "empty"),
            (vec![0], "at least"),
            (vec![1, 4], "start at 0"),
            (vec![0, 3, 2, 4], "entry 2 is smaller than entry 1"),
            (vec![0, 3], "end at 4"),
            (vec![0, 5], "end at 4"),
        ] {
            let message = Offsets::new(&offsets, 4).unwrap_err().to_string();
            assert!(message.contains(word), "{offsets:?}: {message}");
        }
        assert_eq!(Offsets::new(&[0, 2, 2, 4], 4).unwrap().ranges().collect::<Vec<_>>(), [0..2, 2..2, 2..4]);
    }
}
