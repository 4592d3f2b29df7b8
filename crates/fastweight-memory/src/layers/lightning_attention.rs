//! Lightning Attention: linear attention whose fixed decay depends on the head and the layer.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::linear::{LinearGate, linear_attention, linear_attention_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, decay_tensor, matrix_size, sequence_options, zero_matrix};
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::{ConvState, LayerContext, MatrixState, MemoryError, RmsNorm, State, StateSize};

const NAME: &str = LightningAttentionConfig::NAME;

/// Configuration of [`LightningAttention`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LightningAttentionConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
}

/// Lightning Attention (MiniMax-01, 2501.08313): SiLU on q, k, v; `S_t = exp(g) S_{t-1} + k_t v_t^T` with a fixed
/// g; the readings of all heads together RMS-normalised and gated by `sigmoid(W_g x)`.
#[derive(Module, Debug)]
pub struct LightningAttention {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of all heads' readings together.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    decays: Vec<f32>,
    #[module(skip)]
    config: LightningAttentionConfig,
    #[module(skip)]
    ctx: LayerContext,
}

/// The log decay of each head, `-2^(-8h/H) (1 - l / (L - 1 + 1e-5) + 1e-5)`, h = 1..H, layer l of L.
pub(crate) fn log_decays(heads: usize, layer: usize, layers: usize) -> Vec<f32> {
    let depth = 1.0 - layer as f64 / (layers as f64 - 1.0 + 1e-5) + 1e-5;
    (1..=heads).map(|head| (-(2f64.powf(-8.0 * head as f64 / heads as f64)) * depth) as f32).collect()
}

impl LightningAttentionConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for LightningAttentionConfig {
    const NAME: &'static str = "lightning_attention";
    type Layer = LightningAttention;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<LightningAttention, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        Ok(LightningAttention {
            q,
            k,
            v,
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_width(), ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            decays: log_decays(ctx.heads, ctx.layer, ctx.layers),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        self.qkv(ctx).parameter_count() + ctx.value_width() * (1 + 2 * ctx.width)
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

impl Layer for LightningAttention {
    type State = MatrixState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MatrixState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MatrixState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let (memory, conv) = state.map_or((None, None), MatrixState::into_parts);
        let heads = self.read(x.clone(), conv, offsets)?;
        let gate = LinearGate::PerHead(decay_tensor(&self.decays, &x.device()));
        let options = sequence_options(offsets, None);
        let (o, memory) = linear_attention(heads.q, heads.k, heads.v, gate, memory, &options)?;
        Ok((self.output(merge_heads(o), x)?, MatrixState { memory, conv: heads.conv }))
    }

    fn step(&self, x: Tensor<2>, state: MatrixState) -> Result<(Tensor<2>, MatrixState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let batch = x.dims()[0];
        let x = x.unsqueeze_dim::<3>(1);
        let heads = self.read(x.clone(), state.conv, None)?;
        let decay = decay_tensor(&self.decays, &x.device()).unsqueeze_dim::<2>(0).repeat_dim(0, batch);
        let (q, k, v) = (token(heads.q), token(heads.k), token(heads.v));
        let (o, memory) = linear_attention_step(q, k, v, Some(decay), state.memory, None)?;
        let y = self.output(merge_token(o), x)?.squeeze_dim(1);
        Ok((y, MatrixState { memory, conv: heads.conv }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MatrixState {
        zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device)
    }
}

impl LightningAttention {
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<Heads, MemoryError> {
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        qkv.forward(x, conv, offsets, self.ctx.heads, self.ctx.heads)
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.forward(o)? * sigmoid(self.gate.forward(x))))
    }
}
