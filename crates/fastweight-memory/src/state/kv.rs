//! State of softmax attention: the keys and values it may still look at.

use burn::tensor::{Tensor, TensorData};
use fastweight_ops::Offsets;
use fastweight_ops::softmax::KvCache;

use super::{ConvState, State, rows};
use crate::MemoryError;

/// Keys and values of the tokens read, one entry per token (the last `window - 1` with a window).
///
/// Rows may hold different numbers of entries; the tensors are exactly as long as the longest row.
#[derive(Debug, Clone)]
pub struct KvState {
    /// Keys `[N, P, kv heads, K]`, already rotated, and values `[N, P, kv heads, V]`; none while P is 0.
    pub entries: Option<(Tensor<4>, Tensor<4>)>,
    /// Valid entries of each row, counted from its first. Held on the host, not counted in bytes.
    pub lengths: Vec<usize>,
    /// Tokens read by each row: the position of its next token. Held on the host, not counted in bytes.
    pub positions: Vec<usize>,
    /// The convolutions' states, if the layer has convolutions.
    pub conv: Option<ConvState>,
}

impl KvState {
    /// Nothing read yet, in any of `batch` rows.
    pub fn empty(batch: usize, conv: Option<ConvState>) -> Self {
        Self { entries: None, lengths: vec![0; batch], positions: vec![0; batch], conv }
    }

    /// The entries as the attention operator reads them.
    pub(crate) fn cache(&self) -> Option<KvCache> {
        let (k, v) = self.entries.clone()?;
        let held = k.dims()[1];
        let full = self.lengths.iter().all(|length| *length == held);
        Some(KvCache { k, v, lengths: (!full).then(|| self.lengths.clone()) })
    }

    /// The state after `k [B, T, G, K]` and `v [B, T, G, V]` were read (documents of one row, with offsets);
    /// no more than `keep` entries stay in a row.
    pub(crate) fn append(
        self,
        k: Tensor<4>,
        v: Tensor<4>,
        offsets: Option<&Offsets>,
        keep: Option<usize>,
        conv: Option<ConvState>,
    ) -> Self {
        let time = k.dims()[1];
        let new: Vec<usize> = match offsets {
            Some(offsets) => offsets.ranges().map(|range| range.len()).collect(),
            None => vec![time; self.lengths.len()],
        };
        let keep = keep.unwrap_or(usize::MAX);
        let lengths: Vec<usize> =
            self.lengths.iter().zip(&new).map(|(held, new)| (held + new).min(keep)).collect();
        let positions = self.positions.iter().zip(&new).map(|(position, new)| position + new).collect();
        let held = self.entries.as_ref().map_or(0, |(k, _)| k.dims()[1]);
        let even = offsets.is_none() && self.lengths.iter().all(|length| *length == held);
        let longest = lengths.iter().max().copied().unwrap_or(0);
        let (old_k, old_v) = self.entries.unzip();
        let entries = (longest > 0).then(|| {
            let join = |old: Option<Tensor<4>>, new: Tensor<4>| {
                if even {
                    last(old.into_iter().chain([new]).collect(), longest)
                } else {
                    ragged(old, &self.lengths, new, offsets, &lengths, longest)
                }
            };
            (join(old_k, k), join(old_v, v))
        });
        Self { entries, lengths, positions, conv }
    }

    /// Shortens the tensors to the longest row.
    fn trim(mut self) -> Self {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        self.entries = self.entries.filter(|_| longest > 0).map(|(k, v)| {
            if k.dims()[1] == longest {
                (k, v)
            } else {
                (rows::gather(&k, 1, 0..longest), rows::gather(&v, 1, 0..longest))
            }
        });
        self
    }
}

/// The last `count` entries of `parts [N, P, G, D]` joined along P, in storage of their own.
fn last(mut parts: Vec<Tensor<4>>, count: usize) -> Tensor<4> {
    let total: usize = parts.iter().map(|part| part.dims()[1]).sum();
    if total > count {
        let mut skip = total - count;
        parts.retain_mut(|part| {
            let length = part.dims()[1];
            let dropped = skip.min(length);
            skip -= dropped;
            if dropped > 0 && dropped < length {
                *part = rows::gather(part, 1, dropped..length);
            }
            dropped < length
        });
    }
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 1) }
}

/// Row by row: the row's old entries, then its new tokens, cut to `lengths` and filled up with zeros.
fn ragged(
    old: Option<Tensor<4>>,
    old_lengths: &[usize],
    new: Tensor<4>,
    offsets: Option<&Offsets>,
    lengths: &[usize],
    longest: usize,
) -> Tensor<4> {
    let [_, time, groups, width] = new.dims();
    let ranges: Vec<_> = match offsets {
        Some(offsets) => offsets.ranges().map(|range| (0, range)).collect(),
        None => (0..lengths.len()).map(|row| (row, 0..time)).collect(),
    };
    let one_row = |row: usize| {
        let (source, range) = ranges[row].clone();
        let held = old.clone().filter(|_| old_lengths[row] > 0);
        let held = held.map(|old| old.narrow(0, row, 1).narrow(1, 0, old_lengths[row]));
        let fresh = new.clone().narrow(0, source, 1);
        let fresh = (!range.is_empty()).then(|| fresh.narrow(1, range.start, range.len()));
        let fill = longest - lengths[row];
        let fill = (fill > 0).then(|| Tensor::zeros([1, fill, groups, width], (&new.device(), new.dtype())));
        let parts: Vec<_> = held.into_iter().chain(fresh).collect();
        let valid = (lengths[row] > 0).then(|| last(parts, lengths[row]));
        let parts: Vec<_> = valid.into_iter().chain(fill).collect();
        Tensor::cat(parts, 1)
    };
    Tensor::cat((0..lengths.len()).map(one_row).collect(), 0)
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
        Ok(Self { entries, lengths: pick(&self.lengths), positions: pick(&self.positions), conv }.trim())
    }
    fn clear(mut self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        for row in cleared {
            self.lengths[*row] = 0;
            self.positions[*row] = 0;
        }
        self.entries = self.entries.map(|(k, v)| (rows::zero(k, cleared), rows::zero(v, cleared)));
        self.conv = self.conv.map(|conv| conv.clear(cleared)).transpose()?;
        Ok(self.trim())
    }
    fn detach(self) -> Self {
        let entries = self.entries.map(|(k, v)| (k.detach(), v.detach()));
        Self { entries, conv: self.conv.map(State::detach), ..self }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = Vec::new();
        if let Some((k, v)) = &self.entries {
            named.push(("keys".to_owned(), k.to_data()));
            named.push(("values".to_owned(), v.to_data()));
        }
        named.push(("lengths".to_owned(), rows::counters(&self.lengths)));
        named.push(("positions".to_owned(), rows::counters(&self.positions)));
        named.extend(self.conv.iter().flat_map(State::named_tensors));
        named
    }
}
