//! HGRN2: gated linear attention whose keys are what the forget gate leaves free.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::{log_sigmoid, sigmoid, silu};
use burn::tensor::{Device, Tensor};
use fastweight_ops::gla::{gated_linear_attention, gated_linear_attention_step};
use fastweight_ops::{Offsets, OpError, SequenceOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::matrix::{MatrixLayer, matrix_layer};
use super::{LayerConfig, matrix_size};
use crate::context::{setting_error, validate_conv};
use crate::projection::{Heads, Projection, Qkv, QkvSizes, linear, token};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, StateSize};

const NAME: &str = Hgrn2Config::NAME;

/// Configuration of [`Hgrn2`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Hgrn2Config {
    /// Width of the short convolution on the queries, forget gates and values; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Least forget gate, from 0 to below 1; `layer / layers` when absent.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub lower_bound: Option<f32>,
}

/// HGRN2 (Qin et al. 2024, 2404.07904).
///
/// `f_t = b + (1 - b) sigmoid(W_f x)` for each key channel with a lower bound `b`, `k_t = 1 - f_t`,
/// `S_t = diag(f_t) S_{t-1} + k_t v_t^T`, `o_t = S_t^T silu(q_t)`; the readings of all heads together are RMS-normalised.
///
/// The paper trains the lower bounds of all layers together, as running sums of a softmax over the layers; here they are fixed at
/// what it starts from, `layer / layers`, so that a layer does not depend on others.
#[derive(Module, Debug)]
pub struct Hgrn2 {
    /// Queries.
    pub q: Projection,
    /// Forget gate before the sigmoid, one a key channel.
    pub forget: Projection,
    /// Values.
    pub v: Projection,
    /// Normalisation of all heads' readings together.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: Hgrn2Config,
    #[module(skip)]
    ctx: LayerContext,
}

impl Hgrn2Config {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for Hgrn2Config {
    const NAME: &'static str = "hgrn2";
    type Layer = Hgrn2;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        validate_conv(NAME, self.conv_width)?;
        match self.lower_bound {
            Some(bound) if !(0.0..1.0).contains(&bound) => {
                Err(setting_error(NAME, "lower_bound", bound, "from 0 to below 1, or leave it out"))
            }
            _ => Ok(()),
        }
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Hgrn2, MemoryError> {
        self.validate(ctx)?;
        let [q, forget, v] = self.qkv(ctx).build(false, device);
        Ok(Hgrn2 {
            q,
            forget,
            v,
            norm: RmsNorm::new(ctx.value_width(), ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        self.qkv(ctx).parameter_count() + ctx.value_width() * (1 + ctx.width)
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

matrix_layer!(Hgrn2);

impl MatrixLayer for Hgrn2 {
    const NAME: &'static str = NAME;
    const SCALE: Option<f32> = Some(1.0);
    /// Log forget gates `[B, T, H, K]`.
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
        let qkv = Qkv { q: &self.q, k: &self.forget, v: &self.v };
        let mut heads = qkv.forward(x, conv, offsets, self.ctx.heads, self.ctx.heads)?;
        heads.q = silu(heads.q);
        let bound = self.config.lower_bound.unwrap_or(self.ctx.layer as f32 / self.ctx.layers as f32);
        let forget = heads.k;
        heads.k = sigmoid(forget.clone().neg()) * (1.0 - bound);
        // With a bound the gate never reaches 0 and its logarithm needs no care; without it is the log sigmoid.
        let gate = if bound > 0.0 { heads.k.clone().neg().log1p() } else { log_sigmoid(forget) };
        Ok((heads, gate))
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

    fn output(&self, o: Tensor<3>, _x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.forward(o)?))
    }
}
