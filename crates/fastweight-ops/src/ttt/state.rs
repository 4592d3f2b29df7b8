//! What a TTT-Linear memory holds between two tokens.

use burn::tensor::{Tensor, TensorCreationOptions};

use crate::OpError;
use crate::check::Arguments;
use crate::fused::make_contiguous;

use super::composed::Memory;

/// A mini-batch in progress, for each of `N` sequences (rows, or documents).
///
/// Boundaries of mini-batches are at absolute positions of the document, so a text cut anywhere gives what
/// the whole text gives. Gradients flow through every tensor, so backpropagation over a cut is exact;
/// truncate it by detaching the state.
#[derive(Debug, Clone)]
pub struct TttState {
    /// Weights of the inner model at the mini-batch's start `[N,H,K,V]`.
    pub weights: Tensor<4>,
    /// Its bias at the mini-batch's start `[N,H,V]`.
    pub bias: Tensor<3>,
    /// Sum of the weights' gradients `k u^T` over the tokens so far `[N,H,K,V]`; zero, and not read, at position 0.
    pub gathered: Tensor<4>,
    /// Sum of the bias's gradients `u` over the tokens so far `[N,H,V]`; zero, and not read, at position 0.
    pub gathered_bias: Tensor<3>,
    /// Learning rate of the last token `[N,H]`: what [`Self::flush`] applies. The next token replaces it.
    pub rate: Tensor<2>,
    /// Tokens of the mini-batch so far, of each sequence: from 0 to below the mini-batch's size.
    pub position: Vec<usize>,
}

impl TttState {
    /// An inner model `[N,H,K,V]` and `[N,H,V]` that has seen nothing yet.
    pub fn new(weights: Tensor<4>, bias: Tensor<3>) -> Self {
        let [sequences, heads, ..] = weights.dims();
        let options = (&weights.device(), weights.dtype());
        Self {
            gathered: Tensor::zeros(weights.dims(), options),
            gathered_bias: Tensor::zeros(bias.dims(), options),
            rate: Tensor::zeros([sequences, heads], options),
            position: vec![0; sequences],
            weights,
            bias,
        }
    }

    /// Inner models of zeros, with keys and values of `size`.
    pub fn zeros(
        sequences: usize,
        heads: usize,
        size: usize,
        options: impl Into<TensorCreationOptions>,
    ) -> Self {
        let options = options.into();
        let weights = Tensor::zeros([sequences, heads, size, size], options.clone());
        Self::new(weights, Tensor::zeros([sequences, heads, size], options))
    }

    /// Applies what was gathered, with the rate of the last token, as if the mini-batch ended there.
    pub fn flush(self) -> Self {
        let [sequences, heads] = self.rate.dims();
        if self.position.iter().all(|&position| position == 0) {
            return self;
        }
        let rate = self.rate.clone().reshape([sequences, heads, 1]);
        let weights = self.weights - self.gathered * rate.clone().unsqueeze_dim(3);
        let bias = self.bias - self.gathered_bias * rate;
        Self { rate: self.rate, ..Self::new(weights, bias) }
    }

    /// Fits `[N,H,K]` and mini-batches of that size.
    pub(super) fn check(
        &self,
        arguments: &Arguments,
        [sequences, heads, key]: [usize; 3],
        mini_batch: usize,
    ) -> Result<(), OpError> {
        if mini_batch == 0 {
            return Err(arguments.wrong_value("mini_batch", "0".into(), "at least 1".into()));
        }
        arguments.tensor("initial weights", &self.weights, [sequences, heads, key, key])?;
        arguments.tensor("initial bias", &self.bias, [sequences, heads, key])?;
        arguments.tensor("initial gathered", &self.gathered, [sequences, heads, key, key])?;
        arguments.tensor("initial gathered_bias", &self.gathered_bias, [sequences, heads, key])?;
        arguments.tensor("initial rate", &self.rate, [sequences, heads])?;
        if self.position.len() != sequences {
            let found = format!("{} positions", self.position.len());
            return Err(arguments.wrong_value("initial position", found, format!("{sequences} of them")));
        }
        match self.position.iter().find(|&&position| position >= mini_batch) {
            None => Ok(()),
            Some(position) => {
                let expected = format!("a position below {mini_batch}, the mini-batch's size");
                Err(arguments.wrong_value("initial position", position.to_string(), expected))
            }
        }
    }

    /// Weights and bias, and what was gathered for them, as one tensor `[N,H,K+1,V]` each.
    pub(super) fn pack(self) -> Memory {
        let joined = |rows: Tensor<4>, last: Tensor<3>| Tensor::cat(vec![rows, last.unsqueeze_dim(2)], 2);
        Memory {
            weights: joined(self.weights, self.bias),
            gathered: joined(self.gathered, self.gathered_bias),
            position: self.position,
        }
    }

    /// The inverse of [`Self::pack`].
    pub(super) fn unpack(
        weights: Tensor<4>,
        gathered: Tensor<4>,
        rate: Tensor<2>,
        position: Vec<usize>,
    ) -> Self {
        let key = weights.dims()[2] - 1;
        // A step updates the state in place, which it cannot inside the packed one.
        let rows = |x: &Tensor<4>| make_contiguous(x.clone().narrow(2, 0, key));
        let last = |x: &Tensor<4>| x.clone().narrow(2, key, 1).squeeze_dim(2);
        Self {
            weights: rows(&weights),
            bias: last(&weights),
            gathered: rows(&gathered),
            gathered_bias: last(&gathered),
            rate,
            position,
        }
    }
}
