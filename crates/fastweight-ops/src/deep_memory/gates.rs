//! Gates of a deep memory: one number a head, or one for every output of every weight.

use burn::tensor::Tensor;

use super::{DeepMemory, DeepTokens};

/// A gate of the tokens of a sequence; `DeepGate<2, 3>` has one token of each row and no time axis.
///
/// An output is a column of a weight `[in, out]`: its gate weighs, holds or forgets that column alone, as in Titans
/// (2501.00663) and Miras (2504.13173) with channel-wise gates. If one gate of a call has outputs, those a head count for
/// every output.
#[derive(Debug, Clone)]
pub enum DeepGate<const H: usize = 3, const O: usize = 4> {
    /// `[B,T,H]`.
    Heads(Tensor<H>),
    /// `[B,T,H,outputs]`: hidden channels of the first weight, then of the next, value channels of the last;
    /// [`DeepMemory::output_count`] in all. Needs [`RateOf::Written`](super::RateOf::Written), a window of 1 and no
    /// Newton-Schulz steps.
    Outputs(Tensor<O>),
}

impl<const H: usize, const O: usize> DeepGate<H, O> {
    /// The gate with a change of its tensor, whichever it is.
    pub(super) fn map<const P: usize, const Q: usize>(
        &self,
        heads: impl FnOnce(&Tensor<H>) -> Tensor<P>,
        outputs: impl FnOnce(&Tensor<O>) -> Tensor<Q>,
    ) -> DeepGate<P, Q> {
        match self {
            Self::Heads(x) => DeepGate::Heads(heads(x)),
            Self::Outputs(x) => DeepGate::Outputs(outputs(x)),
        }
    }
}

impl DeepGate {
    /// `[B,T,H]`, where no gate has outputs.
    pub(super) fn heads(&self) -> Option<&Tensor<3>> {
        match self {
            Self::Heads(x) => Some(x),
            Self::Outputs(_) => None,
        }
    }

    /// The gate of a layer's outputs, `[B,T,H,out]`.
    pub(super) fn layer(&self, [from, count]: [usize; 2]) -> Tensor<4> {
        match self {
            Self::Heads(x) => {
                let [batch, time, heads] = x.dims();
                x.clone().unsqueeze_dim::<4>(3).expand([batch, time, heads, count])
            }
            Self::Outputs(x) => x.clone().narrow(3, from, count),
        }
    }

    /// Gates of several rows, one after the other; absent unless all are there and of one kind.
    pub(super) fn stacked(gates: Vec<&Option<Self>>) -> Option<Self> {
        let pick = |gate: &&Option<Self>| match gate {
            Some(Self::Heads(x)) => Some(x.clone()),
            _ => None,
        };
        if let Some(heads) = gates.iter().map(pick).collect() {
            return Some(Self::Heads(Tensor::cat(heads, 0)));
        }
        let pick = |gate: &&Option<Self>| match gate {
            Some(Self::Outputs(x)) => Some(x.clone()),
            _ => None,
        };
        let outputs = gates.iter().map(pick).collect::<Option<_>>()?;
        Some(Self::Outputs(Tensor::cat(outputs, 0)))
    }
}

impl DeepTokens {
    /// Whether a gate has a number for every output.
    pub(super) fn has_output_gates(&self) -> bool {
        let gates = [&self.rate, &self.momentum, &self.decay];
        gates.into_iter().flatten().any(|gate| matches!(gate, DeepGate::Outputs(_)))
    }
}

/// Where each layer's outputs begin among all of a head's, and how many they are.
pub(super) fn spans(memory: &DeepMemory, key: usize, value: usize) -> Vec<[usize; 2]> {
    let mut from = 0;
    let span = |[_, count]: [usize; 2]| {
        from += count;
        [from - count, count]
    };
    memory.weight_shapes(key, value).into_iter().map(span).collect()
}
