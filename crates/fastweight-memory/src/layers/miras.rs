//! What the layers of Miras share: a memory whose every output learns and forgets at its own rate.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::{log_sigmoid, sigmoid};
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rule::start_state;
use super::{Layer, STATE_ELEMENT, step_as_sequence};
use crate::context::{MOST_HEAD_CHANNELS, setting_error, validate_conv, validate_rate};
use crate::init::placeholder;
use crate::projection::{
    Heads, LowRankLinear, Projection, Qkv, QkvSizes, check_sequence, linear, merge_heads, split_heads,
};
use crate::rule::{Bias, Memory, OutputTokens, Retention, Rule, RuleState, run_outputs};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, RuleMemoryState, State, StateSize};

/// What the log gates are divided by, so that they start near zero.
const GATE_DIVISOR: f64 = 16.0;
/// Added to the Huber threshold before its softplus, so that it starts at 1.
const THRESHOLD_SHIFT: f64 = 0.541_324_854_612_918_1;
/// Least Huber threshold.
const LEAST_THRESHOLD: f64 = 1e-6;

/// Options of the layers of Miras; in recipes they stand beside the layer's own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MirasOptions {
    /// The memory: `mlp`, `M(x) = x + W2^T silu(W1^T x)`, or `matrix`, `M(x) = S^T x`.
    #[schemars(extend("enum" = ["mlp", "matrix"]))]
    pub memory: Memory,
    /// Hidden channels of the MLP for each key channel; left out with a matrix.
    #[schemars(range(min = 1, max = crate::rule::MOST_EXPANSION))]
    pub expansion: usize,
    /// Tokens whose gradients are taken at one memory.
    #[schemars(range(min = 1, max = crate::rule::MOST_CHUNK))]
    pub chunk: usize,
    /// Channels that the projections of the gates pass through; no more than the layer's width.
    #[schemars(range(min = 1, max = MOST_HEAD_CHANNELS))]
    pub rank: usize,
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Largest rate of a write. When absent `2 / chunk`, with which a chunk of one unit key again and again does not
    /// overshoot, but at most 1 for a matrix and 0.1 for an MLP; a tenth of that for the `l_p` loss, and `K / 4` times that for
    /// KL retention, whose steps go to the logarithms of weights near `1 / K`.
    #[schemars(range(max = crate::context::MOST_RATE), extend("exclusiveMinimum" = 0))]
    pub rate_max: Option<f64>,
}

impl Default for MirasOptions {
    fn default() -> Self {
        Self { memory: Memory::Mlp, expansion: 4, chunk: 16, rank: 32, conv_width: 4, rate_max: None }
    }
}

/// A layer of Miras: its name, its options and the rule that its memory follows.
#[derive(Debug, Clone)]
pub(super) struct Miras<'a> {
    pub name: &'static str,
    pub options: &'a MirasOptions,
    pub rule: Rule,
}

impl Miras<'_> {
    pub(super) fn validate_sizes(&self) -> Result<(), MemoryError> {
        let rank = self.options.rank;
        if rank == 0 || rank > MOST_HEAD_CHANNELS {
            let expected = format!("at least 1 (32 is usual) and at most {MOST_HEAD_CHANNELS}");
            return Err(setting_error(self.name, "rank", rank, expected));
        }
        if self.options.memory == Memory::Vector {
            return Err(setting_error(self.name, "memory", "vector", "\"mlp\" or \"matrix\""));
        }
        self.rule.validate().and_then(|()| self.rule.validate_used()).map_err(|error| match error {
            MemoryError::Setting { setting, found, expected, .. } => {
                MemoryError::Setting { layer: self.name, setting, found, expected }
            }
            other => other,
        })
    }

    pub(super) fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        self.validate_sizes()?;
        ctx.validate(self.name)?;
        validate_conv(self.name, self.options.conv_width)?;
        if self.rule.memory == Memory::Mlp && ctx.value_dim != ctx.head_dim {
            let expected = format!("head_dim = {}: an MLP memory maps keys to as many values", ctx.head_dim);
            return Err(setting_error(self.name, "value_dim", ctx.value_dim, expected));
        }
        self.options.rate_max.map_or(Ok(()), |rate| validate_rate(self.name, "rate_max", rate, "0.1"))
    }

    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.options.conv_width)
    }

    fn shapes(&self, ctx: &LayerContext) -> Vec<[usize; 2]> {
        self.rule.layer_shapes(ctx.head_dim, ctx.value_dim)
    }

    fn rank(&self, ctx: &LayerContext) -> usize {
        self.options.rank.min(ctx.width)
    }

    fn has_threshold(&self) -> bool {
        self.rule.bias == Bias::Huber
    }

    fn rate_max(&self, ctx: &LayerContext) -> f64 {
        let most: f64 = if self.rule.memory == Memory::Mlp { 0.1 } else { 1.0 };
        let most = most.min(2.0 / self.rule.chunk as f64);
        let most = if self.rule.bias == Bias::Lp { 0.1 * most } else { most };
        // Near equal weights a step in their logarithms moves a reading by 1/K of it.
        let kl = self.rule.retention == Retention::Kl;
        let most = if kl { most * (ctx.head_dim as f64 / 4.0).max(1.0) } else { most };
        self.options.rate_max.unwrap_or(most)
    }

    pub(super) fn build(&self, ctx: &LayerContext, device: &Device) -> Result<MirasMemory, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        let shapes = self.shapes(ctx);
        let rank = self.rank(ctx);
        let low_rank = |outputs: usize| LowRankLinear::new(ctx.width, rank, outputs, device);
        let gates = |[_, cols]: &[usize; 2]| OutputGates {
            rate: low_rank(ctx.heads * cols),
            decay: low_rank(ctx.heads * cols),
            decay_bias: placeholder([ctx.heads * cols], device),
        };
        let start = |[rows, cols]: &[usize; 2]| placeholder([ctx.heads, *rows, *cols], device);
        let mut starts = shapes.iter().filter(|_| self.rule.needs_start()).map(start);
        Ok(MirasMemory {
            q,
            k,
            v,
            gates_in: gates(&shapes[0]),
            gates_out: shapes.get(1).map(gates),
            threshold: self.has_threshold().then(|| low_rank(ctx.heads)),
            start_in: starts.next(),
            start_out: starts.next(),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            name: self.name,
            options: self.options.clone(),
            rule: self.rule,
            ctx: ctx.clone(),
        })
    }

    pub(super) fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let rank = self.rank(ctx);
        let low_rank = |outputs: usize| LowRankLinear::parameter_count(ctx.width, rank, outputs);
        let gates = |[_, cols]: &[usize; 2]| 2 * low_rank(ctx.heads * cols) + ctx.heads * cols;
        let shapes = self.shapes(ctx);
        let start = |[rows, cols]: &[usize; 2]| ctx.heads * rows * cols;
        let starts: usize = shapes.iter().filter(|_| self.rule.needs_start()).map(start).sum();
        let threshold = if self.has_threshold() { low_rank(ctx.heads) } else { 0 };
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        let gates: usize = shapes.iter().map(gates).sum();
        self.qkv(ctx).parameter_count() + gates + threshold + starts + output
    }

    pub(super) fn state_size(&self, ctx: &LayerContext) -> StateSize {
        let memory = ctx.heads * self.rule.state_elements(ctx.head_dim, ctx.value_dim);
        StateSize { fixed: (memory + self.qkv(ctx).conv_elements()) * STATE_ELEMENT, growing: 0 }
    }
}

/// The rate and the decay of every output of one weight of the memory.
#[derive(Module, Debug)]
pub struct OutputGates {
    /// Rate before the sigmoid, one an output.
    pub rate: LowRankLinear,
    /// Decay before its bias and sigmoid, one an output.
    pub decay: LowRankLinear,
    /// Bias of the decay, `[H * outputs]`.
    pub decay_bias: Param<Tensor<1>>,
}

/// A memory layer of Miras (Behrouz et al. 2025, 2504.13173, section 5.3): [`Moneta`](super::MonetaConfig),
/// [`Yaad`](super::YaadConfig) or [`Memora`](super::MemoraConfig), which differ in the rule of their memory.
///
/// Short convolution and SiLU on q, k, v; unit q and k; each head's reading RMS-normalised and gated by `silu(W_g x)`; no
/// momentum. Gradients are taken at the memory of the chunk's start.
///
/// The paper has channel-wise gates through projections of rank 32 and leaves open which channels of an MLP they belong
/// to. Here a channel is an output of a weight: column j of a weight `[inputs, outputs]` decays by `alpha_t[j]` and its gradient
/// is multiplied by `eta_t[j]`, so that an MLP has as many of both as hidden channels for its first weight and value channels for its
/// second (see [`run_outputs`] for why columns). `eta = rate_max sigmoid(W_2 W_1 x)`,
/// `alpha = sigmoid(W_2 W_1 x + decay_bias)^(1/16)`. The Huber threshold of Yaad bounds the length of a head's whole error and is one
/// number a head, `delta = softplus(W_2 W_1 x + 0.5413)`, 1 where the projection is zero. An MLP, and every memory under `l_q`
/// retention, starts at trained weights.
#[derive(Module, Debug)]
pub struct MirasMemory {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Gates of the first weight's outputs.
    pub gates_in: OutputGates,
    /// Gates of the second weight's, of an MLP.
    pub gates_out: Option<OutputGates>,
    /// Huber threshold before the softplus, one a head, of Yaad.
    pub threshold: Option<LowRankLinear>,
    /// Weights of the memory before the first token, `[H, rows, cols]`: the first layer's.
    pub start_in: Option<Param<Tensor<3>>>,
    /// The second layer's, of an MLP.
    pub start_out: Option<Param<Tensor<3>>>,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    name: &'static str,
    #[module(skip)]
    options: MirasOptions,
    #[module(skip)]
    rule: Rule,
    #[module(skip)]
    ctx: LayerContext,
}

impl Layer for MirasMemory {
    type State = RuleMemoryState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<RuleMemoryState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, RuleMemoryState), MemoryError> {
        check_sequence(self.name, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let sequences = offsets.map_or(x.dims()[0], Offsets::documents);
        let starts = [&self.start_in, &self.start_out];
        let start = start_state(&self.rule, starts, &self.ctx, sequences, &x.device())?;
        let (initial, conv) = match state {
            None => (start.clone(), None),
            Some(state) => (state.change.zip(&start, |change, start| change + start), state.conv),
        };
        let (tokens, conv) = self.read(x.clone(), conv, offsets)?;
        let (o, end) = run_outputs(&self.rule, tokens, initial, offsets)?;
        let change = end.zip(&start, |end, start| end - start);
        let y = self.norm.heads(merge_heads(o), Some(self.gate.forward(x)))?;
        Ok((self.o.forward(y), RuleMemoryState { change, conv }))
    }

    fn step(
        &self,
        x: Tensor<2>,
        state: RuleMemoryState,
    ) -> Result<(Tensor<2>, RuleMemoryState), MemoryError> {
        step_as_sequence(self, self.name, self.ctx.width, x, state)
    }

    fn zero_state(&self, batch: usize, device: &Device) -> RuleMemoryState {
        let (key, value) = (self.ctx.head_dim, self.ctx.value_dim);
        let change = RuleState::zeros(&self.rule, [batch, self.ctx.heads, key, value], device);
        RuleMemoryState { change, conv: self.miras().qkv(&self.ctx).zero_conv(batch, device) }
    }
}

impl MirasMemory {
    fn miras(&self) -> Miras<'_> {
        Miras { name: self.name, options: &self.options, rule: self.rule }
    }

    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(OutputTokens, Option<ConvState>), MemoryError> {
        let (heads, rate_max) = (self.ctx.heads, self.miras().rate_max(&self.ctx));
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let Heads { q, k, v, conv } = qkv.unit(x.clone(), conv, offsets, heads, heads)?;
        let (mut rates, mut gates) = (Vec::new(), Vec::new());
        for weight in [Some(&self.gates_in), self.gates_out.as_ref()].into_iter().flatten() {
            rates.push(split_heads(sigmoid(weight.rate.forward(x.clone())) * rate_max, heads));
            let decay = weight.decay.forward(x.clone()) + weight.decay_bias.val().unsqueeze::<3>();
            gates.push(split_heads(log_sigmoid(decay) / GATE_DIVISOR, heads));
        }
        // softplus(x) = -log sigmoid(-x).
        let softplus = |x: Tensor<3>| log_sigmoid((x + THRESHOLD_SHIFT).neg()).neg();
        let threshold =
            self.threshold.as_ref().map(|map| softplus(map.forward(x)).clamp_min(LEAST_THRESHOLD));
        Ok((OutputTokens { q, k, v, rates, gates, threshold }, conv))
    }
}

/// Implements [`LayerConfig`](super::LayerConfig) for a configuration that has a `miras(&self) -> Miras`.
macro_rules! miras_layer {
    ($config:ty, $name:literal) => {
        impl $crate::layers::LayerConfig for $config {
            const NAME: &'static str = $name;
            type Layer = $crate::layers::MirasMemory;

            fn conv_width(&self) -> usize {
                self.options.conv_width
            }

            fn validate(&self, ctx: &$crate::LayerContext) -> Result<(), $crate::MemoryError> {
                self.miras().validate(ctx)
            }

            fn build(
                &self,
                ctx: &$crate::LayerContext,
                device: &burn::tensor::Device,
            ) -> Result<$crate::layers::MirasMemory, $crate::MemoryError> {
                self.miras().build(ctx, device)
            }

            fn parameter_count(&self, ctx: &$crate::LayerContext) -> usize {
                self.miras().parameter_count(ctx)
            }

            fn state_size(&self, ctx: &$crate::LayerContext, _tokens: usize) -> $crate::StateSize {
                self.miras().state_size(ctx)
            }
        }
    };
}
pub(super) use miras_layer;
