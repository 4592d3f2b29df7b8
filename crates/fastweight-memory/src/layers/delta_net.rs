//! DeltaNet: a matrix memory that corrects what a key reads before it writes.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::delta::{delta_rule, delta_rule_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, matrix_size, sequence_options, zero_matrix};
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::{ConvState, LayerContext, MatrixState, MemoryError, RmsNorm, State, StateSize};

const NAME: &str = DeltaNetConfig::NAME;

/// Configuration of [`DeltaNet`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DeltaNetConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Write strengths in (0, 2) instead of (0, 1): the state transition may have negative eigenvalues.
    pub allow_negative_eigenvalues: bool,
}

impl Default for DeltaNetConfig {
    fn default() -> Self {
        Self { conv_width: 4, allow_negative_eigenvalues: false }
    }
}

/// The delta network (Yang et al. 2024, 2406.06484).
///
/// Short convolution and SiLU on q, k, v; unit q and k; `beta = sigmoid(W_b x)`;
/// `S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T`; each head's reading RMS-normalised.
#[derive(Module, Debug)]
pub struct DeltaNet {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Write strength before the sigmoid, one a head.
    pub beta: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: DeltaNetConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl DeltaNetConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for DeltaNetConfig {
    const NAME: &'static str = "delta_net";
    type Layer = DeltaNet;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<DeltaNet, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        Ok(DeltaNet {
            q,
            k,
            v,
            beta: linear(ctx.width, ctx.heads, device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let rest = ctx.width * ctx.heads + ctx.value_dim + ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + rest
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        matrix_size(ctx, &self.qkv(ctx))
    }
}

/// Unit keys and queries, values, and the write strength `[B, T, H]`.
pub(super) fn read_delta(
    qkv: Qkv<'_>,
    beta: &Linear,
    negative_eigenvalues: bool,
    x: Tensor<3>,
    conv: Option<ConvState>,
    offsets: Option<&Offsets>,
    count: usize,
) -> Result<(Heads, Tensor<3>), MemoryError> {
    let heads = qkv.unit(x.clone(), conv, offsets, count, count)?;
    let beta = sigmoid(beta.forward(x));
    Ok((heads, if negative_eigenvalues { beta * 2.0 } else { beta }))
}

impl Layer for DeltaNet {
    type State = MatrixState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MatrixState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MatrixState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let (memory, conv) = state.map_or((None, None), MatrixState::into_parts);
        let (heads, beta) = self.read(x, conv, offsets)?;
        let options = sequence_options(offsets, None);
        let (o, memory) = delta_rule(heads.q, heads.k, heads.v, beta, None, memory, &options)?;
        Ok((self.output(merge_heads(o))?, MatrixState { memory, conv: heads.conv }))
    }

    fn step(&self, x: Tensor<2>, state: MatrixState) -> Result<(Tensor<2>, MatrixState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let (heads, beta) = self.read(x.unsqueeze_dim(1), state.conv, None)?;
        let (q, k, v) = (token(heads.q), token(heads.k), token(heads.v));
        let (o, memory) = delta_rule_step(q, k, v, beta.squeeze_dim(1), None, state.memory, None)?;
        let y = self.output(merge_token(o))?.squeeze_dim(1);
        Ok((y, MatrixState { memory, conv: heads.conv }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MatrixState {
        zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device)
    }
}

impl DeltaNet {
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Heads, Tensor<3>), MemoryError> {
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let negative = self.config.allow_negative_eigenvalues;
        read_delta(qkv, &self.beta, negative, x, conv, offsets, self.ctx.heads)
    }

    fn output(&self, o: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, None)?))
    }
}
