//! The keys and values that softmax attention remembers.

use burn::tensor::Tensor;

use super::value_error;
use crate::OpError;

/// Keys and values of earlier tokens, one row per sequence.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// Keys `[sequences, held, kv heads, key]`.
    pub k: Tensor<4>,
    /// Values `[sequences, held, kv heads, value]`.
    pub v: Tensor<4>,
    /// How many of the held entries are valid in each row, counted from the first; all when absent.
    pub lengths: Option<Vec<usize>>,
}

impl KvCache {
    /// Valid entries of each row.
    pub fn valid(&self) -> Vec<usize> {
        let [rows, held, ..] = self.k.dims();
        self.lengths.clone().unwrap_or_else(|| vec![held; rows])
    }

    /// Checks that there is one length per row, none above the entries held.
    ///
    /// # Errors
    /// [`OpError::Value`] names what is wrong.
    pub fn check_lengths(&self) -> Result<(), OpError> {
        let [rows, held, ..] = self.k.dims();
        match &self.lengths {
            Some(lengths) if lengths.len() != rows => Err(value_error(
                "cache.lengths",
                format!("{} lengths", lengths.len()),
                format!("one for each of {rows} rows"),
            )),
            Some(lengths) if lengths.iter().any(|&n| n > held) => Err(value_error(
                "cache.lengths",
                format!("{lengths:?}"),
                format!("at most the {held} entries held"),
            )),
            _ => Ok(()),
        }
    }
}
