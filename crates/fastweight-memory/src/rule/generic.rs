//! Any sound rule over a sequence, as tensor operations.
//!
//! Gradients are taken at the memory of the chunk's start, those of a chunk together; retention and learner then
//! run token by token. Chunks begin at multiples of [`Rule::chunk`] tokens of each sequence, so that any cut of
//! the input gives the same result.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Bool, Tensor, TensorData};

use super::run::{Gate, Tokens};
use super::state::{Past, RuleState};
use super::step::{Factors, TokenRow, anchor, newton_schulz, primal, proximal, read, retain};
use super::{Bias, GradientAt, Learner, Retention, Rule};

/// The tokens as rows, `[B, H, T, dim]`.
struct Rows {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    rate: Tensor<4>,
    decay: Option<Tensor<4>>,
    momentum: Option<Tensor<4>>,
}

impl Rows {
    fn new(tokens: Tokens) -> Self {
        let rows = |x: Tensor<4>| x.swap_dims(1, 2);
        let scalar = |x: Tensor<3>| x.swap_dims(1, 2).unsqueeze_dim(3);
        let decay = match tokens.gate {
            Gate::None => None,
            Gate::Scalar(gate) => Some(scalar(gate).exp()),
            Gate::Channel(gate) => Some(rows(gate).exp()),
        };
        Self {
            q: rows(tokens.q),
            k: rows(tokens.k),
            v: rows(tokens.v),
            rate: scalar(tokens.rate),
            decay,
            momentum: tokens.momentum.map(scalar),
        }
    }

    fn token(&self, t: usize) -> TokenRow {
        let at = |x: &Tensor<4>| x.clone().narrow(2, t, 1);
        TokenRow {
            k: at(&self.k),
            v: at(&self.v),
            rate: at(&self.rate),
            decay: self.decay.as_ref().map(at),
            momentum: self.momentum.as_ref().map(at),
        }
    }
}

/// Reads sequences of at least one token, a row each; returns `[B, T, H, V]` and the state after them.
pub(super) fn sequence(rule: &Rule, tokens: Tokens, mut state: RuleState) -> (Tensor<4>, RuleState) {
    let time = tokens.q.dims()[1];
    let rows = Rows::new(tokens);
    // The loss of a token reads the window's pairs: those before the sequence come first.
    let (mut keys, mut values, mut rates) = (rows.k.clone(), rows.v.clone(), rows.rate.clone());
    if let Some(past) = &state.past {
        keys = Tensor::cat(vec![past.k.clone(), keys], 2);
        values = Tensor::cat(vec![past.v.clone(), values], 2);
        rates = Tensor::cat(vec![past.rate.clone(), rates], 2);
    }
    let exact = rule.learner == Learner::Proximal && rule.bias != Bias::DotProduct;
    let mut weights = primal(rule, &state.memory);
    let mut readings = Vec::with_capacity(time);
    let mut t = 0;
    while t < time {
        let phases: Vec<usize> = state.positions.iter().map(|p| (p + t) % rule.chunk).collect();
        let longest = phases.iter().map(|phase| rule.chunk - phase).min().unwrap_or(1);
        let length = longest.min(time - t);
        refresh_start(&mut state, &phases);
        let start = if state.start.is_empty() { weights.clone() } else { primal(rule, &state.start) };
        let together = (rule.gradient_at == GradientAt::Previous && !exact).then(|| {
            let span = length + rule.window - 1;
            Factors::new(rule, &start, keys.clone().narrow(2, t, span), values.clone().narrow(2, t, span))
        });
        for i in 0..length {
            let token = rows.token(t + i);
            let anchor = anchor(rule, &state.memory, &token);
            if exact {
                let kept = anchor.into_iter().next().unwrap_or_else(|| token.k.clone());
                let (memory, history) = proximal(rule, kept, &token, state.history.take());
                (state.memory, state.history) = (vec![memory], history);
            } else {
                let rate = rates.clone().narrow(2, t + i, rule.window);
                let gradient = match &together {
                    Some(factors) => factors.gradient(rule, i, rate),
                    None => {
                        let near = |x: &Tensor<4>| x.clone().narrow(2, t + i, rule.window);
                        let at = primal(rule, &normalised(rule, &anchor));
                        Factors::new(rule, &at, near(&keys), near(&values)).gradient(rule, 0, rate)
                    }
                };
                let direction = learn(rule, gradient, &token, &mut state.momentum);
                let sums = anchor.into_iter().zip(direction).map(|(anchor, direction)| anchor + direction);
                state.memory = sums.map(|sum| retain(rule, sum, &token.rate)).collect();
            }
            weights = primal(rule, &state.memory);
            readings.push(read(rule, &weights, rows.q.clone().narrow(2, t + i, 1)));
        }
        t += length;
    }
    if rule.window > 1 {
        let last = |x: Tensor<4>| x.narrow(2, time, rule.window - 1);
        state.past = Some(Past { k: last(keys), v: last(values), rate: last(rates) });
    }
    state.positions.iter_mut().for_each(|position| *position += time);
    (Tensor::cat(readings, 2).swap_dims(1, 2), state)
}

/// The anchor as a memory of its retention: the logarithm of a KL memory must be normalised again.
fn normalised(rule: &Rule, anchor: &[Tensor<4>]) -> Vec<Tensor<4>> {
    match rule.retention {
        Retention::Kl => anchor.iter().map(|layer| log_softmax(layer.clone(), 2)).collect(),
        _ => anchor.to_vec(),
    }
}

/// The learner's direction of a gradient; advances the momentum.
fn learn(
    rule: &Rule,
    gradient: Vec<Tensor<4>>,
    token: &TokenRow,
    momentum: &mut Vec<Tensor<4>>,
) -> Vec<Tensor<4>> {
    if !rule.has_momentum() {
        return gradient.into_iter().map(Tensor::neg).collect();
    }
    let step = |(gradient, momentum): (Tensor<4>, Tensor<4>)| match &token.momentum {
        Some(mu) => momentum * mu.clone() - gradient,
        None => gradient.neg(),
    };
    *momentum = gradient.into_iter().zip(std::mem::take(momentum)).map(step).collect();
    match rule.learner {
        Learner::NewtonSchulz => momentum.iter().cloned().map(newton_schulz).collect(),
        _ => momentum.clone(),
    }
}

/// Takes the memory as the chunk's start in every row that stands at one.
fn refresh_start(state: &mut RuleState, phases: &[usize]) {
    if state.start.is_empty() || phases.iter().all(|phase| *phase != 0) {
        return;
    }
    if phases.iter().all(|phase| *phase == 0) {
        state.start = state.memory.clone();
        return;
    }
    let fresh: Vec<bool> = phases.iter().map(|phase| *phase == 0).collect();
    let mix = |(start, memory): (Tensor<4>, &Tensor<4>)| {
        let mask = TensorData::new(fresh.clone(), [fresh.len(), 1, 1, 1]);
        let mask = Tensor::<4, Bool>::from_data(mask, &start.device()).expand(start.dims());
        start.mask_where(mask, memory.clone())
    };
    state.start = std::mem::take(&mut state.start).into_iter().zip(&state.memory).map(mix).collect();
}
