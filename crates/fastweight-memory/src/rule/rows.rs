//! The tokens of a rule as rows, and how they are cut.

use burn::tensor::Tensor;

use super::run::{Gate, Tokens};
use super::{Past, Rule};

/// Which numbers of a weight share a decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Axis {
    /// All numbers of a head.
    Head,
    /// Those of a row, an input of the weight.
    Rows,
    /// Those of a column, an output of the weight.
    Columns,
}

/// What each token multiplies a weight with, `[B, H, T, channels]`: one channel, or one a row or a column.
#[derive(Debug, Clone)]
pub(super) struct Decay {
    pub axis: Axis,
    pub factors: Tensor<4>,
}

/// The tokens as rows, `[B, H, T, dim]`.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    /// Rates of the writes, one tensor a weight: one number, or one a column.
    pub rates: Vec<Tensor<4>>,
    /// Decays, one a weight.
    pub decays: Vec<Option<Decay>>,
    pub momentum: Option<Tensor<4>>,
    /// Thresholds of the Huber loss; the rule's when absent.
    pub threshold: Option<Tensor<4>>,
}

/// `[B, T, H, dim]` to `[B, H, T, dim]`.
pub(super) fn by_head(x: Tensor<4>) -> Tensor<4> {
    x.swap_dims(1, 2)
}

/// `[B, T, H]` to `[B, H, T, 1]`.
pub(super) fn numbers(x: Tensor<3>) -> Tensor<4> {
    x.swap_dims(1, 2).unsqueeze_dim(3)
}

impl Rows {
    pub(super) fn new(rule: &Rule, tokens: Tokens) -> Self {
        let weights = rule.layer_shapes(1, 1).len();
        let decays = match tokens.gate {
            Gate::None => vec![None; weights],
            Gate::Scalar(gate) => {
                let factors = numbers(gate).exp();
                vec![Some(Decay { axis: Axis::Head, factors }); weights]
            }
            Gate::Channel(gate) => {
                let factors = by_head(gate).exp();
                // Of the second weight of an MLP the columns are channels.
                let axis = |index| if index == 0 { Axis::Rows } else { Axis::Columns };
                (0..weights).map(|i| Some(Decay { axis: axis(i), factors: factors.clone() })).collect()
            }
        };
        Self {
            q: by_head(tokens.q),
            k: by_head(tokens.k),
            v: by_head(tokens.v),
            rates: vec![numbers(tokens.rate); weights],
            decays,
            momentum: tokens.momentum.map(numbers),
            threshold: None,
        }
    }

    fn map(&self, f: impl Fn(&Tensor<4>) -> Tensor<4>) -> Self {
        let decay = |decay: &Decay| Decay { axis: decay.axis, factors: f(&decay.factors) };
        Self {
            q: f(&self.q),
            k: f(&self.k),
            v: f(&self.v),
            rates: self.rates.iter().map(&f).collect(),
            decays: self.decays.iter().map(|d| d.as_ref().map(decay)).collect(),
            momentum: self.momentum.as_ref().map(&f),
            threshold: self.threshold.as_ref().map(&f),
        }
    }

    /// Tokens `from..from + count`.
    pub(super) fn narrow(&self, from: usize, count: usize) -> Self {
        if from == 0 && count == self.time() {
            return self.clone();
        }
        self.map(|x| x.clone().narrow(2, from, count))
    }

    pub(super) fn time(&self) -> usize {
        self.q.dims()[2]
    }

    /// The stretches between neighbouring `bounds`, of which the first is the first token. Halves of halves: the
    /// gradient of a part is as large as what it was cut from, so cutting each from the whole would take time that
    /// grows with the square of their number.
    pub(super) fn cut(self, bounds: &[usize]) -> Vec<Self> {
        let parts = bounds.len().saturating_sub(1);
        if parts <= 1 {
            return vec![self];
        }
        let middle = bounds[parts / 2] - bounds[0];
        let mut all = self.narrow(0, middle).cut(&bounds[..=parts / 2]);
        all.extend(self.narrow(middle, self.time() - middle).cut(&bounds[parts / 2..]));
        all
    }

    /// The pairs of the losses: those of the tokens and, with a window, the ones before them. The last ones are kept
    /// in `past`.
    pub(super) fn pairs(&self, past: &mut Option<Past>) -> Pairs {
        let (k, v, rates) = (self.k.clone(), self.v.clone(), self.rates.clone());
        let Some(before) = past else {
            return Pairs { k, v, rates, threshold: self.threshold.clone() };
        };
        let kept = before.k.dims()[2];
        let join = |before: &Tensor<4>, new: Tensor<4>| Tensor::cat(vec![before.clone(), new], 2);
        let (k, v) = (join(&before.k, k), join(&before.v, v));
        // A window comes with one rate for all weights.
        let rate = join(&before.rate, rates[0].clone());
        let last = |x: &Tensor<4>| x.clone().narrow(2, self.time(), kept);
        *before = Past { k: last(&k), v: last(&v), rate: last(&rate) };
        Pairs { k, v, rates: vec![rate; rates.len()], threshold: None }
    }
}

/// Pairs of losses, `[B, H, S, dim]` each: S tokens, with a window also those before them.
pub(super) struct Pairs {
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    pub rates: Vec<Tensor<4>>,
    pub threshold: Option<Tensor<4>>,
}

impl Pairs {
    /// Pairs `from..from + count`.
    pub(super) fn narrow(&self, from: usize, count: usize) -> Self {
        let part = |x: &Tensor<4>| x.clone().narrow(2, from, count);
        Self {
            k: part(&self.k),
            v: part(&self.v),
            rates: self.rates.iter().map(part).collect(),
            threshold: self.threshold.as_ref().map(part),
        }
    }
}
