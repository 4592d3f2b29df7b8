//! Titans with a deep memory: writes gather momentum, and the memory forgets.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::deep_memory::{DeepMemory, DeepTokens};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LayerConfig;
use super::deep::{DeepOptions, FADING_NORM_EPS, InnerNetwork, deep_layer, gate, validate_shift};
use crate::projection::{Heads, Projection, Qkv, QkvSizes, linear};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, StateSize};

/// Configuration of [`TitansMlp`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TitansMlpConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    pub conv_width: usize,
    /// Largest rate of a write, above 0.
    pub theta_max: f32,
    /// Linear layers of the memory, 1 to 4.
    pub depth: usize,
    /// Hidden channels of the memory for each key channel.
    pub expansion: usize,
    /// Tokens between two points where gradients are taken.
    pub chunk: usize,
    /// Taken from the forgetting before its sigmoid: the memory begins by forgetting about `e^-shift` a token. Below about
    /// `ln(context)` gradients may overflow: forgetting that outruns the writes leaves the LayerNorm nothing to normalise.
    pub forget_shift: f32,
    /// Whether every output of the memory's weights has a rate, a momentum and a forgetting of its own, instead of every head.
    pub channel_gates: bool,
}

impl Default for TitansMlpConfig {
    fn default() -> Self {
        Self {
            conv_width: 4,
            theta_max: 0.1,
            depth: 2,
            expansion: 4,
            chunk: 16,
            forget_shift: 8.0,
            channel_gates: false,
        }
    }
}

/// The long-term memory of Titans (Behrouz et al. 2025, 2501.00663) with a network of 1 to 4 layers for a memory.
///
/// As [`Titans`](super::Titans), with the memory `M(x) = x + LN(f(x))` of each head, f of linear layers with GELU between, which
/// starts at trained weights: `P_t = eta_t P_{t-1} - theta_t grad 1/2 |M(k_t) - v_t|^2`, `W_t = (1 - alpha_t) W_{t-1} + P_t`,
/// `o_t = M_{W_t}(q_t)`, gradients at the chunk's start; `theta = theta_max sigmoid(W x)`, `eta = sigmoid(W x)`,
/// `alpha = sigmoid(W x - forget_shift)`, one a head. The paper leaves the maps of the gates open. A matrix
/// memory starts with a shift of 4; here the default is 8, because with 4 gradients grow with the length of the text (measured at initial
/// weights: 10^11 at 1,024 tokens with two layers, infinite with four, against 10^2 to 10^3 with 8 up to 4,096 tokens).
/// `value_dim` equals `head_dim`.
///
/// With [`channel_gates`](TitansMlpConfig::channel_gates) a gate has a number for each output of the memory's weights, `(depth - 1)
/// expansion head_dim + value_dim` a head: column j of a weight `[in, out]` has `theta_t[j]`, `eta_t[j]` and `alpha_t[j]`.
#[derive(Module, Debug)]
pub struct TitansMlp {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Rate before the sigmoid, one a head or, with channel gates, an output of the memory's weights.
    pub theta: Linear,
    /// Momentum before the sigmoid, as many.
    pub eta: Linear,
    /// Forgetting before the sigmoid, as many.
    pub alpha: Linear,
    /// The memory before the first token.
    pub memory: InnerNetwork,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: TitansMlpConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl TitansMlpConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }

    /// [`LayerConfig::validate`], for a memory inside a layer of another name.
    pub(super) fn validate_inside(&self, layer: &'static str, ctx: &LayerContext) -> Result<(), MemoryError> {
        validate_shift(layer, self.forget_shift)?;
        DeepOptions { layer, ..self.options() }.validate(ctx)
    }

    pub(crate) fn options(&self) -> DeepOptions {
        let Self { depth, expansion, chunk, .. } = *self;
        DeepOptions {
            layer: Self::NAME,
            conv_width: self.conv_width,
            memory: DeepMemory {
                depth,
                expansion,
                chunk,
                norm_eps: FADING_NORM_EPS,
                ..DeepMemory::default()
            },
            momentum: true,
            chunk: "chunk",
            rate: ("theta_max", self.theta_max),
            channel_gates: self.channel_gates,
        }
    }
}

impl LayerConfig for TitansMlpConfig {
    const NAME: &'static str = "titans_mlp";
    type Layer = TitansMlp;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        self.validate_inside(Self::NAME, ctx)
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<TitansMlp, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        let gate = || linear(ctx.width, self.options().gate_width(ctx), device);
        Ok(TitansMlp {
            q,
            k,
            v,
            theta: gate(),
            eta: gate(),
            alpha: gate(),
            memory: InnerNetwork::new(&self.options(), ctx, device),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        let inner = self.options().parameter_count(ctx);
        self.qkv(ctx).parameter_count() + 3 * self.options().gate_width(ctx) * ctx.width + inner + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        self.options().state_size(ctx, &self.qkv(ctx))
    }

    fn deep_training_bytes(&self, ctx: &LayerContext) -> Option<usize> {
        Some(self.options().training_bytes(ctx))
    }
}

impl TitansMlp {
    fn read_tokens(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(DeepTokens, Option<ConvState>), MemoryError> {
        let gate = |x: Tensor<3>| Some(gate(x, self.ctx.heads));
        let rate = gate(sigmoid(self.theta.forward(x.clone())) * self.config.theta_max);
        let momentum = gate(sigmoid(self.eta.forward(x.clone())));
        let decay = gate(sigmoid(self.alpha.forward(x.clone()) - self.config.forget_shift));
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let Heads { q, k, v, conv } = qkv.unit(x, conv, offsets, self.ctx.heads, self.ctx.heads)?;
        Ok((DeepTokens { q, k, v, rate, momentum, decay, threshold: None }, conv))
    }
}

deep_layer!(TitansMlp, TitansMlpConfig);
