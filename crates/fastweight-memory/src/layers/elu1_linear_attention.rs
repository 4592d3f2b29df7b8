//! Normalised linear attention with the feature map ELU + 1.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::normalised_linear::{normalised_linear_attention, normalised_linear_attention_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, STATE_ELEMENT, matrix_size, sequence_options, zero_matrix};
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::state::rows;
use crate::{ConvState, LayerContext, MatrixState, MemoryError, NormalisedState, State, StateSize};

const NAME: &str = Elu1LinearAttentionConfig::NAME;

/// Configuration of [`Elu1LinearAttention`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Elu1LinearAttentionConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
}

/// Normalised linear attention (Katharopoulos et al. 2020),
/// `o_t = phi(q_t)^T S_t / (phi(q_t) . z_t + 1e-6)` with `phi = elu + 1`.
#[derive(Module, Debug)]
pub struct Elu1LinearAttention {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: Elu1LinearAttentionConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl Elu1LinearAttentionConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for Elu1LinearAttentionConfig {
    const NAME: &'static str = "elu1_linear_attention";
    type Layer = Elu1LinearAttention;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Elu1LinearAttention, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(false, device);
        let o = linear(ctx.value_width(), ctx.width, device);
        Ok(Elu1LinearAttention { q, k, v, o, config: self.clone(), ctx: ctx.clone() })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        self.qkv(ctx).parameter_count() + ctx.value_width() * ctx.width
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        let matrix = matrix_size(ctx, &self.qkv(ctx));
        StateSize { fixed: matrix.fixed + ctx.key_width() * STATE_ELEMENT, ..matrix }
    }
}

impl Layer for Elu1LinearAttention {
    type State = NormalisedState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<NormalisedState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, NormalisedState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let (initial, conv) = state
            .map_or((None, None), |state| (Some((state.matrix.memory, state.normaliser)), state.matrix.conv));
        let heads = self.read(x, conv, offsets)?;
        let options = sequence_options(offsets, None);
        let (o, memory, normaliser) =
            normalised_linear_attention(heads.q, heads.k, heads.v, None, initial, &options)?;
        let matrix = MatrixState { memory, conv: heads.conv };
        Ok((self.o.forward(merge_heads(o)), NormalisedState { matrix, normaliser }))
    }

    fn step(
        &self,
        x: Tensor<2>,
        state: NormalisedState,
    ) -> Result<(Tensor<2>, NormalisedState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let MatrixState { memory, conv } = state.matrix;
        let heads = self.read(x.unsqueeze_dim(1), conv, None)?;
        let (q, k, v) = (token(heads.q), token(heads.k), token(heads.v));
        let (o, memory, normaliser) =
            normalised_linear_attention_step(q, k, v, None, memory, state.normaliser)?;
        let y = self.o.forward(merge_token(o)).squeeze_dim(1);
        // The operator gives the normaliser as a view beside the output; a session must not keep both.
        let normaliser = rows::own(&normaliser);
        Ok((y, NormalisedState { matrix: MatrixState { memory, conv: heads.conv }, normaliser }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> NormalisedState {
        let matrix = zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device);
        let normaliser = Tensor::zeros([batch, self.ctx.heads, self.ctx.head_dim], device);
        NormalisedState { matrix, normaliser }
    }
}

impl Elu1LinearAttention {
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<Heads, MemoryError> {
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        qkv.forward(x, conv, offsets, self.ctx.heads, self.ctx.heads)
    }
}
