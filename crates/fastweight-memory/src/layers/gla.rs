//! Gated linear attention: every key channel forgets at its own rate.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::log_sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::gla::{gated_linear_attention, gated_linear_attention_step};
use fastweight_ops::{Offsets, OpError, SequenceOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::matrix::{MatrixLayer, matrix_layer};
use super::{LayerConfig, matrix_size};
use crate::context::{MOST_HEAD_CHANNELS, setting_error, validate_conv};
use crate::init::placeholder;
use crate::projection::{Heads, LowRankLinear, Projection, Qkv, QkvSizes, linear, split_heads, token};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, StateSize};

const NAME: &str = GatedLinearAttentionConfig::NAME;

/// What the log gates are divided by, so that they start near zero.
const GATE_DIVISOR: f64 = 16.0;

/// Configuration of [`GatedLinearAttention`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GatedLinearAttentionConfig {
    /// Width of the short convolution on q, k and v, which SiLU follows; 0 for none (and no SiLU).
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Channels that the decay's projection passes through.
    #[schemars(range(min = 1, max = MOST_HEAD_CHANNELS))]
    pub rank: usize,
}

impl Default for GatedLinearAttentionConfig {
    fn default() -> Self {
        Self { conv_width: 0, rank: 16 }
    }
}

/// Gated linear attention (Yang et al. 2023, 2312.06635).
///
/// `g_t = logsigmoid(W_2 W_1 x + decay_bias) / 16` for each key channel, `S_t = diag(exp g_t) S_{t-1} + k_t v_t^T`; each
/// head's normalised reading is gated by `silu(W_g x)`.
#[derive(Module, Debug)]
pub struct GatedLinearAttention {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Decay before its bias and sigmoid, one a key channel.
    pub decay: LowRankLinear,
    /// Bias of the decay, `[H * K]`.
    pub decay_bias: Param<Tensor<1>>,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: GatedLinearAttentionConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl GatedLinearAttentionConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }

    pub(crate) fn validate_rank(&self) -> Result<(), MemoryError> {
        if self.rank == 0 || self.rank > MOST_HEAD_CHANNELS {
            let expected = format!("at least 1 (16 is usual) and at most {MOST_HEAD_CHANNELS}");
            return Err(setting_error(NAME, "rank", self.rank, expected));
        }
        Ok(())
    }
}

impl LayerConfig for GatedLinearAttentionConfig {
    const NAME: &'static str = "gla";
    type Layer = GatedLinearAttention;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        validate_conv(NAME, self.conv_width)?;
        self.validate_rank()
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<GatedLinearAttention, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(self.conv_width > 0, device);
        Ok(GatedLinearAttention {
            q,
            k,
            v,
            decay: LowRankLinear::new(ctx.width, self.rank, ctx.key_width(), device),
            decay_bias: placeholder([ctx.key_width()], device),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let decay = LowRankLinear::parameter_count(ctx.width, self.rank, ctx.key_width()) + ctx.key_width();
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + decay + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

matrix_layer!(GatedLinearAttention);

impl MatrixLayer for GatedLinearAttention {
    const NAME: &'static str = NAME;
    /// Log decays `[B, T, H, K]`.
    type Gates = Tensor<4>;

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
    ) -> Result<(Heads, Tensor<4>), MemoryError> {
        let heads = self.ctx.heads;
        let decay = self.decay.forward(x.clone()) + self.decay_bias.val().unsqueeze::<3>();
        let gate = split_heads(log_sigmoid(decay) / GATE_DIVISOR, heads);
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        Ok((qkv.forward(x, conv, offsets, heads, heads)?, gate))
    }

    fn run(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        gate: Tensor<4>,
        memory: Option<Tensor<4>>,
        options: &SequenceOptions,
    ) -> Result<(Tensor<4>, Tensor<4>), OpError> {
        gated_linear_attention(q, k, v, gate, memory, options)
    }

    fn run_token(
        &self,
        [q, k, v]: [Tensor<3>; 3],
        gate: Tensor<4>,
        memory: Tensor<4>,
    ) -> Result<(Tensor<3>, Tensor<4>), OpError> {
        gated_linear_attention_step(q, k, v, token(gate), memory, Self::SCALE)
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
    }
}
