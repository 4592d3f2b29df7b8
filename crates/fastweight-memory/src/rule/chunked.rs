//! A block of tokens whose gradients are taken at one memory, all tokens together.
//!
//! Retention and learner are a linear recurrence in the space where the retention adds gradients, so that the memory
//! after every token is the one before the block and the block's gradients in the proportions of [`Mixing`].
//!
//! - Where the memory that is read is that space's ([`attends`]), the memory of no token is formed: a weight's value at
//!   token t is `keep_t h D + carry_t h P - sum_s mix[t,s] (h . h_s) d_s`, an attention of the vector h over the inputs
//!   h_s of the block.
//! - Where a map stands between (the normalisation of `l_q` and KL) or in the learner (Newton-Schulz), the memories of all
//!   tokens are formed, `[B, H, C, rows, cols]`, and mapped and read in one operation: with one decay a head by one
//!   product, with decays of rows or columns by a sum and a product a token.
//!
//! Directed retention removes `eta_t k_t r_t^T`, where `r_t` is what the key reads just before: a triangular system, whose
//! solution counts as further gradients.

use burn::tensor::Tensor;
use burn::tensor::activation::{silu, softmax};

use super::mixing::{Mixing, inverse, spread};
use super::rows::{Axis, Decay, Rows};
use super::step::{Factors, newton_schulz, primal, read, retain};
use super::{Learner, Memory, Retention, Rule, RuleState};
use crate::sequences::cut;

/// Whether readings are attention over the block, without the memory of any token.
pub(super) fn attends(rule: &Rule) -> bool {
    rule.memory != Memory::Vector
        && rule.learner != Learner::NewtonSchulz
        && !matches!(rule.retention, Retention::Lq | Retention::Kl)
}

/// One weight of the memory in a block.
struct Weight {
    /// Before the block, `[B, H, rows, cols]`.
    memory: Tensor<4>,
    momentum: Option<Tensor<4>>,
    /// The pairs' gradients, `left_s right_s^T`, `[B, H, S, rows]` and `[B, H, S, cols]`; the rate is in them.
    left: Tensor<4>,
    right: Tensor<4>,
    mixing: Mixing,
    /// A decay of rows or columns that is not part of `mixing`: it is applied token by token.
    decay: Option<Decay>,
}

/// Reads a block; `start` are the weights where gradients are taken. Returns `[B, H, C, V]`.
pub(super) fn block(rule: &Rule, rows: Rows, state: &mut RuleState, start: &[Tensor<4>]) -> Tensor<4> {
    let mut weights = weights(rule, &rows, state, start);
    state.momentum = weights.iter().filter_map(Weight::last_momentum).collect();
    if !attends(rule) {
        return mapped(rule, rows, state, &weights);
    }
    if rule.retention == Retention::Directed {
        for weight in &mut weights {
            let reads = weight.value(&weight.mixing.before(), rows.k.clone());
            let [left, right] = removals(&rows, &weight.mixing, reads);
            weight.left = Tensor::cat(vec![weight.left.clone(), left], 2);
            weight.right = Tensor::cat(vec![weight.right.clone(), right], 2);
            weight.mixing.mix =
                Tensor::cat(vec![weight.mixing.mix.clone(), weight.mixing.retained.clone()], 3);
        }
    }
    let value = |index: usize, x: Tensor<4>| weights[index].value(&weights[index].mixing, x);
    let readings = match rule.memory {
        Memory::Mlp => rows.q.clone() + value(1, silu(value(0, rows.q))),
        _ => value(0, rows.q),
    };
    state.memory = weights.iter().map(Weight::last).collect();
    readings
}

fn weights(rule: &Rule, rows: &Rows, state: &mut RuleState, start: &[Tensor<4>]) -> Vec<Weight> {
    let [batch, heads, tokens, _] = rows.k.dims();
    let pairs = rows.pairs(&mut state.past);
    let factors = Factors::new(rule, start, &pairs);
    let momentum = rule.has_momentum().then(|| match &rows.momentum {
        Some(momentum) => momentum.clone(),
        None => Tensor::zeros([batch, heads, tokens, 1], (&rows.k.device(), rows.k.dtype())),
    });
    let mixing = |decay: Option<&Decay>| {
        Mixing::new([batch, heads, tokens], decay, momentum.as_ref(), rule.window, &rows.k)
    };
    let mut weights: Vec<Weight> = Vec::new();
    for (index, (left, right)) in factors.pairs(rule).into_iter().enumerate() {
        let decay = match rule.retention {
            Retention::Directed if rule.memory == Memory::Vector => Some(directed_vector(rows)),
            _ => rows.decays[index].clone(),
        };
        let axis = decay.as_ref().map_or(Axis::Head, |decay| decay.axis);
        let (mixed, decay) = if axis == Axis::Head || attends(rule) { (decay, None) } else { (None, decay) };
        let mixing = match (weights.first(), mixed) {
            // One decay a head is that of every weight.
            (Some(first), None | Some(Decay { axis: Axis::Head, .. })) => first.mixing.clone(),
            (_, mixed) => mixing(mixed.as_ref()),
        };
        weights.push(Weight {
            memory: state.memory[index].clone(),
            momentum: state.momentum.get(index).cloned(),
            left,
            right: right * pairs.rates[index].clone(),
            mixing,
            decay,
        });
    }
    weights
}

/// A vector memory forgets along the key channel by channel: `alpha - eta k^2`.
fn directed_vector(rows: &Rows) -> Decay {
    let removed = rows.k.clone().square() * rows.rates[0].clone();
    let factors = match &rows.decays[0] {
        Some(decay) => decay.factors.clone() - removed,
        None => removed.neg() + 1.0,
    };
    Decay { axis: Axis::Rows, factors }
}

/// What directed retention removes at each token, as a left and a right row; `base [B, H, C, cols]` is what the key reads
/// just before the token where only the other writes are counted.
///
/// `r_t = base_t - sum_{s < t} retained[t-1,s] eta_s (k_t . k_s) r_s`.
fn removals(rows: &Rows, mixing: &Mixing, base: Tensor<4>) -> [Tensor<4>; 2] {
    let (k, rate) = (rows.k.clone(), rows.rates[0].clone());
    let likeness = k.clone().matmul((k.clone() * rate.clone()).swap_dims(2, 3));
    let reads = inverse(likeness * mixing.before().retained).matmul(base);
    [k, reads * rate]
}

/// The memories of all tokens, mapped and read.
fn mapped(rule: &Rule, rows: Rows, state: &mut RuleState, weights: &[Weight]) -> Tensor<4> {
    let [batch, heads, tokens, key] = rows.q.dims();
    let mut memories: Vec<Tensor<4>> = Vec::new();
    for (index, weight) in weights.iter().enumerate() {
        let mut memory = weight.memories(rule.learner == Learner::NewtonSchulz);
        let [.., height, width] = memory.dims();
        let flat = [batch, heads * tokens, height, width];
        if rule.retention == Retention::Directed && rule.memory == Memory::Matrix {
            let first = weight.memory.clone().unsqueeze_dim::<5>(2);
            let before = match tokens {
                1 => first,
                _ => Tensor::cat(vec![first, memory.clone().narrow(2, 0, tokens - 1)], 2),
            };
            let k = rows.k.clone().reshape([batch, heads * tokens, 1, key]);
            let base = k.matmul(before.reshape(flat)).reshape([batch, heads, tokens, width]);
            let [left, right] = removals(&rows, &weight.mixing, base);
            memory = memory - written(Some(&weight.mixing.retained), left, right);
        }
        let last = memory.clone().narrow(2, tokens - 1, 1).reshape([batch, heads, height, width]);
        state.memory[index] = retain(rule, last, &rows.rates[index]);
        memories.push(memory.reshape(flat));
    }
    let q = rows.q.reshape([batch, heads * tokens, 1, key]);
    let weights = match rule.retention {
        // What decays and gradients add to a column's logarithms leaves out its normalisation.
        Retention::Kl => memories.into_iter().map(|memory| softmax(memory, 2)).collect(),
        _ => primal(rule, &memories),
    };
    let readings = read(rule, &weights, q);
    let value = readings.dims()[3];
    readings.reshape([batch, heads, tokens, value])
}

impl Weight {
    /// `x_t D_t` for `x [B, H, C, rows]`, `[B, H, C, cols]`.
    fn value(&self, mixing: &Mixing, x: Tensor<4>) -> Tensor<4> {
        let carried = |base: &Tensor<4>, factor: Option<&Tensor<4>>| match (factor, mixing.axis) {
            (None, _) => x.clone().matmul(base.clone()),
            (Some(factor), Axis::Rows) => (x.clone() * factor.clone()).matmul(base.clone()),
            (Some(factor), _) => x.clone().matmul(base.clone()) * factor.clone(),
        };
        let mut value = carried(&self.memory, mixing.keep.as_ref());
        if let Some(momentum) = &self.momentum {
            value = value + carried(momentum, mixing.carry.as_ref());
        }
        let (left, right, mix) = (self.left.clone(), self.right.clone(), mixing.mix.clone());
        let [batch, heads, pairs, height] = left.dims();
        let ([.., tokens, _], [.., width]) = (x.dims(), right.dims());
        value
            - match mixing.axis {
                Axis::Head => (x.matmul(left.swap_dims(2, 3)) * mix).matmul(right),
                Axis::Columns => {
                    let scores = spread(x.matmul(left.swap_dims(2, 3)), width) * mix;
                    let column = right.swap_dims(2, 3).reshape([batch, heads * width, pairs, 1]);
                    let columns = scores.matmul(column).reshape([batch, heads, width, tokens]);
                    columns.swap_dims(2, 3)
                }
                Axis::Rows => {
                    let x = x.swap_dims(2, 3).reshape([batch, heads * height, tokens, 1]);
                    let scores = (x * mix * by_channel(left)).reshape([batch, heads, height, tokens * pairs]);
                    scores.sum_dim(2).reshape([batch, heads, tokens, pairs]).matmul(right)
                }
            }
    }

    /// The memory after the last token.
    fn last(&self) -> Tensor<4> {
        let mixing = &self.mixing;
        let kept = |base: &Tensor<4>, factor: Option<&Tensor<4>>| match factor.map(last_row) {
            None => base.clone(),
            Some(factor) if mixing.axis == Axis::Rows => factor.swap_dims(2, 3) * base.clone(),
            Some(factor) => factor * base.clone(),
        };
        let mut memory = kept(&self.memory, mixing.keep.as_ref());
        if let Some(momentum) = &self.momentum {
            memory = memory + kept(momentum, mixing.carry.as_ref());
        }
        let [batch, heads, pairs, _] = self.left.dims();
        // [B, H, S, c]
        let mix = last_row(&mixing.mix);
        let channels = mix.dims()[1] / heads;
        let mix = mix.reshape([batch, heads, channels, pairs]).swap_dims(2, 3);
        memory
            - match mixing.axis {
                Axis::Columns => self.left.clone().swap_dims(2, 3).matmul(self.right.clone() * mix),
                _ => (self.left.clone() * mix).swap_dims(2, 3).matmul(self.right.clone()),
            }
    }

    fn last_momentum(&self) -> Option<Tensor<4>> {
        let Mixing { hold: Some(hold), gather: Some(gather), .. } = &self.mixing else { return None };
        let gathered = self.left.clone() * last_row(gather).swap_dims(2, 3);
        Some(self.momentum.clone()? * last_row(hold) - gathered.swap_dims(2, 3).matmul(self.right.clone()))
    }

    /// The memories after every token, `[B, H, C, rows, cols]`, with a momentum that is made orthogonal or not.
    fn memories(&self, orthogonal: bool) -> Tensor<5> {
        let Mixing { keep, carry, mix, hold, gather, retained, .. } = &self.mixing;
        let [batch, heads, height, width] = self.memory.dims();
        let tokens = retained.dims()[2];
        let kept = |base: &Tensor<4>, factor: Option<&Tensor<4>>| {
            let base = base.clone().unsqueeze_dim::<5>(2);
            match factor {
                None => base.expand([batch, heads, tokens, height, width]),
                Some(factor) => base * factor.clone().unsqueeze_dim::<5>(4),
            }
        };
        let (left, right) = (self.left.clone(), self.right.clone());
        if !orthogonal && self.decay.is_none() {
            let before = kept(&self.memory, keep.as_ref());
            let before = match &self.momentum {
                Some(momentum) => before + kept(momentum, carry.as_ref()),
                None => before,
            };
            return before - written(Some(mix), left, right);
        }
        if let (Some(decay), None, false) = (&self.decay, gather, orthogonal) {
            // Every token's own gradient alone.
            let pairs = split(left.unsqueeze_dim(4)).into_iter().zip(split(right.unsqueeze_dim(3)));
            return self.decayed(decay, pairs.map(|(left, right)| (left * right).neg()));
        }
        let mut steps = written(gather.as_ref(), left, right).neg();
        if let (Some(momentum), Some(hold)) = (&self.momentum, hold) {
            steps = steps + kept(momentum, Some(hold));
        }
        if orthogonal {
            let flat = steps.reshape([batch, heads * tokens, height, width]);
            steps = newton_schulz(flat).reshape([batch, heads, tokens, height, width]);
        }
        if let Some(decay) = &self.decay {
            return self.decayed(decay, split(steps).into_iter());
        }
        let sums = retained.clone().matmul(steps.reshape([batch, heads, tokens, height * width]));
        kept(&self.memory, keep.as_ref()) + sums.reshape([batch, heads, tokens, height, width])
    }

    /// `D_t = decay_t D_{t-1} + steps_t` where rows or columns have decays of their own. A matrix between the tokens for each of
    /// them would take C times the work.
    fn decayed(&self, decay: &Decay, steps: impl Iterator<Item = Tensor<5>>) -> Tensor<5> {
        let factors = match decay.axis {
            Axis::Rows => decay.factors.clone().unsqueeze_dim::<5>(4),
            _ => decay.factors.clone().unsqueeze_dim::<5>(3),
        };
        let mut memory = self.memory.clone().unsqueeze_dim::<5>(2);
        let mut memories = Vec::new();
        for (factor, step) in split(factors).into_iter().zip(steps) {
            memory = memory * factor + step;
            memories.push(memory.clone());
        }
        Tensor::cat(memories, 2)
    }
}

/// The tokens of `[B, H, C, ..]`.
fn split(x: Tensor<5>) -> Vec<Tensor<5>> {
    let tokens = vec![1; x.dims()[2]];
    cut(x, 2, &tokens)
}

/// `sum_s mix[t,s] left_s right_s^T` for every token t, `[B, H, C, rows, cols]`; each token's own where `mix` is absent.
fn written(mix: Option<&Tensor<4>>, left: Tensor<4>, right: Tensor<4>) -> Tensor<5> {
    let ([batch, heads, pairs, height], [.., width]) = (left.dims(), right.dims());
    let outer = left.unsqueeze_dim::<5>(4) * right.unsqueeze_dim::<5>(3);
    let Some(mix) = mix else { return outer };
    let sums = mix.clone().matmul(outer.reshape([batch, heads, pairs, height * width]));
    sums.reshape([batch, heads, mix.dims()[2], height, width])
}

/// `[B, H, S, c]` as rows `[B, H c, 1, S]`.
fn by_channel(x: Tensor<4>) -> Tensor<4> {
    let [batch, heads, pairs, channels] = x.dims();
    x.swap_dims(2, 3).reshape([batch, heads * channels, 1, pairs])
}

/// `[.., n, d]` to `[.., 1, d]`.
fn last_row(x: &Tensor<4>) -> Tensor<4> {
    x.clone().narrow(2, x.dims()[2] - 1, 1)
}
