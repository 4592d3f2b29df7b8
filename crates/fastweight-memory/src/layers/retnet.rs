//! RetNet: linear attention with a fixed decay per head and rotary positions.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::linear::{LinearGate, linear_attention, linear_attention_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Layer, LayerConfig, advance, decay_tensor, matrix_size, rotate_pair, sequence_options, zero_matrix,
};
use crate::context::validate_conv;
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::{ConvState, LayerContext, MatrixState, MemoryError, RmsNorm, RotaryState, State, StateSize};

const NAME: &str = RetNetConfig::NAME;

/// Configuration of [`RetNet`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RetNetConfig {
    /// Rotary positions on queries and keys.
    pub rope: bool,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
}

impl Default for RetNetConfig {
    fn default() -> Self {
        Self { rope: true, rope_base: 10_000.0, conv_width: 0 }
    }
}

/// Retention (Sun et al. 2023, 2307.08621): `S_t = (1 - 2^(-5-h)) S_{t-1} + k_t v_t^T` for head h = 0, 1, ...
///
/// Each head's reading is RMS-normalised, as in the authors' code, and gated by `silu(W_g x)`.
#[derive(Module, Debug)]
pub struct RetNet {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    decays: Vec<f32>,
    #[module(skip)]
    config: RetNetConfig,
    #[module(skip)]
    ctx: LayerContext,
}

/// The log decay of each head, `ln(1 - 2^(-5-h))`, h = 0, 1, ...
pub(crate) fn log_decays(heads: usize) -> Vec<f32> {
    (0..heads).map(|head| (-(2f64.powi(-5 - head as i32))).ln_1p() as f32).collect()
}

impl RetNetConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for RetNetConfig {
    const NAME: &'static str = "retnet";
    type Layer = RetNet;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        if self.rope {
            ctx.validate_rotary(NAME, self.rope_base)?
        } else {
            ctx.validate(NAME)?
        }
        validate_conv(NAME, self.conv_width)
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<RetNet, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(false, device);
        Ok(RetNet {
            q,
            k,
            v,
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            decays: log_decays(ctx.heads),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        self.qkv(ctx).parameter_count() + ctx.value_dim + 2 * ctx.value_width() * ctx.width
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

impl Layer for RetNet {
    type State = RotaryState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<RotaryState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, RotaryState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let [batch, time, _] = x.dims();
        let sequences = offsets.map_or(batch, Offsets::documents);
        let (matrix, positions) = match state {
            Some(state) => (Some(state.matrix), state.positions),
            None => (None, vec![0; sequences]),
        };
        let (memory, conv) = matrix.map_or((None, None), MatrixState::into_parts);
        let heads = self.read(x.clone(), conv, offsets, &positions)?;
        let gate = LinearGate::PerHead(decay_tensor(&self.decays, &x.device()));
        let options = sequence_options(offsets, None);
        let (o, memory) = linear_attention(heads.q, heads.k, heads.v, gate, memory, &options)?;
        let y = self.output(merge_heads(o), x)?;
        let matrix = MatrixState { memory, conv: heads.conv };
        Ok((y, RotaryState { matrix, positions: advance(positions, time, offsets) }))
    }

    fn step(&self, x: Tensor<2>, state: RotaryState) -> Result<(Tensor<2>, RotaryState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let batch = x.dims()[0];
        let x = x.unsqueeze_dim::<3>(1);
        let MatrixState { memory, conv } = state.matrix;
        let heads = self.read(x.clone(), conv, None, &state.positions)?;
        let decay = decay_tensor(&self.decays, &x.device()).unsqueeze_dim::<2>(0).repeat_dim(0, batch);
        let (q, k, v) = (token(heads.q), token(heads.k), token(heads.v));
        let (o, memory) = linear_attention_step(q, k, v, Some(decay), memory, None)?;
        let y = self.output(merge_token(o), x)?.squeeze_dim(1);
        let matrix = MatrixState { memory, conv: heads.conv };
        Ok((y, RotaryState { matrix, positions: advance(state.positions, 1, None) }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> RotaryState {
        let matrix = zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device);
        RotaryState { matrix, positions: vec![0; batch] }
    }
}

impl RetNet {
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
        positions: &[usize],
    ) -> Result<Heads, MemoryError> {
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let mut heads = qkv.forward(x, conv, offsets, self.ctx.heads, self.ctx.heads)?;
        if self.config.rope {
            (heads.q, heads.k) = rotate_pair(heads.q, heads.k, positions, offsets, self.config.rope_base)?;
        }
        Ok(heads)
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
    }
}
