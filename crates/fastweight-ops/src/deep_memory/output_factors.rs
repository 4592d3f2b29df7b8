//! The factors of the dual form where every output of a layer has gates of its own.
//!
//! With the gates of column j, `P_s` holds `prod_{s < r <= t} momentum_r` of its own at token t, and the weights after t hold
//! `x[t,s]` of it, `x[t,s] = (1 - decay_t) x[t-1,s] + prod_{s < r <= t} momentum_r`, `x[s,s] = 1`. As for heads these are sums of
//! products of the gates as they are.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::chunked::split;
use super::cpu_mix::FusedMix;
use super::factors::{Factors, Mix, Rows, cut};
use crate::fused::apply;

/// The gates of one layer's outputs, `[R,C,out]` each.
pub(super) struct OutputGates {
    pub(super) rate: Tensor<3>,
    pub(super) momentum: Option<Tensor<3>>,
    pub(super) decay: Option<Tensor<3>>,
}

/// What each token's weights hold of the gradients before it, for every output.
#[derive(Debug, Clone)]
pub(super) struct OutputMix {
    /// Rates `[R,C,out]`.
    rate: Tensor<3>,
    /// The last row, with the rates, `[R,C,out]`.
    pub(super) end: Tensor<3>,
    held: Held,
    /// Whether a token has the row of the token before.
    before: bool,
}

/// `x[t,s]` of every output.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)]
enum Held {
    /// As it is, `[R, C * C, out]`.
    Formed(Tensor<3>),
    /// The factors of the momentum and of the weights that it is made of, `[R,C,out]` each.
    Gates([Tensor<3>; 2]),
}

impl OutputGates {
    pub(super) fn factors(self, fused: bool) -> Factors {
        let Self { rate, momentum, decay } = self;
        let kept = decay.map(|decay| decay.neg() + 1.0);
        let [_, tokens, _] = rate.dims();
        let each = |x: &Option<Tensor<3>>| x.as_ref().map(|x| split::<3, 2>(x.clone().swap_dims(0, 1)));
        let (m, k) = (each(&momentum), each(&kept));

        // Forward in time: what is left of the weights and of the momentum before the chunk.
        let (mut keep, mut hold, mut carry) = (Vec::new(), Vec::new(), Vec::new());
        for t in 0..tokens {
            if let Some(k) = &k {
                keep.push(times(keep.last(), &k[t]));
            }
            if let Some(m) = &m {
                let held = times(hold.last(), &m[t]);
                let carried = carry.last().map(|carry| kept_of(carry, &k, t));
                carry.push(add(carried, held.clone()));
                hold.push(held);
            }
        }
        // Backward: what the last weights and the last momentum have of each token's.
        let ones = || Tensor::<2>::ones([rate.dims()[0], rate.dims()[2]], (&rate.device(), rate.dtype()));
        let (mut gather, mut end, mut left) = (vec![ones()], vec![ones()], ones());
        for s in (1..tokens).rev() {
            left = kept_of(&left, &k, s);
            let passed = m.as_ref().and_then(|m| end.last().map(|end| end.clone() * m[s].clone()));
            end.push(add(passed, left.clone()));
            if let Some(m) = &m {
                gather.push(times(gather.last(), &m[s]));
            }
        }
        let together = |all: Vec<Tensor<2>>| (!all.is_empty()).then(|| Tensor::stack::<3>(all, 1));
        let reversed = |all: Vec<Tensor<2>>| together(all.into_iter().rev().collect());
        let end = reversed(end).map_or_else(|| rate.clone(), |end| end * rate.clone());
        let held = match fused {
            true => Held::Gates([
                momentum.clone().unwrap_or_else(|| rate.zeros_like()),
                kept.clone().unwrap_or_else(|| rate.ones_like()),
            ]),
            false => Held::Formed(formed(&m, &k, &ones().unsqueeze_dim(1), tokens)),
        };
        Factors {
            hold: hold.last().map(|hold| hold.clone().unsqueeze_dim(1)),
            gather: momentum.and_then(|_| reversed(gather)).map(|gather| gather * rate.clone()),
            rows: Rows {
                keep: together(keep),
                carry: together(carry),
                mix: Mix::Outputs(OutputMix { rate, end, held, before: false }),
            },
            before: None,
            tokenwise: None,
        }
    }
}

fn times(product: Option<&Tensor<2>>, factor: &Tensor<2>) -> Tensor<2> {
    product.map_or_else(|| factor.clone(), |product| product.clone() * factor.clone())
}

fn kept_of(x: &Tensor<2>, kept: &Option<Vec<Tensor<2>>>, t: usize) -> Tensor<2> {
    kept.as_ref().map_or_else(|| x.clone(), |kept| x.clone() * kept[t].clone())
}

fn add(sum: Option<Tensor<2>>, x: Tensor<2>) -> Tensor<2> {
    match sum {
        Some(sum) => sum + x,
        None => x,
    }
}

/// `x[t,s]` of all tokens, zeros for `s > t`, `[R, C * C, out]`.
fn formed(
    momentum: &Option<Vec<Tensor<2>>>,
    kept: &Option<Vec<Tensor<2>>>,
    ones: &Tensor<3>,
    tokens: usize,
) -> Tensor<3> {
    let row = |factors: &Option<Vec<Tensor<2>>>, t: usize| {
        factors.as_ref().map_or_else(|| ones.clone(), |factors| factors[t].clone().unsqueeze_dim(1))
    };
    let (mut held, mut x) = (ones.clone(), ones.clone());
    let mut rows = Vec::new();
    for t in 0..tokens {
        if t > 0 {
            x = x * row(kept, t);
            if momentum.is_some() {
                held = held * row(momentum, t);
                x = x + held.clone();
                held = Tensor::cat(vec![held, ones.clone()], 1);
            }
            x = Tensor::cat(vec![x, ones.clone()], 1);
        }
        rows.push(x.clone());
        if t + 1 < tokens {
            rows.push(ones.zeros_like().repeat_dim(1, tokens - 1 - t));
        }
    }
    Tensor::cat(rows, 1)
}

impl OutputMix {
    /// The row of the token before for every token.
    pub(super) fn before(&self) -> Self {
        Self { before: true, ..self.clone() }
    }

    /// As [`Mix::apply`].
    pub(super) fn apply(&self, scores: Tensor<3>, errors: &Tensor<3>) -> Tensor<3> {
        let weighed = errors.clone() * self.rate.clone();
        if !self.before {
            return self.held.apply(scores, weighed);
        }
        // The row of the token before: scores one token up, sums one token down.
        let [rows, tokens, outputs] = weighed.dims();
        let zeros = Tensor::zeros([rows, 1, outputs], (&weighed.device(), weighed.dtype()));
        if tokens == 1 {
            return zeros;
        }
        let last = scores.clone().narrow(1, tokens - 1, 1);
        let scores = Tensor::cat(vec![scores.narrow(1, 1, tokens - 1), last], 1);
        let sums = self.held.apply(scores, weighed);
        Tensor::cat(vec![zeros, sums.narrow(1, 0, tokens - 1)], 1)
    }

    pub(super) fn cut(self, count: usize) -> Vec<Self> {
        let held: Vec<Held> = match self.held {
            Held::Formed(x) => cut(x, count).into_iter().map(Held::Formed).collect(),
            Held::Gates([momentum, kept]) => {
                let both = cut(momentum, count).into_iter().zip(cut(kept, count));
                both.map(|(momentum, kept)| Held::Gates([momentum, kept])).collect()
            }
        };
        let parts = cut(self.rate, count).into_iter().zip(cut(self.end, count)).zip(held);
        parts.map(|((rate, end), held)| Self { rate, end, held, before: self.before }).collect()
    }
}

impl Held {
    /// `sum_s x[t,s] scores[t,s] weighed_s`, `[M,C,out]`.
    fn apply(&self, scores: Tensor<3>, weighed: Tensor<3>) -> Tensor<3> {
        let [rows, tokens, outputs] = weighed.dims();
        match self {
            Self::Formed(x) => {
                let x = x.clone().reshape([rows, tokens, tokens, outputs]) * weighed.unsqueeze_dim(1);
                let scores = scores.reshape([rows * tokens, 1, tokens]);
                let sums = scores.matmul(x.reshape([rows * tokens, tokens, outputs]));
                sums.reshape([rows, tokens, outputs])
            }
            Self::Gates([momentum, kept]) => {
                let op = FusedMix { shape: [rows, tokens, outputs] };
                let inputs = [scores, weighed, momentum.clone(), kept.clone()];
                let [sums, ..] = apply(Arc::new(op), inputs.map(Tensor::into_dispatch).into());
                Tensor::from_dispatch(sums)
            }
        }
    }
}
