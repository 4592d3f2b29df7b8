//! Any sound rule over a sequence, as tensor operations.
//!
//! Gradients are taken at the memory of the chunk's start. Chunks begin at multiples of [`Rule::chunk`] tokens of each
//! sequence, so that any cut of the input gives the same result. Inside a chunk the tokens are computed together
//! ([`chunked`]): decays and momenta become matrices between the tokens of a block, products of the gates as they are.
//!
//! Where a token's step needs the memory after the one before, tokens follow one another ([`tokenwise`]):
//!
//! - chunks of one token and gradients at the decayed memory, unless the gradient is the same at every memory (the dot
//!   product on a vector or a matrix);
//! - exact proximal steps, which minimise over the memory itself;
//! - the elastic net, whose soft threshold cuts at every token what the next one adds to.

use burn::tensor::{Bool, Tensor, TensorData};
use fastweight_ops::Offsets;

use super::rows::{Rows, by_head};
use super::step::primal;
use super::{Bias, Learner, Retention, Rule, RuleState, chunked, tokenwise};

/// Most tokens of a block: what tokens have to do with one another grows with its square.
const BLOCK: usize = 32;

/// Whether every token needs the memory after the one before.
pub(super) fn is_sequential(rule: &Rule) -> bool {
    let exact = rule.learner == Learner::Proximal && rule.bias != Bias::DotProduct;
    exact || rule.retention == Retention::ElasticNet || (rule.chunk == 1 && !rule.is_linear_loss())
}

/// Runs sequences of at least one token, a row each, or every document of a packed row from its own state; returns
/// `[B, T, H, V]` and the states after them.
pub(super) fn run(
    rule: &Rule,
    rows: Rows,
    state: RuleState,
    offsets: Option<&Offsets>,
) -> (Tensor<4>, RuleState) {
    let Some(offsets) = offsets else {
        let (readings, state) = sequence(rule, rows, state);
        return (by_head(readings), state);
    };
    let mut bounds = offsets.as_slice().to_vec();
    bounds.dedup();
    let mut parts = rows.clone().cut(&bounds).into_iter();
    let (mut readings, mut states) = (Vec::new(), Vec::new());
    for (document, range) in offsets.ranges().enumerate() {
        let row = state.row(document);
        let part = if range.is_empty() { None } else { parts.next() };
        states.push(match part {
            None => row,
            Some(part) => {
                let (reading, end) = sequence(rule, part, row);
                readings.push(reading);
                end
            }
        });
    }
    (by_head(Tensor::cat(readings, 2)), RuleState::cat(states).unwrap_or(state))
}

fn sequence(rule: &Rule, rows: Rows, mut state: RuleState) -> (Tensor<4>, RuleState) {
    let time = rows.time();
    let mut bounds = vec![0];
    let mut t = 0;
    while t < time {
        t += block(rule, &state.positions, t).min(time - t);
        bounds.push(t);
    }
    let mut readings = Vec::with_capacity(bounds.len());
    for (rows, from) in rows.cut(&bounds).into_iter().zip(bounds) {
        let phases: Vec<usize> = state.positions.iter().map(|p| (p + from) % rule.chunk).collect();
        refresh_start(&mut state, &phases);
        let start = if state.start.is_empty() { &state.memory } else { &state.start };
        let start = if rule.is_linear_loss() { Vec::new() } else { primal(rule, start) };
        readings.push(if is_sequential(rule) {
            tokenwise::block(rule, &rows, &mut state, &start)
        } else {
            chunked::block(rule, rows, &mut state, &start)
        });
    }
    state.positions.iter_mut().for_each(|position| *position += time);
    (Tensor::cat(readings, 2), state)
}

/// Tokens after the first `t` whose gradients are taken at the same memories, as many as a block may have.
fn block(rule: &Rule, positions: &[usize], t: usize) -> usize {
    match rule.chunk {
        1 if is_sequential(rule) => 1,
        // The gradient does not depend on the memory.
        1 => BLOCK,
        chunk => positions.iter().map(|p| chunk - (p + t) % chunk).min().unwrap_or(1).min(BLOCK),
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
