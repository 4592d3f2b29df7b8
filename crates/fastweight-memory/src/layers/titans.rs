//! Titans with a matrix memory: writes gather momentum, and the memory forgets.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::titans::{titans_memory, titans_memory_step};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::deep::validate_shift;
use super::{Layer, LayerConfig, STATE_ELEMENT, matrix_size, sequence_options, zero_matrix};
use crate::context::{validate_conv, validate_rate};
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token, token,
};
use crate::{ConvState, LayerContext, MatrixState, MemoryError, MomentumState, RmsNorm, State, StateSize};

const NAME: &str = TitansConfig::NAME;

/// Factor on the reading.
const SCALE: Option<f32> = Some(1.0);

/// Configuration of [`Titans`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TitansConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    pub conv_width: usize,
    /// Largest rate of a write, above 0.
    pub theta_max: f32,
    /// Taken from the forgetting before its sigmoid: the memory begins by forgetting about `e^-shift` a token.
    pub forget_shift: f32,
}

impl Default for TitansConfig {
    fn default() -> Self {
        Self { conv_width: 4, theta_max: 1.0, forget_shift: 4.0 }
    }
}

/// The long-term memory of Titans (Behrouz et al. 2025, 2501.00663) with a matrix for a memory.
///
/// Short convolution and SiLU on q, k, v; unit q and k; `theta = theta_max sigmoid(W x)` (rate),
/// `eta = sigmoid(W x)` (momentum), `alpha = sigmoid(W x - forget_shift)` (forgetting), one a head;
/// `P_t = eta_t P_{t-1} - theta_t k_t (S_{t-1}^T k_t - v_t)^T`, `S_t = (1 - alpha_t) S_{t-1} + P_t`, `o_t = S_t^T q_t`; each
/// head's normalised reading is gated by `silu(W_g x)`. The paper leaves the maps of the three gates open.
#[derive(Module, Debug)]
pub struct Titans {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Rate before the sigmoid, one a head.
    pub theta: Linear,
    /// Momentum before the sigmoid, one a head.
    pub eta: Linear,
    /// Forgetting before the sigmoid, one a head.
    pub alpha: Linear,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: TitansConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl TitansConfig {
    /// [`LayerConfig::validate`], for a memory inside a layer of another name.
    pub(super) fn validate_inside(&self, layer: &'static str, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(layer)?;
        validate_shift(layer, self.forget_shift)?;
        validate_conv(layer, self.conv_width)?;
        validate_rate(layer, "theta_max", self.theta_max, "1")
    }

    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }
}

impl LayerConfig for TitansConfig {
    const NAME: &'static str = "titans";
    type Layer = Titans;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        self.validate_inside(NAME, ctx)
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Titans, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        let per_head = || linear(ctx.width, ctx.heads, device);
        Ok(Titans {
            q,
            k,
            v,
            theta: per_head(),
            eta: per_head(),
            alpha: per_head(),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + 3 * ctx.heads * ctx.width + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        let matrix = matrix_size(ctx, &self.qkv(ctx));
        let momentum = ctx.heads * ctx.head_dim * ctx.value_dim * STATE_ELEMENT;
        StateSize { fixed: matrix.fixed + momentum, ..matrix }
    }
}

/// The three gates, `[B, T, H]` each.
struct Gates {
    theta: Tensor<3>,
    eta: Tensor<3>,
    alpha: Tensor<3>,
}

impl Layer for Titans {
    type State = MomentumState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MomentumState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MomentumState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let (initial, conv) = state
            .map_or((None, None), |state| (Some((state.matrix.memory, state.momentum)), state.matrix.conv));
        let (Heads { q, k, v, conv }, Gates { theta, eta, alpha }) = self.read(x.clone(), conv, offsets)?;
        let options = sequence_options(offsets, SCALE);
        let (o, memory, momentum) = titans_memory(q, k, v, theta, eta, alpha, initial, &options)?;
        let y = self.output(merge_heads(o), x)?;
        Ok((y, MomentumState { matrix: MatrixState { memory, conv }, momentum }))
    }

    fn step(&self, x: Tensor<2>, state: MomentumState) -> Result<(Tensor<2>, MomentumState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let x = x.unsqueeze_dim::<3>(1);
        let MomentumState { matrix: MatrixState { memory, conv }, momentum } = state;
        let (Heads { q, k, v, conv }, Gates { theta, eta, alpha }) = self.read(x.clone(), conv, None)?;
        let [q, k, v] = [q, k, v].map(token);
        let [theta, eta, alpha] = [theta, eta, alpha].map(|gate| gate.squeeze_dim(1));
        let (o, memory, momentum) =
            titans_memory_step(q, k, v, theta, eta, alpha, (memory, momentum), SCALE)?;
        let y = self.output(merge_token(o), x)?.squeeze_dim(1);
        Ok((y, MomentumState { matrix: MatrixState { memory, conv }, momentum }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MomentumState {
        let matrix = zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device);
        let momentum = Tensor::zeros(matrix.memory.dims(), device);
        MomentumState { matrix, momentum }
    }
}

/// What each token did to a [`Titans`] memory, `[B, T, H]` each.
#[derive(Debug, Clone)]
pub struct Surprise {
    /// Norm of the inner gradient `k (S^T k - v)^T` at the token.
    pub gradient: Tensor<3>,
    /// Rate of the write.
    pub theta: Tensor<3>,
    /// Momentum.
    pub eta: Tensor<3>,
    /// Forgetting.
    pub alpha: Tensor<3>,
}

impl Titans {
    /// Reads `x [B, T, width]` from an empty memory, token by token, and measures every write.
    ///
    /// # Errors
    /// An input that does not fit.
    pub fn surprise(&self, x: Tensor<3>) -> Result<Surprise, MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, None, None)?;
        let [batch, time, _] = x.dims();
        let MomentumState { matrix, momentum } = self.zero_state(batch, &x.device());
        let (mut memory, mut momentum) = (matrix.memory, momentum);
        let (Heads { q, k, v, .. }, gates) = self.read(x, None, None)?;
        let mut norms = Vec::with_capacity(time);
        for t in 0..time {
            let [q, k, v] = [&q, &k, &v].map(|x| token(x.clone().narrow(1, t, 1)));
            let [theta, eta, alpha] = [&gates.theta, &gates.eta, &gates.alpha]
                .map(|gate| gate.clone().narrow(1, t, 1).squeeze_dim(1));
            let read = (memory.clone() * k.clone().unsqueeze_dim(3)).sum_dim(2).squeeze_dim::<3>(2);
            let norm = |x: Tensor<3>| x.square().sum_dim(2).sqrt();
            norms.push((norm(k.clone()) * norm(read - v.clone())).swap_dims(1, 2));
            (_, memory, momentum) =
                titans_memory_step(q, k, v, theta, eta, alpha, (memory, momentum), SCALE)?;
        }
        let Gates { theta, eta, alpha } = gates;
        Ok(Surprise { gradient: Tensor::cat(norms, 1), theta, eta, alpha })
    }

    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Heads, Gates), MemoryError> {
        let theta = sigmoid(self.theta.forward(x.clone())) * self.config.theta_max;
        let eta = sigmoid(self.eta.forward(x.clone()));
        let alpha = sigmoid(self.alpha.forward(x.clone()) - self.config.forget_shift);
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        Ok((qkv.unit(x, conv, offsets, self.ctx.heads, self.ctx.heads)?, Gates { theta, eta, alpha }))
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
    }
}
