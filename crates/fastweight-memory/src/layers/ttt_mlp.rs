//! TTT-MLP: an inner two-layer network with a normalised output that learns while it reads.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::deep_memory::{DeepGate, DeepMemory, DeepTokens, RateOf};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LayerConfig;
use super::deep::{DeepOptions, InnerNetwork, deep_layer};
use crate::projection::{Heads, Projection, Qkv, QkvSizes, linear};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, StateSize};

/// Configuration of [`TttMlp`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TttMlpConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    pub conv_width: usize,
    /// Tokens between two updates of the inner model.
    pub mini_batch: usize,
    /// Largest inner learning rate, above 0.
    pub eta_base: f32,
    /// Hidden channels of the inner model for each key channel.
    pub expansion: usize,
}

impl Default for TttMlpConfig {
    fn default() -> Self {
        Self { conv_width: 4, mini_batch: 16, eta_base: 0.1, expansion: 4 }
    }
}

/// TTT-MLP (Sun et al. 2024, 2407.04620).
///
/// As [`TttLinear`](super::TttLinear), with the inner model `f(x) = x + LN(W2^T gelu(W1^T x + c1) + c2)` of each head, whose
/// weights and biases start at trained values and learn `f(k) = v`: gradients at the mini-batch's start, weighed by the reading token's
/// `eta = eta_base sigmoid(W x)`. A token reads `f(q)`, RMS-normalised and gated by `silu(W_g x)`. The state holds the weights at
/// the mini-batch's start, those after the last token, and the gradients gathered between. `value_dim` equals `head_dim`.
#[derive(Module, Debug)]
pub struct TttMlp {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Inner learning rate before the sigmoid, one a head.
    pub eta: Linear,
    /// The inner model before the first token.
    pub memory: InnerNetwork,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: TttMlpConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl TttMlpConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }

    pub(crate) fn options(&self) -> DeepOptions {
        let memory = DeepMemory {
            expansion: self.expansion,
            chunk: self.mini_batch,
            bias: true,
            rate: RateOf::Reading,
            ..DeepMemory::default()
        };
        DeepOptions {
            layer: Self::NAME,
            conv_width: self.conv_width,
            memory,
            momentum: false,
            chunk: "mini_batch",
            rate: ("eta_base", self.eta_base),
            channel_gates: false,
        }
    }
}

impl LayerConfig for TttMlpConfig {
    const NAME: &'static str = "ttt_mlp";
    type Layer = TttMlp;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        self.options().validate(ctx)
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<TttMlp, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(false, device);
        Ok(TttMlp {
            q,
            k,
            v,
            eta: linear(ctx.width, ctx.heads, device),
            memory: InnerNetwork::new(&self.options(), ctx, device),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        let inner = self.options().parameter_count(ctx);
        self.qkv(ctx).parameter_count() + ctx.heads * ctx.width + inner + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        self.options().state_size(ctx, &self.qkv(ctx))
    }

    fn deep_training_bytes(&self, ctx: &LayerContext) -> Option<usize> {
        Some(self.options().training_bytes(ctx))
    }
}

impl TttMlp {
    fn read_tokens(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(DeepTokens, Option<ConvState>), MemoryError> {
        let eta = sigmoid(self.eta.forward(x.clone())) * self.config.eta_base;
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let Heads { q, k, v, conv } = qkv.unit(x, conv, offsets, self.ctx.heads, self.ctx.heads)?;
        Ok((
            DeepTokens {
                q,
                k,
                v,
                rate: Some(DeepGate::Heads(eta)),
                momentum: None,
                decay: None,
                threshold: None,
            },
            conv,
        ))
    }
}

deep_layer!(TttMlp, TttMlpConfig);
