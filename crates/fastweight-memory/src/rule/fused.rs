//! Rules that are a fused operator under another name.

use burn::tensor::Tensor;
use fastweight_ops::delta::delta_rule;
use fastweight_ops::dplr::dplr;
use fastweight_ops::gla::gated_linear_attention;
use fastweight_ops::kda::kimi_delta_attention;
use fastweight_ops::linear::{LinearGate, linear_attention};
use fastweight_ops::titans::titans_memory;
use fastweight_ops::{OpError, SequenceOptions};

use super::run::{Gate, RunOptions, Tokens};
use super::{Bias, GradientAt, Learner, Memory, Retention, Rule, RuleState};
use crate::MemoryError;

/// The operator that computes a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fused {
    /// [`linear_attention`]: Hebb, linear attention, RetNet, Lightning Attention, the scalar form of Mamba-2.
    Linear,
    /// [`gated_linear_attention`]: GLA, HGRN2.
    GatedLinear,
    /// [`delta_rule`]: DeltaNet, Gated DeltaNet, and exact proximal steps (with the rate `eta / (1 + eta |k|^2)`).
    Delta,
    /// [`kimi_delta_attention`]: the delta rule behind a decay a key channel.
    ChannelDelta,
    /// [`dplr`]: decays with a read of the undecayed memory, and retention directed along the key.
    DiagonalPlusLowRank,
    /// [`titans_memory`]: momentum on the squared loss.
    Titans,
}

impl Rule {
    /// The fused operator that computes this rule, if there is one.
    pub fn fused(&self) -> Option<Fused> {
        use {Bias as B, Learner as L, Retention as R};
        if self.memory != Memory::Matrix || self.window > 1 || self.chunk > 1 {
            return None;
        }
        let decayed = self.gradient_at == GradientAt::Decayed;
        match (self.bias, self.retention, self.learner) {
            (B::DotProduct, R::None | R::ScalarDecay, L::Gradient | L::Proximal) => Some(Fused::Linear),
            (B::DotProduct, R::ChannelDecay, L::Gradient | L::Proximal) => Some(Fused::GatedLinear),
            (B::DotProduct, R::Directed, L::Gradient | L::Proximal) => Some(Fused::DiagonalPlusLowRank),
            (B::Squared, R::None, L::Gradient | L::Proximal) => Some(Fused::Delta),
            (B::Squared, R::ScalarDecay, L::Proximal) => Some(Fused::Delta),
            (B::Squared, R::ScalarDecay, L::Gradient) if decayed => Some(Fused::Delta),
            (B::Squared, R::ChannelDecay, L::Proximal) => Some(Fused::ChannelDelta),
            (B::Squared, R::ChannelDecay, L::Gradient) if decayed => Some(Fused::ChannelDelta),
            (B::Squared, R::ScalarDecay | R::ChannelDecay | R::Directed, L::Gradient) if !decayed => {
                Some(Fused::DiagonalPlusLowRank)
            }
            (B::Squared, R::None | R::ScalarDecay, L::Momentum) if !decayed => Some(Fused::Titans),
            _ => None,
        }
    }
}

/// `eta / (1 + eta |k|^2)`: the rate with which a gradient step is the exact proximal step.
fn exact_rate(rate: Tensor<3>, k: &Tensor<4>) -> Tensor<3> {
    let square = k.clone().square().sum_dim(3).squeeze_dim(3);
    rate.clone() / (rate * square + 1.0)
}

/// The log decay of every key channel, `[B, T, H, K]`.
fn channels(gate: Gate, k: &Tensor<4>) -> Tensor<4> {
    match gate {
        Gate::None => k.zeros_like(),
        Gate::Scalar(gate) => gate.unsqueeze_dim::<4>(3).expand(k.dims()),
        Gate::Channel(gate) => gate,
    }
}

/// One log decay a head, if there is one.
fn scalar(gate: Gate) -> Option<Tensor<3>> {
    match gate {
        Gate::Scalar(gate) => Some(gate),
        _ => None,
    }
}

impl Fused {
    /// Runs a rule of this operator.
    pub(super) fn run(
        self,
        rule: &Rule,
        tokens: Tokens,
        mut state: RuleState,
        options: &RunOptions,
    ) -> Result<(Tensor<4>, RuleState), MemoryError> {
        let lengths: Vec<usize> = match &options.offsets {
            Some(offsets) => offsets.ranges().map(|range| range.len()).collect(),
            None => vec![tokens.q.dims()[1]; state.positions.len()],
        };
        let momentum = state.momentum.pop();
        let (readings, memory, momentum) =
            self.operator(rule, tokens, state.memory.pop(), momentum, options)?;
        state.memory = vec![memory];
        state.momentum = momentum.into_iter().collect();
        state.positions.iter_mut().zip(lengths).for_each(|(position, count)| *position += count);
        Ok((readings, state))
    }

    fn operator(
        self,
        rule: &Rule,
        tokens: Tokens,
        memory: Option<Tensor<4>>,
        momentum: Option<Tensor<4>>,
        options: &RunOptions,
    ) -> Result<(Tensor<4>, Tensor<4>, Option<Tensor<4>>), OpError> {
        let options = SequenceOptions {
            scale: Some(options.scale),
            offsets: options.offsets.clone(),
            ..SequenceOptions::default()
        };
        let Tokens { q, k, v, rate, gate, momentum: mu } = tokens;
        let exact = rule.learner == Learner::Proximal && rule.bias == Bias::Squared;
        let rate = if exact { exact_rate(rate, &k) } else { rate };
        let write = |v: Tensor<4>| v * rate.clone().unsqueeze_dim(3);
        let (readings, memory) = match self {
            Self::Linear => {
                let gate = scalar(gate).map_or(LinearGate::None, LinearGate::PerToken);
                linear_attention(q, k, write(v), gate, memory, &options)?
            }
            Self::GatedLinear => {
                let gate = channels(gate, &k);
                gated_linear_attention(q, k, write(v), gate, memory, &options)?
            }
            Self::Delta => delta_rule(q, k, v, rate, scalar(gate), memory, &options)?,
            Self::ChannelDelta => {
                let gate = channels(gate, &k);
                kimi_delta_attention(q, k, v, rate, gate, memory, &options)?
            }
            Self::DiagonalPlusLowRank => {
                // The squared loss removes what the key reads; directed retention removes it (once more).
                let twice = rule.retention == Retention::Directed && rule.bias == Bias::Squared;
                let removed = write(k.clone()).mul_scalar(if twice { -2.0 } else { -1.0 });
                let decay = channels(gate, &k);
                dplr(q, decay, k.clone(), write(v), k, removed, memory, &options)?
            }
            Self::Titans => {
                let mu = mu.unwrap_or_else(|| rate.zeros_like());
                let forgotten = scalar(gate).map_or(rate.zeros_like(), |gate| gate.exp().neg() + 1.0);
                let initial = memory.zip(momentum);
                let (readings, memory, momentum) =
                    titans_memory(q, k, v, rate, mu, forgotten, initial, &options)?;
                return Ok((readings, memory, Some(momentum)));
            }
        };
        Ok((readings, memory, None))
    }
}
