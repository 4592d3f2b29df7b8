//! Rules that are a fused operator under another name.

use burn::tensor::Tensor;
use fastweight_ops::SequenceOptions;
use fastweight_ops::delta::delta_rule;
use fastweight_ops::linear::{LinearGate, linear_attention};

use super::run::{Gate, RunOptions, Tokens};
use super::{Bias, GradientAt, Learner, Memory, Retention, Rule, RuleState};
use crate::MemoryError;

/// The operator that computes a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fused {
    /// [`linear_attention`]: Hebb, linear attention, RetNet, Lightning Attention, the scalar form of Mamba-2.
    Linear,
    /// [`delta_rule`]: DeltaNet, Gated DeltaNet, and exact proximal steps (with the rate `eta / (1 + eta |k|^2)`).
    Delta,
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
            (B::Squared, R::None, L::Gradient | L::Proximal) => Some(Fused::Delta),
            (B::Squared, R::ScalarDecay, L::Proximal) => Some(Fused::Delta),
            (B::Squared, R::ScalarDecay, L::Gradient) if decayed => Some(Fused::Delta),
            _ => None,
        }
    }
}

/// `eta / (1 + eta |k|^2)`: the rate with which a gradient step is the exact proximal step.
fn exact_rate(rate: Tensor<3>, k: &Tensor<4>) -> Tensor<3> {
    let square = k.clone().square().sum_dim(3).squeeze_dim(3);
    rate.clone() / (rate * square + 1.0)
}

impl Fused {
    /// Runs a rule of this operator.
    pub(super) fn run(
        self,
        rule: &Rule,
        tokens: Tokens,
        state: RuleState,
        options: &RunOptions,
    ) -> Result<(Tensor<4>, RuleState), MemoryError> {
        let sequence = SequenceOptions {
            scale: Some(options.scale),
            offsets: options.offsets.clone(),
            ..SequenceOptions::default()
        };
        let lengths: Vec<usize> = match &options.offsets {
            Some(offsets) => offsets.ranges().map(|range| range.len()).collect(),
            None => vec![tokens.q.dims()[1]; state.positions.len()],
        };
        let initial = state.memory.into_iter().next();
        let Tokens { q, k, v, rate, gate, .. } = tokens;
        let rate = if rule.learner == Learner::Proximal && rule.bias == Bias::Squared {
            exact_rate(rate, &k)
        } else {
            rate
        };
        let (readings, memory) = match self {
            Self::Linear => {
                let v = v * rate.unsqueeze_dim(3);
                let gate = match gate {
                    Gate::Scalar(gate) => LinearGate::PerToken(gate),
                    _ => LinearGate::None,
                };
                linear_attention(q, k, v, gate, initial, &sequence)?
            }
            Self::Delta => {
                let gate = match gate {
                    Gate::Scalar(gate) => Some(gate),
                    _ => None,
                };
                delta_rule(q, k, v, rate, gate, initial, &sequence)?
            }
        };
        let positions =
            state.positions.iter().zip(lengths).map(|(position, count)| position + count).collect();
        Ok((readings, RuleState { memory: vec![memory], positions, ..state }))
    }
}
