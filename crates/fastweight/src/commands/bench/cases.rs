//! The operators `bench` times, and the arguments it times them with.

use burn::tensor::{Device, Distribution, Tensor};
use fastweight::ops::delta::{delta_rule, delta_rule_step};
use fastweight::ops::linear::{LinearGate, linear_attention, linear_attention_step};
use fastweight::ops::norm::l2_normalise;
use fastweight::ops::normalised_linear::{normalised_linear_attention, normalised_linear_attention_step};
use fastweight::ops::short_conv::short_convolution;
use fastweight::ops::softmax::{KvCache, SoftmaxOptions, softmax_attention};
use fastweight::ops::{OpError, Path, SequenceOptions};
use serde::Serialize;

/// Taps of the short convolution.
const TAPS: usize = 4;
const L2_EPS: f32 = 1e-6;

/// Sizes of the timed tensors.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Shape {
    /// Sequences in the batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub time: usize,
    /// Heads.
    pub heads: usize,
    /// Key dimension of a head.
    pub key: usize,
    /// Value dimension of a head.
    pub value: usize,
    /// Sequences that take one step together.
    pub sessions: usize,
}

/// How fast the state is forgotten. Strong gates are where exponentials turn into denormal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// The operator has no gate.
    None,
    /// Log gates in [-0.1, 0].
    Weak,
    /// Log gates in [-60, 0].
    Strong,
}

/// A timed operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Operator {
    /// Causal softmax attention; the step reads a cache of `time` tokens.
    Softmax,
    /// Linear attention.
    Linear,
    /// ELU+1 linear attention with a normaliser.
    NormalisedLinear,
    /// The delta rule; with a gate, the gated delta rule.
    Delta,
    /// Short depthwise convolution over heads * key channels.
    ShortConvolution,
}

impl Operator {
    /// The gates the operator can have.
    pub fn gates(self) -> &'static [Gate] {
        match self {
            Self::Softmax | Self::ShortConvolution => &[Gate::None],
            Self::Linear | Self::NormalisedLinear | Self::Delta => &[Gate::None, Gate::Weak, Gate::Strong],
        }
    }
}

/// Arguments of one operator over whole sequences.
pub struct Sequence {
    operator: Operator,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    beta: Tensor<3>,
    gate: Option<Tensor<3>>,
    channels: Tensor<3>,
    taps: Tensor<2>,
}

impl Sequence {
    /// Random arguments; on an autodiff device all of them take gradients.
    pub fn new(operator: Operator, gate: Gate, shape: &Shape, device: &Device) -> Self {
        let Shape { batch, time, heads, key, value, .. } = *shape;
        let leaf = |x: Tensor<4>| if device.is_autodiff() { x.require_grad() } else { x };
        let leaf3 = |x: Tensor<3>| if device.is_autodiff() { x.require_grad() } else { x };
        Self {
            operator,
            q: leaf(l2_normalise(normal([batch, time, heads, key], device), L2_EPS).detach()),
            k: leaf(l2_normalise(normal([batch, time, heads, key], device), L2_EPS).detach()),
            v: leaf(normal([batch, time, heads, value], device)),
            beta: leaf3(uniform([batch, time, heads], 0.0, device)),
            gate: gates(gate, [batch, time, heads], device).map(leaf3),
            channels: leaf3(normal([batch, time, heads * key], device)),
            taps: normal([heads * key, TAPS], device),
        }
    }

    /// The operator's output, as one sum so that a backward pass can start from it.
    pub fn forward(&self) -> Result<Tensor<1>, OpError> {
        let (q, k, v) = (self.q.clone(), self.k.clone(), self.v.clone());
        let options = SequenceOptions::default();
        let output = match self.operator {
            Operator::Softmax => softmax_attention(q, k, v, None, &SoftmaxOptions::default())?,
            Operator::Linear => {
                let gate = self.gate.clone().map_or(LinearGate::None, LinearGate::PerToken);
                linear_attention(q, k, v, gate, None, &options)?.0
            }
            Operator::NormalisedLinear => {
                normalised_linear_attention(q, k, v, self.gate.clone(), None, &options)?.0
            }
            Operator::Delta => delta_rule(q, k, v, self.beta.clone(), self.gate.clone(), None, &options)?.0,
            Operator::ShortConvolution => {
                let (x, taps) = (self.channels.clone(), self.taps.clone());
                return Ok(short_convolution(x, taps, None, None, true, None, Path::Auto)?.0.sum());
            }
        };
        Ok(output.sum())
    }
}

/// Arguments and states of one operator for one token of several sessions.
pub struct Step {
    operator: Operator,
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    beta: Tensor<2>,
    gate: Option<Tensor<2>>,
    channels: Tensor<3>,
    taps: Tensor<2>,
    state: State,
}

enum State {
    Matrix(Tensor<4>),
    Normalised(Tensor<4>, Tensor<3>),
    Cache(KvCache),
    Convolution(Tensor<3>),
}

impl Step {
    /// Random arguments and states.
    pub fn new(operator: Operator, gate: Gate, shape: &Shape, device: &Device) -> Self {
        let Shape { time, heads, key, value, sessions, .. } = *shape;
        let unit = |x: Tensor<4>| l2_normalise(x, L2_EPS).squeeze_dim::<3>(1);
        let matrix = || normal([sessions, heads, key, value], device);
        let state = match operator {
            Operator::Softmax => State::Cache(KvCache {
                k: normal([sessions, time, heads, key], device),
                v: normal([sessions, time, heads, value], device),
                lengths: None,
            }),
            Operator::Linear | Operator::Delta => State::Matrix(matrix()),
            Operator::NormalisedLinear => {
                State::Normalised(matrix(), uniform([sessions, heads, key], 0.0, device))
            }
            Operator::ShortConvolution => {
                State::Convolution(normal([sessions, TAPS - 1, heads * key], device))
            }
        };
        Self {
            operator,
            q: unit(normal([sessions, 1, heads, key], device)),
            k: unit(normal([sessions, 1, heads, key], device)),
            v: normal([sessions, heads, value], device),
            beta: uniform([sessions, heads], 0.0, device),
            gate: gates(gate, [sessions, heads], device),
            channels: normal([sessions, 1, heads * key], device),
            taps: normal([heads * key, TAPS], device),
            state,
        }
    }

    /// One more token in every session.
    pub fn advance(self) -> Result<Self, OpError> {
        let (q, k, v, gate) = (self.q.clone(), self.k.clone(), self.v.clone(), self.gate.clone());
        let state = match self.state {
            State::Matrix(state) if self.operator == Operator::Delta => {
                State::Matrix(delta_rule_step(q, k, v, self.beta.clone(), gate, state, None)?.1)
            }
            State::Matrix(state) => State::Matrix(linear_attention_step(q, k, v, gate, state, None)?.1),
            State::Normalised(state, normaliser) => {
                let (_, state, normaliser) =
                    normalised_linear_attention_step(q, k, v, gate, state, normaliser)?;
                State::Normalised(state, normaliser)
            }
            State::Cache(cache) => {
                let options = SoftmaxOptions::default();
                softmax_attention(
                    q.unsqueeze_dim(1),
                    k.unsqueeze_dim(1),
                    v.unsqueeze_dim(1),
                    Some(cache.clone()),
                    &options,
                )?;
                State::Cache(cache)
            }
            State::Convolution(state) => {
                let (x, taps) = (self.channels.clone(), self.taps.clone());
                State::Convolution(short_convolution(x, taps, None, Some(state), true, None, Path::Auto)?.1)
            }
        };
        Ok(Self { state, ..self })
    }
}

fn normal<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// Uniform in [0, 1], or [low, 0] for a negative `low`.
fn uniform<const D: usize>(shape: [usize; D], low: f64, device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Uniform(low, if low < 0.0 { 0.0 } else { 1.0 }), device)
}

fn gates<const D: usize>(gate: Gate, shape: [usize; D], device: &Device) -> Option<Tensor<D>> {
    match gate {
        Gate::None => None,
        Gate::Weak => Some(uniform(shape, -0.1, device)),
        Gate::Strong => Some(uniform(shape, -60.0, device)),
    }
}
