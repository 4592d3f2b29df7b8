//! Padded batches without padding: the real tokens of a padded batch packed into one row of documents.
//!
//! Padding tokens never reach a layer, so they cannot touch a memory, a convolution, a position or a
//! normaliser, wherever they stand: left, right or inside a row.

use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight_ops::Offsets;

use crate::MemoryError;

/// Which tokens of a padded batch are real.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Padding {
    batch: usize,
    time: usize,
    /// Flat positions (`row * time + column`) of the real tokens.
    tokens: Vec<usize>,
    offsets: Offsets,
}

impl Padding {
    /// Row `b` has `lengths[b]` tokens and is padded on the right to `time`.
    ///
    /// # Errors
    /// [`MemoryError::Padding`]: a length above `time`, or no token at all.
    pub fn from_lengths(lengths: &[usize], time: usize) -> Result<Self, MemoryError> {
        if let Some(row) = lengths.iter().position(|length| *length > time) {
            let reason =
                format!("row {row} has length {}, but rows have {time} tokens; cut it", lengths[row]);
            return Err(MemoryError::Padding { reason });
        }
        let mask: Vec<bool> = lengths.iter().flat_map(|length| (0..time).map(move |t| t < *length)).collect();
        Self::from_mask(&mask, lengths.len(), time)
    }

    /// `mask [batch * time]`, row by row, is true at real tokens.
    ///
    /// # Errors
    /// [`MemoryError::Padding`]: another number of entries than `batch * time`, or no token at all.
    pub fn from_mask(mask: &[bool], batch: usize, time: usize) -> Result<Self, MemoryError> {
        if mask.len() != batch * time {
            let reason =
                format!("the mask has {} entries, expected {batch} rows of {time} tokens", mask.len());
            return Err(MemoryError::Padding { reason });
        }
        let tokens: Vec<usize> = mask.iter().enumerate().filter(|(_, real)| **real).map(|(i, _)| i).collect();
        if tokens.is_empty() {
            let reason = "the batch holds no token, only padding; leave it out".to_owned();
            return Err(MemoryError::Padding { reason });
        }
        let lengths: Vec<usize> =
            mask.chunks(time).map(|row| row.iter().filter(|real| **real).count()).collect();
        Ok(Self { batch, time, tokens, offsets: Offsets::from_lengths(&lengths) })
    }

    /// The rows as documents of the packed row; a row that is all padding is an empty document.
    pub fn offsets(&self) -> &Offsets {
        &self.offsets
    }

    fn check(&self, found: &[usize], expected: &[usize]) -> Result<(), MemoryError> {
        if found == expected {
            return Ok(());
        }
        let reason = format!("the tensor starts with {found:?}, expected {expected:?}");
        Err(MemoryError::Padding { reason })
    }

    fn index(values: impl Iterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
        let values: Vec<i64> = values.map(|v| v as i64).collect();
        let count = values.len();
        Tensor::from_data(TensorData::new(values, [count]), device)
    }
}

/// Packs a padded batch: `x [B, T, D]` to `[1, tokens, D]`, whose documents are [`Padding::offsets`].
///
/// # Errors
/// [`MemoryError::Padding`] for a batch of another size.
pub fn unpad(x: Tensor<3>, padding: &Padding) -> Result<Tensor<3>, MemoryError> {
    let [batch, time, dim] = x.dims();
    padding.check(&[batch, time], &[padding.batch, padding.time])?;
    let index = Padding::index(padding.tokens.iter().copied(), &x.device());
    Ok(x.reshape([batch * time, dim]).select(0, index).unsqueeze_dim(0))
}

/// [`unpad`] for token ids, `[B, T]` to `[1, tokens]`.
///
/// # Errors
/// [`MemoryError::Padding`] for a batch of another size.
pub fn unpad_tokens(tokens: Tensor<2, Int>, padding: &Padding) -> Result<Tensor<2, Int>, MemoryError> {
    let [batch, time] = tokens.dims();
    padding.check(&[batch, time], &[padding.batch, padding.time])?;
    let index = Padding::index(padding.tokens.iter().copied(), &tokens.device());
    Ok(tokens.reshape([batch * time]).select(0, index).unsqueeze_dim(0))
}

/// The way back: `x [1, tokens, D]` to `[B, T, D]` with zeros at padding.
///
/// # Errors
/// [`MemoryError::Padding`] for another number of tokens.
pub fn repad(x: Tensor<3>, padding: &Padding) -> Result<Tensor<3>, MemoryError> {
    let [rows, tokens, dim] = x.dims();
    padding.check(&[rows, tokens], &[1, padding.tokens.len()])?;
    let mut sources = vec![tokens; padding.batch * padding.time];
    padding.tokens.iter().enumerate().for_each(|(source, target)| sources[*target] = source);
    let index = Padding::index(sources.into_iter(), &x.device());
    let zero = Tensor::<2>::zeros([1, dim], (&x.device(), x.dtype()));
    let all = Tensor::cat(vec![x.squeeze_dim(0), zero], 0);
    Ok(all.select(0, index).reshape([padding.batch, padding.time, dim]))
}
