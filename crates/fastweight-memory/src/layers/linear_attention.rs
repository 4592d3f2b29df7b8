//! Linear attention: a matrix memory that adds every key-value pair and forgets nothing.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::linear::{LinearGate, linear_attention, linear_attention_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, matrix_size, sequence_options, zero_matrix};
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::{ConvState, LayerContext, MatrixState, MemoryError, RmsNorm, State, StateSize};

const NAME: &str = LinearAttentionConfig::NAME;

/// Configuration of [`LinearAttention`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LinearAttentionConfig {
    /// RMS normalisation of each head's reading; without it readings grow with the number of tokens.
    pub output_norm: bool,
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
}

impl Default for LinearAttentionConfig {
    fn default() -> Self {
        Self { output_norm: true, conv_width: 0 }
    }
}

/// Linear attention without normaliser (the Hebbian rule), `S_t = S_{t-1} + k_t v_t^T`, `o_t = S_t^T q_t / sqrt K`.
#[derive(Module, Debug)]
pub struct LinearAttention {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Normalisation of each head's reading, if any.
    pub norm: Option<RmsNorm>,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: LinearAttentionConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl LinearAttentionConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for LinearAttentionConfig {
    const NAME: &'static str = "linear_attention";
    type Layer = LinearAttention;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<LinearAttention, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(false, device);
        let norm = self.output_norm.then(|| RmsNorm::new(ctx.value_dim, ctx.norm_eps, device));
        let o = linear(ctx.value_width(), ctx.width, device);
        Ok(LinearAttention { q, k, v, norm, o, config: self.clone(), ctx: ctx.clone() })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let norm = if self.output_norm { ctx.value_dim } else { 0 };
        self.qkv(ctx).parameter_count() + norm + ctx.value_width() * ctx.width
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

impl Layer for LinearAttention {
    type State = MatrixState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MatrixState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MatrixState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let (memory, conv) = state.map_or((None, None), MatrixState::into_parts);
        let heads = self.read(x, conv, offsets)?;
        let options = sequence_options(offsets, None);
        let (o, memory) = linear_attention(heads.q, heads.k, heads.v, LinearGate::None, memory, &options)?;
        Ok((self.output(merge_heads(o))?, MatrixState { memory, conv: heads.conv }))
    }

    fn step(&self, x: Tensor<2>, state: MatrixState) -> Result<(Tensor<2>, MatrixState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let heads = self.read(x.unsqueeze_dim(1), state.conv, None)?;
        let (q, k, v) = (token(heads.q), token(heads.k), token(heads.v));
        let (o, memory) = linear_attention_step(q, k, v, None, state.memory, None)?;
        let y = self.output(merge_token(o))?.squeeze_dim(1);
        Ok((y, MatrixState { memory, conv: heads.conv }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MatrixState {
        zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device)
    }
}

impl LinearAttention {
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<Heads, MemoryError> {
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        qkv.forward(x, conv, offsets, self.ctx.heads, self.ctx.heads)
    }

    fn output(&self, o: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        let o = match &self.norm {
            Some(norm) => norm.heads(o, None)?,
            None => o,
        };
        Ok(self.o.forward(o))
    }
}
