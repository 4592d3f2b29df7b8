//! State of softmax attention: the keys and values it may still look at.

use burn::tensor::{Tensor, TensorData};
use fastweight_ops::softmax::KvCache;
use fastweight_ops::{Offsets, OpError};

use super::{ConvState, State, rows};
use crate::MemoryError;

/// Keys and values of the tokens read, one entry per token (the last `window - 1` with a window).
///
/// Rows may hold different numbers of entries. Where tokens are read one by one on the CPU the tensors have room for
/// an eighth more entries and 32, so that a token is written in place; [`State::bytes`] counts that room, and a
/// [`State::select`]ed or cleared state has none.
#[derive(Debug, Clone)]
pub struct KvState {
    /// Keys `[N, P, kv heads, K]`, already rotated, and values `[N, P, kv heads, V]`; none while P is 0.
    pub entries: Option<(Tensor<4>, Tensor<4>)>,
    /// Valid entries of each row, counted from its first. Held on the host, not counted in bytes.
    pub lengths: Vec<usize>,
    /// Entries of a row that its next token may look at, the last ones; all when absent.
    pub keep: Option<usize>,
    /// Tokens read by each row: the position of its next token. Held on the host, not counted in bytes.
    pub positions: Vec<usize>,
    /// The convolutions' states, if the layer has convolutions.
    pub conv: Option<ConvState>,
}

impl KvState {
    /// Nothing read yet, in any of `batch` rows.
    pub fn empty(batch: usize, keep: Option<usize>, conv: Option<ConvState>) -> Self {
        Self { entries: None, lengths: vec![0; batch], keep, positions: vec![0; batch], conv }
    }

    /// The entries as the attention operator reads them.
    pub(crate) fn cache(&self) -> Option<KvCache> {
        let (k, v) = self.entries.clone()?;
        let held = k.dims()[1];
        let full = self.lengths.iter().all(|length| *length == held);
        Some(KvCache { k, v, lengths: (!full).then(|| self.lengths.clone()) })
    }

    /// The state after `k [B, T, G, K]` and `v [B, T, G, V]` were read (documents of one row, with offsets).
    pub(crate) fn append(
        mut self,
        k: Tensor<4>,
        v: Tensor<4>,
        offsets: Option<&Offsets>,
        conv: Option<ConvState>,
    ) -> Result<Self, OpError> {
        let time = k.dims()[1];
        let new: Vec<usize> = match offsets {
            Some(offsets) => offsets.ranges().map(|range| range.len()).collect(),
            None => vec![time; self.lengths.len()],
        };
        let positions = self.positions.iter().zip(&new).map(|(position, new)| position + new).collect();
        let held = self.cache();
        self.entries = None;
        let cache = KvCache::append(held, k, v, offsets, self.keep)?;
        Ok(Self { positions, conv, ..self.with(cache) })
    }

    /// The same rows with these entries.
    fn with(self, cache: Option<KvCache>) -> Self {
        let lengths = cache.as_ref().map_or_else(|| vec![0; self.lengths.len()], KvCache::valid);
        Self { entries: cache.map(|cache| (cache.k, cache.v)), lengths, ..self }
    }

    /// The entries that a next token may look at, in storage of exactly their size.
    fn compact(self) -> Self {
        let cache = self.cache().and_then(|cache| cache.compact(self.keep));
        self.with(cache)
    }
}

impl State for KvState {
    fn batch(&self) -> usize {
        self.lengths.len()
    }
    fn bytes(&self) -> usize {
        let entries = self.entries.as_ref().map_or(0, |(k, v)| rows::bytes(k) + rows::bytes(v));
        entries + self.conv.as_ref().map_or(0, State::bytes)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        let pick = |values: &[usize]| selected.iter().map(|row| values[*row]).collect();
        let entries = self.entries.as_ref().map(|(k, v)| {
            let rows = || selected.iter().copied();
            (rows::gather(k, 0, rows()), rows::gather(v, 0, rows()))
        });
        let conv = self.conv.as_ref().map(|conv| conv.select(selected)).transpose()?;
        let (lengths, positions) = (pick(&self.lengths), pick(&self.positions));
        Ok(Self { entries, lengths, keep: self.keep, positions, conv }.compact())
    }
    fn clear(mut self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        for row in cleared {
            self.lengths[*row] = 0;
            self.positions[*row] = 0;
        }
        self.entries = self.entries.map(|(k, v)| (rows::zero(k, cleared), rows::zero(v, cleared)));
        self.conv = self.conv.map(|conv| conv.clear(cleared)).transpose()?;
        Ok(self.compact())
    }
    fn detach(self) -> Self {
        let entries = self.entries.map(|(k, v)| (k.detach(), v.detach()));
        Self { entries, conv: self.conv.map(State::detach), ..self }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = Vec::new();
        let cache = self.cache().and_then(|cache| cache.compact(self.keep));
        let lengths = cache.as_ref().map_or_else(|| vec![0; self.batch()], KvCache::valid);
        if let Some(cache) = cache {
            named.push(("keys".to_owned(), cache.k.to_data()));
            named.push(("values".to_owned(), cache.v.to_data()));
        }
        named.push(("lengths".to_owned(), rows::counters(&lengths)));
        named.push(("positions".to_owned(), rows::counters(&self.positions)));
        named.extend(self.conv.iter().flat_map(State::named_tensors));
        named
    }
}
