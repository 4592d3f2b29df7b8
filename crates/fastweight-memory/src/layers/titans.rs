//! Titans with a matrix memory: writes gather momentum, and the memory forgets.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::titans::{
    titans_memory, titans_memory_channelwise, titans_memory_channelwise_step, titans_memory_step,
};
use fastweight_ops::{Offsets, OpError, SequenceOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::deep::validate_shift;
use super::{Layer, LayerConfig, STATE_ELEMENT, matrix_size, sequence_options, zero_matrix};
use crate::context::{validate_conv, validate_rate};
use crate::projection::{
    Heads, Projection, Qkv, QkvSizes, check_sequence, check_token, linear, merge_heads, merge_token,
    split_heads, token,
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
    /// Rate, momentum and forgetting are numbers for each output of the memory, a value channel, instead of a head.
    pub channel_gates: bool,
}

impl Default for TitansConfig {
    fn default() -> Self {
        Self { conv_width: 4, theta_max: 1.0, forget_shift: 4.0, channel_gates: false }
    }
}

/// The long-term memory of Titans (Behrouz et al. 2025, 2501.00663) with a matrix for a memory.
///
/// Short convolution and SiLU on q, k, v; unit q and k; `theta = theta_max sigmoid(W x)` (rate),
/// `eta = sigmoid(W x)` (momentum), `alpha = sigmoid(W x - forget_shift)` (forgetting), one a head;
/// `P_t = eta_t P_{t-1} - theta_t k_t (S_{t-1}^T k_t - v_t)^T`, `S_t = (1 - alpha_t) S_{t-1} + P_t`, `o_t = S_t^T q_t`; each
/// head's normalised reading is gated by `silu(W_g x)`. The paper leaves the maps of the three gates open. With
/// `channel_gates` every value channel of a head has its own three: column j of `S` and `P` learns, remembers and forgets by
/// `theta_t[j]`, `eta_t[j]` and `alpha_t[j]`.
#[derive(Module, Debug)]
pub struct Titans {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Rate before the sigmoid, one a head or a value channel.
    pub theta: Linear,
    /// Momentum before the sigmoid, one a head or a value channel.
    pub eta: Linear,
    /// Forgetting before the sigmoid, one a head or a value channel.
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

    /// Numbers of each gate.
    fn gates(&self, ctx: &LayerContext) -> usize {
        if self.channel_gates { ctx.value_width() } else { ctx.heads }
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
        let gate = || linear(ctx.width, self.gates(ctx), device);
        Ok(Titans {
            q,
            k,
            v,
            theta: gate(),
            eta: gate(),
            alpha: gate(),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + 3 * self.gates(ctx) * ctx.width + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        let matrix = matrix_size(ctx, &self.qkv(ctx));
        let momentum = ctx.heads * ctx.head_dim * ctx.value_dim * STATE_ELEMENT;
        StateSize { fixed: matrix.fixed + momentum, ..matrix }
    }
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
        let (Heads { q, k, v, conv }, gates) = self.read(x.clone(), conv, offsets)?;
        let (o, memory, momentum) =
            self.write([q, k, v], gates, initial, &sequence_options(offsets, SCALE))?;
        let y = self.output(merge_heads(o), x)?;
        Ok((y, MomentumState { matrix: MatrixState { memory, conv }, momentum }))
    }

    fn step(&self, x: Tensor<2>, state: MomentumState) -> Result<(Tensor<2>, MomentumState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let x = x.unsqueeze_dim::<3>(1);
        let MomentumState { matrix: MatrixState { memory, conv }, momentum } = state;
        let (Heads { q, k, v, conv }, gates) = self.read(x.clone(), conv, None)?;
        let (o, memory, momentum) = self.write_token([q, k, v].map(token), gates, (memory, momentum))?;
        let y = self.output(merge_token(o), x)?.squeeze_dim(1);
        Ok((y, MomentumState { matrix: MatrixState { memory, conv }, momentum }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MomentumState {
        let matrix = zero_matrix(&self.ctx, &self.config.qkv(&self.ctx), batch, device);
        let momentum = Tensor::zeros(matrix.memory.dims(), device);
        MomentumState { matrix, momentum }
    }
}

/// What each token did to a [`Titans`] memory, `[B, T, H]` each; with `channel_gates` the gates are means over the channels
/// of a head.
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
            let read = (memory.clone() * k.clone().unsqueeze_dim(3)).sum_dim(2).squeeze_dim::<3>(2);
            let norm = |x: Tensor<3>| x.square().sum_dim(2).sqrt();
            norms.push((norm(k.clone()) * norm(read - v.clone())).swap_dims(1, 2));
            let gates = gates.each_ref().map(|x| x.clone().narrow(1, t, 1));
            (_, memory, momentum) = self.write_token([q, k, v], gates, (memory, momentum))?;
        }
        let heads = self.ctx.heads;
        let [theta, eta, alpha] = gates.map(|x| split_heads(x, heads).mean_dim(3).squeeze_dim(3));
        Ok(Surprise { gradient: Tensor::cat(norms, 1), theta, eta, alpha })
    }

    /// Theta, eta and alpha as [`read`](Self::read) gives them; outputs, memory, momentum.
    fn write(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        gates: [Tensor<3>; 3],
        initial: Option<(Tensor<4>, Tensor<4>)>,
        options: &SequenceOptions,
    ) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>), OpError> {
        if self.config.channel_gates {
            let [theta, eta, alpha] = gates.map(|x| split_heads(x, self.ctx.heads));
            return titans_memory_channelwise(q, k, v, theta, eta, alpha, initial, options);
        }
        let [theta, eta, alpha] = gates;
        titans_memory(q, k, v, theta, eta, alpha, initial, options)
    }

    /// [`write`](Self::write) for one token, whose gates are `[B, 1, ..]`.
    fn write_token(
        &self,
        [q, k, v]: [Tensor<3>; 3],
        gates: [Tensor<3>; 3],
        state: (Tensor<4>, Tensor<4>),
    ) -> Result<(Tensor<3>, Tensor<4>, Tensor<4>), OpError> {
        if self.config.channel_gates {
            let [theta, eta, alpha] = gates.map(|x| token(split_heads(x, self.ctx.heads)));
            return titans_memory_channelwise_step(q, k, v, theta, eta, alpha, state, SCALE);
        }
        let [theta, eta, alpha] = gates.map(|x| x.squeeze_dim(1));
        titans_memory_step(q, k, v, theta, eta, alpha, state, SCALE)
    }

    /// What goes to the memory, and theta, eta and alpha, `[B, T, H]` or with channels `[B, T, H V]`.
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Heads, [Tensor<3>; 3]), MemoryError> {
        let theta = sigmoid(self.theta.forward(x.clone())) * self.config.theta_max;
        let eta = sigmoid(self.eta.forward(x.clone()));
        let alpha = sigmoid(self.alpha.forward(x.clone()) - self.config.forget_shift);
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        Ok((qkv.unit(x, conv, offsets, self.ctx.heads, self.ctx.heads)?, [theta, eta, alpha]))
    }

    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
    }
}
