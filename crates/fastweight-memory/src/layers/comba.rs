//! Comba: the gated delta rule with a learned strength of removal and a query corrected by the key.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::activation::log_gate;
use fastweight_ops::comba::{comba, comba_step};
use fastweight_ops::{Offsets, OpError, SequenceOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::delta_net::read_delta;
use super::matrix::{MatrixLayer, matrix_layer};
use super::{LayerConfig, matrix_size};
use crate::init::placeholder;
use crate::projection::{Heads, Projection, Qkv, QkvSizes, linear};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, StateSize};

const NAME: &str = CombaConfig::NAME;

/// Configuration of [`Comba`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CombaConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
}

impl Default for CombaConfig {
    fn default() -> Self {
        Self { conv_width: 4 }
    }
}

/// Comba (Hu et al. 2025, 2506.02475).
///
/// As [`GatedDeltaNet`](super::GatedDeltaNet) with `S_t = (exp(g_t) I - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`, the
/// removal reading the memory before its decay, and `o_t = S_t^T (q_t - d k_t) / sqrt(K)`; `b = sigmoid(b_logit)` and `d`
/// are learned, one a head.
#[derive(Module, Debug)]
pub struct Comba {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Write strength before the sigmoid, one a head.
    pub beta: Linear,
    /// Decay before its bias and softplus, one a head.
    pub decay: Linear,
    /// Bias of the decay, `[H]`.
    pub dt_bias: Param<Tensor<1>>,
    /// Logarithm of the decay rate, `[H]`.
    pub a_log: Param<Tensor<1>>,
    /// Strength of the removal before the sigmoid, `[H]`.
    pub b_logit: Param<Tensor<1>>,
    /// What is taken off the query of the key, `[H]`.
    pub d: Param<Tensor<1>>,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: CombaConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl CombaConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for CombaConfig {
    const NAME: &'static str = "comba";
    type Layer = Comba;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Comba, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        let vector = || placeholder([ctx.heads], device);
        Ok(Comba {
            q,
            k,
            v,
            beta: linear(ctx.width, ctx.heads, device),
            decay: linear(ctx.width, ctx.heads, device),
            dt_bias: vector(),
            a_log: vector(),
            b_logit: vector(),
            d: vector(),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let gates = 2 * ctx.heads * (ctx.width + 2);
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + gates + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

matrix_layer!(Comba);

impl MatrixLayer for Comba {
    const NAME: &'static str = NAME;
    /// Write strengths and log decays, `[B, T, H]` each.
    type Gates = (Tensor<3>, Tensor<3>);

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
        let decay = log_gate(self.decay.forward(x.clone()), self.a_log.val(), self.dt_bias.val())?;
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let (heads, beta) = read_delta(qkv, &self.beta, false, x, conv, offsets, self.ctx.heads)?;
        Ok((heads, (beta, decay)))
    }

    fn run(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        (beta, decay): Self::Gates,
        memory: Option<Tensor<4>>,
        options: &SequenceOptions,
    ) -> Result<(Tensor<4>, Tensor<4>), OpError> {
        let b = sigmoid(self.b_logit.val());
        comba(q, k, v, beta, decay, b, self.d.val(), memory, options)
    }

    fn run_token(
        &self,
        [q, k, v]: [Tensor<3>; 3],
        (beta, decay): Self::Gates,
        memory: Tensor<4>,
    ) -> Result<(Tensor<3>, Tensor<4>), OpError> {
        let (beta, decay, b) = (beta.squeeze_dim(1), decay.squeeze_dim(1), sigmoid(self.b_logit.val()));
        comba_step(q, k, v, beta, decay, b, self.d.val(), memory, Self::SCALE)
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
    }
}
