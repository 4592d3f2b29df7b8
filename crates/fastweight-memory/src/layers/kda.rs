//! Kimi Delta Attention: the delta rule in which every key channel forgets at its own rate.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::activation::log_gate;
use fastweight_ops::kda::{kimi_delta_attention, kimi_delta_attention_step};
use fastweight_ops::{Offsets, OpError, SequenceOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::delta_net::read_delta;
use super::matrix::{MatrixLayer, matrix_layer};
use super::{LayerConfig, matrix_size};
use crate::init::placeholder;
use crate::projection::{Heads, LowRankLinear, Projection, Qkv, QkvSizes, linear, split_heads, token};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, StateSize};

const NAME: &str = KimiDeltaAttentionConfig::NAME;

/// Configuration of [`KimiDeltaAttention`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct KimiDeltaAttentionConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Write strengths in (0, 2) instead of (0, 1): the state transition may have negative eigenvalues.
    pub allow_negative_eigenvalues: bool,
}

impl Default for KimiDeltaAttentionConfig {
    fn default() -> Self {
        Self { conv_width: 4, allow_negative_eigenvalues: false }
    }
}

/// Kimi Delta Attention (Kimi Linear, 2025, 2510.26692).
///
/// As [`GatedDeltaNet`](super::GatedDeltaNet) with a decay for each key channel,
/// `g = -exp(a_log) softplus(W_2 W_1 x + dt_bias)` (`a_log` a head), and each head's normalised reading gated by
/// `sigmoid(U_2 U_1 x)`; both maps pass through V channels.
#[derive(Module, Debug)]
pub struct KimiDeltaAttention {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Write strength before the sigmoid, one a head.
    pub beta: Linear,
    /// Decay before its bias and softplus, one a key channel.
    pub decay: LowRankLinear,
    /// Bias of the decay, `[H * K]`.
    pub dt_bias: Param<Tensor<1>>,
    /// Logarithm of the decay rate, `[H]`.
    pub a_log: Param<Tensor<1>>,
    /// Output gate.
    pub gate: LowRankLinear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: KimiDeltaAttentionConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl KimiDeltaAttentionConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for KimiDeltaAttentionConfig {
    const NAME: &'static str = "kda";
    type Layer = KimiDeltaAttention;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<KimiDeltaAttention, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        Ok(KimiDeltaAttention {
            q,
            k,
            v,
            beta: linear(ctx.width, ctx.heads, device),
            decay: LowRankLinear::new(ctx.width, ctx.value_dim, ctx.key_width(), device),
            dt_bias: placeholder([ctx.key_width()], device),
            a_log: placeholder([ctx.heads], device),
            gate: LowRankLinear::new(ctx.width, ctx.value_dim, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let low_rank = |outputs| LowRankLinear::parameter_count(ctx.width, ctx.value_dim, outputs);
        let gates = ctx.heads * (ctx.width + 1) + low_rank(ctx.key_width()) + ctx.key_width();
        let output = low_rank(ctx.value_width()) + ctx.value_dim + ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + gates + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

matrix_layer!(KimiDeltaAttention);

impl MatrixLayer for KimiDeltaAttention {
    const NAME: &'static str = NAME;
    /// Write strengths `[B, T, H]` and log decays `[B, T, H, K]`.
    type Gates = (Tensor<3>, Tensor<4>);

    fn ctx(&self) -> &LayerContext {
        &self.ctx
    }

    fn qkv_sizes(&self) -> QkvSizes {
        self.config.qkv(&self.ctx)
    }

    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Heads, Self::Gates), MemoryError> {
        let LayerContext { heads: count, head_dim, .. } = self.ctx;
        let a_log = self.a_log.val().reshape([count, 1]).repeat_dim(1, head_dim).reshape([count * head_dim]);
        let gate = log_gate(self.decay.forward(x.clone()), a_log, self.dt_bias.val())?;
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let negative = self.config.allow_negative_eigenvalues;
        let (heads, beta) = read_delta(qkv, &self.beta, negative, x, conv, offsets, count)?;
        Ok((heads, (beta, split_heads(gate, count))))
    }

    fn run(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        (beta, gate): Self::Gates,
        memory: Option<Tensor<4>>,
        options: &SequenceOptions,
    ) -> Result<(Tensor<4>, Tensor<4>), OpError> {
        kimi_delta_attention(q, k, v, beta, gate, memory, options)
    }

    fn run_token(
        &self,
        [q, k, v]: [Tensor<3>; 3],
        (beta, gate): Self::Gates,
        memory: Tensor<4>,
    ) -> Result<(Tensor<3>, Tensor<4>), OpError> {
        kimi_delta_attention_step(q, k, v, beta.squeeze_dim(1), token(gate), memory, Self::SCALE)
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, None)? * sigmoid(self.gate.forward(x))))
    }
}
