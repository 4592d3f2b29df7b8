//! Gated DeltaNet: the delta rule with a decay per head and token.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::activation::log_gate;
use fastweight_ops::delta::{delta_rule, delta_rule_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::delta_net::read_delta;
use super::{Layer, LayerConfig, matrix_size, sequence_options, zero_matrix};
use crate::context::{setting_error, validate_conv};
use crate::init::{placeholder, step_sizes};
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::{ConvState, LayerContext, MatrixState, MemoryError, RmsNorm, State, StateSize};

const NAME: &str = GatedDeltaNetConfig::NAME;

/// Configuration of [`GatedDeltaNet`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GatedDeltaNetConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Write strengths in (0, 2) instead of (0, 1): the state transition may have negative eigenvalues.
    pub allow_negative_eigenvalues: bool,
    /// Smallest initial step size, of the slowest head: at the start a head's state decays by `exp(-A dt)` a
    /// token, up to the input's part; A is spread over [1, 16).
    #[schemars(range(min = 1e-12, max = 1000))]
    pub dt_min: f64,
    /// Largest initial step size.
    #[schemars(range(min = 1e-12, max = 1000))]
    pub dt_max: f64,
}

impl Default for GatedDeltaNetConfig {
    fn default() -> Self {
        Self { conv_width: 4, allow_negative_eigenvalues: false, dt_min: 1e-3, dt_max: 0.1 }
    }
}

/// The gated delta network (Yang et al. 2024, 2412.06464).
///
/// As [`DeltaNet`](super::DeltaNet), with the state first multiplied by `exp(g_t)`,
/// `g = -exp(a_log) softplus(W_a x + dt_bias)`, and each head's normalised reading gated by `silu(W_g x)`.
#[derive(Module, Debug)]
pub struct GatedDeltaNet {
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
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: GatedDeltaNetConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl GatedDeltaNetConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for GatedDeltaNetConfig {
    const NAME: &'static str = "gated_delta_net";
    type Layer = GatedDeltaNet;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        validate_conv(NAME, self.conv_width)?;
        for (setting, dt) in [("dt_min", self.dt_min), ("dt_max", self.dt_max)] {
            if !(1e-12..=1e3).contains(&dt) {
                return Err(setting_error(NAME, setting, dt, "a step size in [1e-12, 1000], such as 0.001"));
            }
        }
        if self.dt_max < self.dt_min {
            let expected = format!("at least dt_min = {}", self.dt_min);
            return Err(setting_error(NAME, "dt_max", self.dt_max, expected));
        }
        Ok(())
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<GatedDeltaNet, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        Ok(GatedDeltaNet {
            q,
            k,
            v,
            beta: linear(ctx.width, ctx.heads, device),
            decay: linear(ctx.width, ctx.heads, device),
            dt_bias: step_sizes(ctx.heads, [self.dt_min, self.dt_max], device),
            a_log: placeholder([ctx.heads], device),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let gates = 2 * ctx.heads * (ctx.width + 1);
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + gates + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

impl Layer for GatedDeltaNet {
    type State = MatrixState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MatrixState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MatrixState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let (memory, conv) = state.map_or((None, None), MatrixState::into_parts);
        let (heads, beta, gate) = self.read(x.clone(), conv, offsets)?;
        let options = sequence_options(offsets, None);
        let (o, memory) = delta_rule(heads.q, heads.k, heads.v, beta, Some(gate), memory, &options)?;
        Ok((self.output(merge_heads(o), x)?, MatrixState { memory, conv: heads.conv }))
    }

    fn step(&self, x: Tensor<2>, state: MatrixState) -> Result<(Tensor<2>, MatrixState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let x = x.unsqueeze_dim::<3>(1);
        let (heads, beta, gate) = self.read(x.clone(), state.conv, None)?;
        let (q, k, v) = (token(heads.q), token(heads.k), token(heads.v));
        let (beta, gate) = (beta.squeeze_dim(1), gate.squeeze_dim(1));
        let (o, memory) = delta_rule_step(q, k, v, beta, Some(gate), state.memory, None)?;
        let y = self.output(merge_token(o), x)?.squeeze_dim(1);
        Ok((y, MatrixState { memory, conv: heads.conv }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MatrixState {
        zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device)
    }
}

impl GatedDeltaNet {
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Heads, Tensor<3>, Tensor<3>), MemoryError> {
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let gate = log_gate(self.decay.forward(x.clone()), self.a_log.val(), self.dt_bias.val())?;
        let negative = self.config.allow_negative_eigenvalues;
        let (heads, beta) = read_delta(qkv, &self.beta, negative, x, conv, offsets, self.ctx.heads)?;
        Ok((heads, beta, gate))
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
    }
}
