//! A layer whose memory follows any sound rule of the algebra.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::{log_softmax, sigmoid};
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::activation::log_gate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, STATE_ELEMENT, step_as_sequence};
use crate::choice::{self, Options};
use crate::context::{setting_error, validate_conv, validate_rate};
use crate::init::placeholder;
use crate::projection::{Heads, Projection, Qkv, QkvSizes, check_sequence, linear, merge_heads, split_heads};
use crate::rule::{Bias, Gate, Memory, Retention, Rule, RuleState, RunOptions, Tokens, run};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, RuleMemoryState, State, StateSize};

const NAME: &str = RuleConfig::NAME;

/// Configuration of [`RuleMemory`]: the four choices of a [`Rule`] and its numbers, and the layer around it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RuleConfig {
    /// The rule; in recipes its fields stand beside the others.
    #[serde(flatten)]
    pub rule: Rule,
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Largest rate of a write. When absent 1 for vector and matrix memories and 0.1 for an MLP; a tenth of that for the
    /// `l_p` loss; divided by the window.
    #[schemars(range(max = crate::context::MOST_RATE), extend("exclusiveMinimum" = 0))]
    pub rate_max: Option<f64>,
}

impl Default for RuleConfig {
    fn default() -> Self {
        Self { rule: Rule::default(), conv_width: 4, rate_max: None }
    }
}

/// A memory layer of any rule.
///
/// Short convolution and SiLU on q, k, v; unit q and k; rate `rate_max sigmoid(W x)`, decay
/// `-exp(a_log) softplus(W x + dt_bias)` a head or a key channel where the retention decays, momentum `sigmoid(W x)`
/// where the learner has one; each head's reading RMS-normalised and gated by `silu(W_g x)`. Memories that cannot start
/// at zero start at trained weights.
#[derive(Module, Debug)]
pub struct RuleMemory {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Rate before the sigmoid, one a head.
    pub rate: Linear,
    /// Momentum before the sigmoid, one a head, if the learner has one.
    pub momentum: Option<Linear>,
    /// Decay before its bias and softplus, one a head or a key channel, if the retention decays.
    pub decay: Option<Linear>,
    /// Bias of the decay.
    pub dt_bias: Option<Param<Tensor<1>>>,
    /// Logarithm of the decay rate.
    pub a_log: Option<Param<Tensor<1>>>,
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
    config: RuleConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl RuleConfig {
    /// The rule of a recipe's options; a `mirror` that is left out is the one that the four choices have ([`Rule::new`]).
    pub(crate) fn read(options: Options) -> Result<Self, String> {
        let given = options.contains_key("mirror");
        let mut config: Self = choice::parse(NAME, options)?;
        let Rule { memory, bias, retention, learner, .. } = config.rule;
        if !given {
            config.rule.mirror = Rule::new(memory, bias, retention, learner).mirror;
        }
        config.validate_rule().map_err(|error| error.to_string())?;
        Ok(config)
    }

    /// Checks the rule, and that each of its numbers has a part in it.
    pub(crate) fn validate_rule(&self) -> Result<(), MemoryError> {
        self.rule.validate()?;
        self.rule.validate_used()
    }

    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }

    /// Decays of all heads, zero for a retention without.
    fn decays(&self, ctx: &LayerContext) -> usize {
        match self.rule.retention {
            Retention::None | Retention::Bregman => 0,
            Retention::ChannelDecay => ctx.key_width(),
            _ => ctx.heads,
        }
    }

    /// Shapes of the trained start, empty when the memory starts empty.
    fn starts(&self, ctx: &LayerContext) -> Vec<[usize; 2]> {
        let trained = self.rule.needs_start();
        if trained { self.rule.layer_shapes(ctx.head_dim, ctx.value_dim) } else { Vec::new() }
    }

    fn rate_max(&self) -> f64 {
        let base = if self.rule.memory == Memory::Mlp { 0.1 } else { 1.0 };
        let base = if self.rule.bias == Bias::Lp { 0.1 * base } else { base };
        self.rate_max.unwrap_or(base / self.rule.window as f64)
    }
}

impl LayerConfig for RuleConfig {
    const NAME: &'static str = "rule";
    type Layer = RuleMemory;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        self.validate_rule()?;
        ctx.validate(NAME)?;
        validate_conv(NAME, self.conv_width)?;
        if self.rule.memory != Memory::Matrix && ctx.value_dim != ctx.head_dim {
            let expected =
                format!("head_dim = {}: a vector or MLP memory maps keys to as many values", ctx.head_dim);
            return Err(setting_error(NAME, "value_dim", ctx.value_dim, expected));
        }
        self.rate_max.map_or(Ok(()), |rate| validate_rate(NAME, "rate_max", rate, "0.1"))
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<RuleMemory, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        let decays = self.decays(ctx);
        let vector = || (decays > 0).then(|| placeholder([decays], device));
        let mut starts =
            self.starts(ctx).into_iter().map(|[rows, cols]| placeholder([ctx.heads, rows, cols], device));
        Ok(RuleMemory {
            q,
            k,
            v,
            rate: linear(ctx.width, ctx.heads, device),
            momentum: self.rule.has_momentum().then(|| linear(ctx.width, ctx.heads, device)),
            decay: (decays > 0).then(|| linear(ctx.width, decays, device)),
            dt_bias: vector(),
            a_log: vector(),
            start_in: starts.next(),
            start_out: starts.next(),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let rates = ctx.heads * ctx.width * (1 + usize::from(self.rule.has_momentum()));
        let decays = self.decays(ctx) * (ctx.width + 2);
        let starts: usize = self.starts(ctx).iter().map(|[rows, cols]| ctx.heads * rows * cols).sum();
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        self.qkv(ctx).parameter_count() + rates + decays + starts + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        let memory = ctx.heads * self.rule.state_elements(ctx.head_dim, ctx.value_dim);
        StateSize { fixed: (memory + self.qkv(ctx).conv_elements()) * STATE_ELEMENT, growing: 0 }
    }
}

impl Layer for RuleMemory {
    type State = RuleMemoryState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<RuleMemoryState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, RuleMemoryState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let sequences = offsets.map_or(x.dims()[0], Offsets::documents);
        let starts = [&self.start_in, &self.start_out];
        let start = start_state(&self.config.rule, starts, &self.ctx, sequences, &x.device())?;
        let (initial, conv) = match state {
            None => (start.clone(), None),
            Some(state) => (state.change.zip(&start, |change, start| change + start), state.conv),
        };
        let (tokens, conv) = self.read(x.clone(), conv, offsets)?;
        let options = RunOptions { offsets: offsets.cloned(), ..RunOptions::default() };
        let (o, end) = run(&self.config.rule, tokens, Some(initial), &options)?;
        let change = end.zip(&start, |end, start| end - start);
        let y = self.norm.heads(merge_heads(o), Some(self.gate.forward(x)))?;
        Ok((self.o.forward(y), RuleMemoryState { change, conv }))
    }

    fn step(
        &self,
        x: Tensor<2>,
        state: RuleMemoryState,
    ) -> Result<(Tensor<2>, RuleMemoryState), MemoryError> {
        step_as_sequence(self, NAME, self.ctx.width, x, state)
    }

    fn zero_state(&self, batch: usize, device: &Device) -> RuleMemoryState {
        let (key, value) = (self.ctx.head_dim, self.ctx.value_dim);
        let change = RuleState::zeros(&self.config.rule, [batch, self.ctx.heads, key, value], device);
        RuleMemoryState { change, conv: self.config.qkv(&self.ctx).zero_conv(batch, device) }
    }
}

impl RuleMemory {
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tokens, Option<ConvState>), MemoryError> {
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let Heads { q, k, v, conv } = qkv.unit(x.clone(), conv, offsets, self.ctx.heads, self.ctx.heads)?;
        let gate = match (&self.decay, &self.a_log, &self.dt_bias) {
            (Some(decay), Some(a_log), Some(dt_bias)) => {
                let gate = log_gate(decay.forward(x.clone()), a_log.val(), dt_bias.val())?;
                match self.config.rule.retention {
                    Retention::ChannelDecay => Gate::Channel(split_heads(gate, self.ctx.heads)),
                    _ => Gate::Scalar(gate),
                }
            }
            _ => Gate::None,
        };
        let rate = sigmoid(self.rate.forward(x.clone())) * self.config.rate_max();
        let momentum = self.momentum.as_ref().map(|momentum| sigmoid(momentum.forward(x)));
        Ok((Tokens { q, k, v, rate, gate, momentum }, conv))
    }
}

/// The state of `sequences` sequences before their first token, at the trained weights of a rule that has such.
pub(super) fn start_state(
    rule: &Rule,
    starts: [&Option<Param<Tensor<3>>>; 2],
    ctx: &LayerContext,
    sequences: usize,
    device: &Device,
) -> Result<RuleState, MemoryError> {
    let trained = |start: &Param<Tensor<3>>| {
        let start = start.val().unsqueeze_dim::<4>(0);
        let [_, _, rows, cols] = start.dims();
        let start = match rule.retention {
            Retention::Kl => log_softmax(start, 2),
            // The mirror map enlarges a memory of n entries by n^((q-2)/q).
            Retention::Lq if rule.mirror => start * ((rows * cols) as f64).powf((2.0 - rule.q) / rule.q),
            _ => start,
        };
        start.expand([sequences, ctx.heads, rows, cols])
    };
    let trained: Vec<Tensor<4>> = starts.into_iter().flatten().map(trained).collect();
    if trained.is_empty() {
        RuleState::zero(rule, [sequences, ctx.heads, ctx.head_dim, ctx.value_dim], device)
    } else {
        RuleState::new(rule, trained, ctx.value_dim)
    }
}
