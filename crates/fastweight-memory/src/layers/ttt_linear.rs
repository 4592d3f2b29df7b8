//! TTT-Linear: an inner linear model with a normalised output that learns while it reads.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::ttt::{TttOptions, TttState, ttt_linear, ttt_linear_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, STATE_ELEMENT, sequence_options};
use crate::context::{MOST_WINDOW, setting_error, validate_conv, validate_rate};
use crate::init::placeholder;
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, State, StateSize, TttMemoryState};

const NAME: &str = TttLinearConfig::NAME;

/// Configuration of [`TttLinear`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TttLinearConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Tokens between two updates of the inner model.
    #[schemars(range(min = 1, max = MOST_WINDOW))]
    pub mini_batch: usize,
    /// Largest inner learning rate, above 0.
    #[schemars(range(max = crate::context::MOST_RATE), extend("exclusiveMinimum" = 0))]
    pub eta_base: f32,
}

impl Default for TttLinearConfig {
    fn default() -> Self {
        Self { conv_width: 4, mini_batch: 16, eta_base: 1.0 }
    }
}

/// TTT-Linear (Sun et al. 2024, 2407.04620).
///
/// Short convolution on q, k, v; unit q and k; `eta = eta_base sigmoid(W x)` a head. Each head's inner model
/// starts at trained weights `W, c` and learns `LN(W^T k + c) = v - k` by gradient descent, mini-batch by mini-batch; a token
/// reads `z + LN(z)`, `z = W^T q + c` (see [`fastweight_ops::ttt`]), RMS-normalised and gated by `silu(W_g x)`. Keys are
/// taken from values, so `value_dim` equals `head_dim`.
#[derive(Module, Debug)]
pub struct TttLinear {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Inner learning rate before the sigmoid, one a head.
    pub eta: Linear,
    /// Weights of the inner model before the first token, `[H, K, V]`.
    pub start: Param<Tensor<3>>,
    /// Its bias before the first token, `[H, V]`.
    pub start_bias: Param<Tensor<2>>,
    /// Scale of the inner normalisation, `[H, V]`.
    pub ln_weight: Param<Tensor<2>>,
    /// Shift of the inner normalisation, `[H, V]`.
    pub ln_bias: Param<Tensor<2>>,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: TttLinearConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl TttLinearConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for TttLinearConfig {
    const NAME: &'static str = "ttt_linear";
    type Layer = TttLinear;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        validate_conv(NAME, self.conv_width)?;
        if ctx.value_dim != ctx.head_dim {
            let expected = format!("head_dim = {}: the inner model adds to its input", ctx.head_dim);
            return Err(setting_error(NAME, "value_dim", ctx.value_dim, expected));
        }
        if self.mini_batch == 0 || self.mini_batch > MOST_WINDOW {
            let expected = format!("at least 1 (16 is usual) and at most {MOST_WINDOW}");
            return Err(setting_error(NAME, "mini_batch", self.mini_batch, expected));
        }
        validate_rate(NAME, "eta_base", self.eta_base, "1")
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<TttLinear, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(false, device);
        let per_value = || placeholder([ctx.heads, ctx.value_dim], device);
        Ok(TttLinear {
            q,
            k,
            v,
            eta: linear(ctx.width, ctx.heads, device),
            start: placeholder([ctx.heads, ctx.head_dim, ctx.value_dim], device),
            start_bias: per_value(),
            ln_weight: per_value(),
            ln_bias: per_value(),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let inner = ctx.value_width() * (ctx.head_dim + 3);
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + ctx.heads * ctx.width + inner + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        let inner = 2 * ctx.value_width() * (ctx.head_dim + 1) + ctx.heads;
        StateSize { fixed: (inner + self.qkv(ctx).conv_elements()) * STATE_ELEMENT, growing: 0 }
    }
}

impl Layer for TttLinear {
    type State = TttMemoryState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<TttMemoryState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, TttMemoryState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let sequences = offsets.map_or(x.dims()[0], Offsets::documents);
        let state = state.unwrap_or_else(|| self.zero_state(sequences, &x.device()));
        let (Heads { q, k, v, conv }, eta) = self.read(x.clone(), state.conv, offsets)?;
        let options =
            TttOptions { mini_batch: self.config.mini_batch, ..sequence_options(offsets, SCALE).into() };
        let [ln_w, ln_b] = [self.ln_weight.val(), self.ln_bias.val()];
        let inner = self.inner(state.change, 1.0);
        let (o, end) = ttt_linear(q, k, v, eta, ln_w, ln_b, Some(inner), &options)?;
        let y = self.output(merge_heads(o), x)?;
        Ok((y, TttMemoryState::new(self.inner(end, -1.0), conv)))
    }

    fn step(&self, x: Tensor<2>, state: TttMemoryState) -> Result<(Tensor<2>, TttMemoryState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let x = x.unsqueeze_dim::<3>(1);
        let (Heads { q, k, v, conv }, eta) = self.read(x.clone(), state.conv, None)?;
        let options =
            TttOptions { mini_batch: self.config.mini_batch, scale: SCALE, ..TttOptions::default() };
        let [ln_w, ln_b] = [self.ln_weight.val(), self.ln_bias.val()];
        let inner = self.inner(state.change, 1.0);
        let [q, k, v] = [q, k, v].map(token);
        let (o, end) = ttt_linear_step(q, k, v, eta.squeeze_dim(1), ln_w, ln_b, inner, &options)?;
        let y = self.output(merge_token(o), x)?.squeeze_dim(1);
        Ok((y, TttMemoryState::new(self.inner(end, -1.0), conv)))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> TttMemoryState {
        let change = TttState::zeros(batch, self.ctx.heads, self.ctx.head_dim, device);
        TttMemoryState { change, conv: self.config.qkv(&self.ctx).zero_conv(batch, device) }
    }
}

/// Factor on the queries: the inner model reads at unit length, as it learns.
const SCALE: Option<f32> = Some(1.0);

impl TttLinear {
    /// The inner models with the trained start added `sign` times.
    fn inner(&self, state: TttState, sign: f64) -> TttState {
        let weights = state.weights + self.start.val().unsqueeze_dim::<4>(0) * sign;
        let bias = state.bias + self.start_bias.val().unsqueeze_dim::<3>(0) * sign;
        TttState { weights, bias, ..state }
    }

    /// Unit queries and keys, values, and the inner learning rates `[B, T, H]`.
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Heads, Tensor<3>), MemoryError> {
        let eta = sigmoid(self.eta.forward(x.clone())) * self.config.eta_base;
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        Ok((qkv.unit(x, conv, offsets, self.ctx.heads, self.ctx.heads)?, eta))
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
    }
}
