//! Normalisations that a model may choose between.

use burn::module::{Module, Param};
use burn::tensor::module::layer_norm;
use burn::tensor::{Device, Tensor};
use fastweight_ops::OpError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::RmsNorm;
use crate::init::placeholder;

/// Layer normalisation over the last channels, `(x - mean) / sqrt(variance + eps) * weight + bias` (Ba et al. 2016,
/// 1607.06450).
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// One factor a channel, `[channels]`.
    pub weight: Param<Tensor<1>>,
    /// Added to each channel, `[channels]`.
    pub bias: Param<Tensor<1>>,
    eps: f64,
}

impl LayerNorm {
    /// A normalisation of `channels` channels, zero until it is initialised.
    pub fn new(channels: usize, eps: f64, device: &Device) -> Self {
        Self { weight: placeholder([channels], device), bias: placeholder([channels], device), eps }
    }

    /// Normalises `x [.., channels]`.
    ///
    /// # Errors
    /// Another number of channels.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        let (weight, channels) = (self.weight.val(), x.dims()[D - 1]);
        if weight.dims() != [channels] {
            let (found, expected) = (weight.dims().to_vec(), format!("[{channels}]"));
            return Err(OpError::Shape { operator: "layer_norm", argument: "weight", found, expected });
        }
        Ok(layer_norm(x, weight, Some(self.bias.val()), self.eps))
    }
}

/// Which normalisation a model has before its mixers and channel mixers, and before its head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// `rms`: root mean square, without bias.
    #[default]
    Rms,
    /// `layer`: layer normalisation with bias, as RWKV has it.
    Layer,
}

impl NormKind {
    /// A normalisation of `channels` channels, zero until it is initialised.
    pub fn build(self, channels: usize, eps: f64, device: &Device) -> Norm {
        match self {
            Self::Rms => Norm::Rms(RmsNorm::new(channels, eps, device)),
            Self::Layer => Norm::Layer(LayerNorm::new(channels, eps, device)),
        }
    }

    /// Its parameters; `usize::MAX` when there are more.
    pub fn parameter_count(self, channels: usize) -> usize {
        match self {
            Self::Rms => channels,
            Self::Layer => channels.saturating_mul(2),
        }
    }
}

/// One of the normalisations; parameters keep its own names.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    /// Normalises `x [.., channels]`.
    ///
    /// # Errors
    /// Another number of channels.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }
}
