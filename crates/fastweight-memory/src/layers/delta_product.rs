//! DeltaProduct: several steps of the delta rule for each token.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::activation::log_gate;
use fastweight_ops::delta_product::{delta_product, delta_product_step};
use fastweight_ops::{Offsets, OpError, SequenceOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::matrix::{MatrixLayer, matrix_layer};
use super::{LayerConfig, matrix_size};
use crate::context::{setting_error, validate_conv};
use crate::init::placeholder;
use crate::projection::{Heads, Projection, Qkv, QkvSizes, linear};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, StateSize};

const NAME: &str = DeltaProductConfig::NAME;

/// Most steps a token.
const MOST_STEPS: usize = 64;

/// Configuration of [`DeltaProduct`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DeltaProductConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Steps of the delta rule a token, each with a key, a value and a write strength of its own.
    #[schemars(range(min = 1, max = MOST_STEPS))]
    pub steps: usize,
    /// Write strengths in (0, 2) instead of (0, 1): the state transition may have negative eigenvalues, and two steps
    /// may turn the memory.
    pub allow_negative_eigenvalues: bool,
    /// Whether the memory decays once a token, as in `gated_delta_net`.
    pub gated: bool,
}

impl Default for DeltaProductConfig {
    fn default() -> Self {
        Self { conv_width: 4, steps: 2, allow_negative_eigenvalues: true, gated: false }
    }
}

/// DeltaProduct (Siems et al. 2025, 2502.10297).
///
/// As [`DeltaNet`](super::DeltaNet) with `n` steps a token: `S_j = S_{j-1} + beta_j k_j (v_j - S_{j-1}^T k_j)^T` for
/// `j = 1..n`, then `o_t = S_n^T q_t / sqrt(K)`; each head's normalised reading is gated by `silu(W_g x)`.
#[derive(Module, Debug)]
pub struct DeltaProduct {
    /// Queries.
    pub q: Projection,
    /// Keys of all steps, channels `[steps, heads, K]`.
    pub k: Projection,
    /// Values of all steps, channels `[steps, heads, V]`.
    pub v: Projection,
    /// Write strengths before the sigmoid, channels `[steps, heads]`.
    pub beta: Linear,
    /// Decay before its bias and softplus, one a head, if there is a decay.
    pub decay: Option<Linear>,
    /// Bias of the decay, `[H]`.
    pub dt_bias: Option<Param<Tensor<1>>>,
    /// Logarithm of the decay rate, `[H]`.
    pub a_log: Option<Param<Tensor<1>>>,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: DeltaProductConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl DeltaProductConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::grouped(ctx, self.steps * ctx.heads, self.conv_width)
    }

    pub(crate) fn validate_steps(&self) -> Result<(), MemoryError> {
        if self.steps == 0 || self.steps > MOST_STEPS {
            let expected = format!("at least 1 (2 is usual) and at most {MOST_STEPS}");
            return Err(setting_error(NAME, "steps", self.steps, expected));
        }
        Ok(())
    }
}

impl LayerConfig for DeltaProductConfig {
    const NAME: &'static str = "delta_product";
    type Layer = DeltaProduct;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        validate_conv(NAME, self.conv_width)?;
        self.validate_steps()
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<DeltaProduct, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        let vector = || self.gated.then(|| placeholder([ctx.heads], device));
        Ok(DeltaProduct {
            q,
            k,
            v,
            beta: linear(ctx.width, self.steps * ctx.heads, device),
            decay: self.gated.then(|| linear(ctx.width, ctx.heads, device)),
            dt_bias: vector(),
            a_log: vector(),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let beta = self.steps * ctx.heads * ctx.width;
        let decay = if self.gated { ctx.heads * (ctx.width + 2) } else { 0 };
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + beta + decay + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

matrix_layer!(DeltaProduct);

impl MatrixLayer for DeltaProduct {
    const NAME: &'static str = NAME;
    /// Write strengths `[B, T, steps, H]` and log decays `[B, T, H]`.
    type Gates = (Tensor<4>, Option<Tensor<3>>);

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
        let [batch, time, _] = x.dims();
        let (count, steps) = (self.ctx.heads, self.config.steps);
        let beta = sigmoid(self.beta.forward(x.clone())).reshape([batch, time, steps, count]);
        let beta = if self.config.allow_negative_eigenvalues { beta * 2.0 } else { beta };
        let gate = match (&self.decay, &self.a_log, &self.dt_bias) {
            (Some(decay), Some(a_log), Some(dt_bias)) => {
                Some(log_gate(decay.forward(x.clone()), a_log.val(), dt_bias.val())?)
            }
            _ => None,
        };
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let heads = qkv.unit(x, conv, offsets, count, steps * count)?;
        Ok((heads, (beta, gate)))
    }

    fn run(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        (beta, gate): Self::Gates,
        memory: Option<Tensor<4>>,
        options: &SequenceOptions,
    ) -> Result<(Tensor<4>, Tensor<4>), OpError> {
        let [batch, time, steps, heads] = beta.dims();
        let split = |x: Tensor<4>| {
            let dim = x.dims()[3];
            x.reshape([batch, time, steps, heads, dim])
        };
        delta_product(q, split(k), split(v), beta, gate, memory, options)
    }

    fn run_token(
        &self,
        [q, k, v]: [Tensor<3>; 3],
        (beta, gate): Self::Gates,
        memory: Tensor<4>,
    ) -> Result<(Tensor<3>, Tensor<4>), OpError> {
        let [batch, _, steps, heads] = beta.dims();
        let split = |x: Tensor<3>| {
            let dim = x.dims()[2];
            x.reshape([batch, steps, heads, dim])
        };
        let gate = gate.map(|gate| gate.squeeze_dim(1));
        delta_product_step(q, split(k), split(v), beta.squeeze_dim(1), gate, memory, Self::SCALE)
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
    }
}
