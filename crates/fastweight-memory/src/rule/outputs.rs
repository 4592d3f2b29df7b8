//! Rules with gates of their own for every output of every weight, as the layers of Miras have them.
//!
//! Weights are key first, so that an output is a column: `D_t[:, j] = alpha_t[j] D_{t-1}[:, j] - eta_t[j] grad_t[:, j]`, with
//! D in the space where the retention adds gradients. Written value first this is `diag(alpha_t) W - diag(eta_t) grad`.
//! A column is what its output alone learns, and what KL retention normalises: a decay of the whole column leaves its
//! normalisation out, as one a head does, where a decay of a row (a key channel) would have to be normalised at every token.
//! The definition is [`reference::step_outputs`](super::reference::step_outputs).

use burn::tensor::Tensor;
use fastweight_ops::{Offsets, OpError};

use super::rows::{Axis, Decay, Rows, by_head, numbers};
use super::run::{check_gate, check_state, same, shape, value_error};
use super::{GradientAt, Learner, Memory, NAME, Retention, Rule, RuleState, generic};
use crate::MemoryError;
use crate::context::setting_error;

/// What a rule with a rate and a decay for every output of its weights reads.
#[derive(Debug, Clone)]
pub struct OutputTokens {
    /// Queries `[B, T, H, K]`.
    pub q: Tensor<4>,
    /// Keys `[B, T, H, K]`.
    pub k: Tensor<4>,
    /// Values `[B, T, H, V]`.
    pub v: Tensor<4>,
    /// Rates of the writes, a tensor `[B, T, H, cols]` for every weight ([`Rule::layer_shapes`]).
    pub rates: Vec<Tensor<4>>,
    /// Log decays, `<= 0`, of the same shapes.
    pub gates: Vec<Tensor<4>>,
    /// Thresholds of the Huber loss `[B, T, H]`, above 0; [`Rule::huber_delta`] when absent.
    pub threshold: Option<Tensor<3>>,
}

/// Runs a rule with gates for every output; returns the readings `M(W_t; q_t) [B, T, H, V]` and the state after them.
///
/// The rule has a matrix or an MLP, one of the retentions [`Retention::ScalarDecay`] (whose decay is the outputs'),
/// [`Retention::Lq`] and [`Retention::Kl`], [`Learner::Gradient`], and no window. With `offsets` documents are packed in
/// one row and the state holds one sequence a document.
///
/// # Errors
/// [`MemoryError::Setting`] for another rule, [`MemoryError::Operator`] for a tensor, [`MemoryError::StateBatch`] for a
/// state of another batch.
pub fn run_outputs(
    rule: &Rule,
    tokens: OutputTokens,
    initial: RuleState,
    offsets: Option<&Offsets>,
) -> Result<(Tensor<4>, RuleState), MemoryError> {
    check_rule(rule)?;
    check(rule, &tokens, &initial, offsets)?;
    if tokens.q.dims()[1] == 0 {
        return Ok((tokens.v, initial));
    }
    let decay = |gate: Tensor<4>| Some(Decay { axis: Axis::Columns, factors: by_head(gate).exp() });
    let rows = Rows {
        q: by_head(tokens.q),
        k: by_head(tokens.k),
        v: by_head(tokens.v),
        rates: tokens.rates.into_iter().map(by_head).collect(),
        decays: tokens.gates.into_iter().map(decay).collect(),
        momentum: None,
        threshold: tokens.threshold.map(numbers),
    };
    Ok(generic::run(rule, rows, initial, offsets))
}

fn check_rule(rule: &Rule) -> Result<(), MemoryError> {
    rule.validate()?;
    let with = |expected: &str| format!("{expected} with gates for every output");
    let setting = |name, found: &str, expected| Err(setting_error(NAME, name, found, with(expected)));
    if rule.memory == Memory::Vector {
        return setting("memory", "vector", "\"matrix\" or \"mlp\"");
    }
    if !matches!(rule.retention, Retention::ScalarDecay | Retention::Lq | Retention::Kl) {
        return setting("retention", rule.retention.name(), "\"scalar_decay\", \"lq\" or \"kl\"");
    }
    if rule.learner != Learner::Gradient {
        return setting("learner", rule.learner.name(), "\"gradient\"");
    }
    if rule.gradient_at != GradientAt::Previous {
        return setting("gradient_at", "decayed", "\"previous\"");
    }
    if rule.window > 1 {
        return Err(setting_error(NAME, "window", rule.window, with("1")));
    }
    Ok(())
}

fn check(
    rule: &Rule,
    tokens: &OutputTokens,
    state: &RuleState,
    offsets: Option<&Offsets>,
) -> Result<(), MemoryError> {
    let [batch, time, heads, key] = tokens.q.dims();
    let [.., value] = tokens.v.dims();
    if batch == 0 || heads == 0 || key == 0 || value == 0 {
        let expected = "at least one row, one head and one dimension".into();
        return Err(shape("q", &tokens.q, expected).into());
    }
    same("k", &tokens.k, [batch, time, heads, key], &tokens.q)?;
    let square = rule.memory == Memory::Mlp;
    same("v", &tokens.v, [batch, time, heads, if square { key } else { value }], &tokens.q)?;
    let shapes = rule.layer_shapes(key, value);
    for (name, tensors) in [("rates", &tokens.rates), ("gates", &tokens.gates)] {
        if tensors.len() != shapes.len() {
            let expected = format!("{}, one a weight of the memory", shapes.len());
            return Err(value_error(name, format!("{} tensors", tensors.len()), &expected));
        }
        for (tensor, [_, cols]) in tensors.iter().zip(&shapes) {
            same(name, tensor, [batch, time, heads, *cols], &tokens.q)?;
        }
    }
    tokens.gates.iter().try_for_each(check_gate)?;
    if let Some(threshold) = &tokens.threshold {
        same("threshold", threshold, [batch, time, heads], &tokens.q)?;
    }
    if let Some(offsets) = offsets {
        if batch != 1 {
            return Err(OpError::PackedBatch { operator: NAME, batch }.into());
        }
        Offsets::new(offsets.as_slice(), time)?;
    }
    check_state(rule, state, [offsets.map_or(batch, Offsets::documents), heads, key, value])
}
