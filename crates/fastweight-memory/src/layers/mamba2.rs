//! Mamba-2-style linear attention: a scalar decay per head and token, tied to the write's strength.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::{silu, softplus};
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::linear::{LinearGate, linear_attention, linear_attention_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, matrix_size, sequence_options, zero_matrix};
use crate::init::placeholder;
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::{ConvState, LayerContext, MatrixState, MemoryError, RmsNorm, State, StateSize};

const NAME: &str = Mamba2Config::NAME;

/// Configuration of [`Mamba2`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Mamba2Config {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
}

impl Default for Mamba2Config {
    fn default() -> Self {
        Self { conv_width: 4 }
    }
}

/// Scalar-gated linear attention after Mamba-2 (Dao and Gu 2024, 2405.21060).
///
/// `D = softplus(W x + dt_bias)`, `g = -exp(a_log) D`, `S_t = exp(g_t) S_{t-1} + D_t k_t v_t^T`,
/// `o_t = S_t^T q_t + d_skip v_t`; the readings of all heads together are gated by `silu(W_g x)`, then
/// RMS-normalised. Every head has its own q and k (Mamba-2 shares C and B between heads).
#[derive(Module, Debug)]
pub struct Mamba2 {
    /// Queries (C of Mamba-2).
    pub q: Projection,
    /// Keys (B of Mamba-2).
    pub k: Projection,
    /// Values (x of Mamba-2).
    pub v: Projection,
    /// Step size before its bias, one a head.
    pub dt: Linear,
    /// Bias of the step size, `[H]`.
    pub dt_bias: Param<Tensor<1>>,
    /// Logarithm of the decay rate, `[H]`.
    pub a_log: Param<Tensor<1>>,
    /// Weight of the value in the output, `[H]`.
    pub d_skip: Param<Tensor<1>>,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of all heads' gated readings together.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: Mamba2Config,
    #[module(skip)]
    ctx: LayerContext,
}

impl Mamba2Config {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for Mamba2Config {
    const NAME: &'static str = "mamba2";
    type Layer = Mamba2;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Mamba2, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        Ok(Mamba2 {
            q,
            k,
            v,
            dt: linear(ctx.width, ctx.heads, device),
            dt_bias: placeholder([ctx.heads], device),
            a_log: placeholder([ctx.heads], device),
            d_skip: placeholder([ctx.heads], device),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_width(), ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let gates = ctx.heads * (ctx.width + 3);
        self.qkv(ctx).parameter_count() + gates + ctx.value_width() * (1 + 2 * ctx.width)
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

impl Layer for Mamba2 {
    type State = MatrixState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MatrixState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MatrixState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let (memory, conv) = state.map_or((None, None), MatrixState::into_parts);
        let (heads, gate) = self.read(x.clone(), conv, offsets)?;
        let options = sequence_options(offsets, Some(1.0));
        let gate = LinearGate::PerToken(gate);
        let (o, memory) = linear_attention(heads.q, heads.k, heads.v.clone(), gate, memory, &options)?;
        let y = self.output(merge_heads(o + self.skip(heads.v)), x)?;
        Ok((y, MatrixState { memory, conv: heads.conv }))
    }

    fn step(&self, x: Tensor<2>, state: MatrixState) -> Result<(Tensor<2>, MatrixState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let x = x.unsqueeze_dim::<3>(1);
        let (heads, gate) = self.read(x.clone(), state.conv, None)?;
        let skip = self.skip(heads.v.clone());
        let (q, k, v) = (token(heads.q), token(heads.k), token(heads.v));
        let (o, memory) = linear_attention_step(q, k, v, Some(gate.squeeze_dim(1)), state.memory, Some(1.0))?;
        let y = self.output(merge_token(o) + merge_heads(skip), x)?.squeeze_dim(1);
        Ok((y, MatrixState { memory, conv: heads.conv }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MatrixState {
        zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device)
    }
}

impl Mamba2 {
    /// Queries, keys scaled by the step size, values; and the log decay `[B, T, H]`.
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Heads, Tensor<3>), MemoryError> {
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let mut heads = qkv.forward(x.clone(), conv, offsets, self.ctx.heads, self.ctx.heads)?;
        let per_head = |param: &Param<Tensor<1>>| param.val().reshape([1, 1, self.ctx.heads]);
        let dt = softplus(self.dt.forward(x) + per_head(&self.dt_bias), 1.0);
        heads.k = heads.k * dt.clone().unsqueeze_dim(3);
        Ok((heads, per_head(&self.a_log).exp().neg() * dt))
    }

    /// `d_skip v`, `[B, T, H, V]`.
    fn skip(&self, v: Tensor<4>) -> Tensor<4> {
        v * self.d_skip.val().reshape([1, 1, self.ctx.heads, 1])
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.forward(o * silu(self.gate.forward(x)))?))
    }
}
