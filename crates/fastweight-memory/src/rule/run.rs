//! A rule over a batch of sequences: arguments, documents, and the choice of the path.

use burn::tensor::Tensor;
use fastweight_ops::{Offsets, OpError, Path, is_flex};

use super::rows::Rows;
use super::{Memory, NAME, Retention, Rule, RuleState, generic};
use crate::MemoryError;

/// Log decay of the memory, `<= 0`; `-inf` forgets everything.
#[derive(Debug, Clone)]
pub enum Gate {
    /// Nothing decays.
    None,
    /// One log decay a head, `[B, T, H]`.
    Scalar(Tensor<3>),
    /// One log decay a key channel, `[B, T, H, K]`, for [`Retention::ChannelDecay`].
    Channel(Tensor<4>),
}

/// What a rule reads.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// Queries `[B, T, H, K]`.
    pub q: Tensor<4>,
    /// Keys `[B, T, H, K]`.
    pub k: Tensor<4>,
    /// Values `[B, T, H, V]`.
    pub v: Tensor<4>,
    /// Rates `eta [B, T, H]` of the writes.
    pub rate: Tensor<3>,
    /// Log decays; [`Gate::Channel`] for [`Retention::ChannelDecay`], otherwise [`Gate::Scalar`] or none.
    pub gate: Gate,
    /// Momentum `mu [B, T, H]` of the learners that have one; zero when absent.
    pub momentum: Option<Tensor<3>>,
}

/// How a rule is run.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Factor on the output.
    pub scale: f32,
    /// Documents packed in the one row of the batch; the state then holds one sequence a document.
    pub offsets: Option<Offsets>,
    /// [`Path::Auto`] takes the fused operator of a rule that has one, [`Path::Composed`] the generic path;
    /// [`Path::Fused`] is an error without one.
    pub path: Path,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { scale: 1.0, offsets: None, path: Path::Auto }
    }
}

/// Runs a rule; returns the readings `scale M(W_t; q_t) [B, T, H, V]` and the state after them.
///
/// Token t's reading sees token t. A state given as `initial` continues its sequences; without one they start empty,
/// which [`Rule::needs_start`] rules cannot. Both results carry gradients to every tensor given.
///
/// # Errors
/// [`MemoryError::Unsound`] or [`MemoryError::Setting`] for the rule, [`MemoryError::Operator`] for a tensor,
/// [`MemoryError::StateBatch`] for a state of another batch.
pub fn run(
    rule: &Rule,
    tokens: Tokens,
    initial: Option<RuleState>,
    options: &RunOptions,
) -> Result<(Tensor<4>, RuleState), MemoryError> {
    rule.validate()?;
    let [batch, time, heads, key] = tokens.q.dims();
    let [.., value] = tokens.v.dims();
    check(rule, &tokens, options)?;
    let documents = options.offsets.as_ref().map_or(batch, Offsets::documents);
    let state = match initial {
        Some(state) => {
            check_state(rule, &state, [documents, heads, key, value])?;
            state
        }
        None => {
            let state = RuleState::zero(rule, [documents, heads, key, value], &tokens.q.device())?;
            state.map(|tensor| tensor.cast(tokens.q.dtype()))
        }
    };
    let fused = match (options.path, rule.fused()) {
        (Path::Composed, _) | (Path::Auto, None) => None,
        (_, Some(fused)) => Some(fused),
        (Path::Fused, None) => {
            let found = format!("{}, {}, {}", rule.bias_text(), rule.retention_text(), rule.learner_text());
            return Err(OpError::NoFusedKernel { operator: NAME, found }.into());
        }
    };
    if time == 0 {
        return Ok((tokens.v, state));
    }
    let (readings, state) = match fused {
        Some(fused) => fused.run(rule, tokens, state, options)?,
        None => generic::run(rule, Rows::new(rule, tokens), state, options.offsets.as_ref()),
    };
    Ok((if options.scale == 1.0 || fused.is_some() { readings } else { readings * options.scale }, state))
}

fn check(rule: &Rule, tokens: &Tokens, options: &RunOptions) -> Result<(), MemoryError> {
    let [batch, time, heads, key] = tokens.q.dims();
    let [.., value] = tokens.v.dims();
    if batch == 0 || heads == 0 || key == 0 || value == 0 {
        let expected = "at least one row, one head and one dimension".into();
        return Err(shape("q", &tokens.q, expected).into());
    }
    same("k", &tokens.k, [batch, time, heads, key], &tokens.q)?;
    let square = rule.memory != Memory::Matrix;
    same("v", &tokens.v, [batch, time, heads, if square { key } else { value }], &tokens.q)?;
    same("rate", &tokens.rate, [batch, time, heads], &tokens.q)?;
    if let Some(momentum) = &tokens.momentum {
        same("momentum", momentum, [batch, time, heads], &tokens.q)?;
        if !rule.has_momentum() {
            return Err(value_error("momentum", "given", "none: the learner has no momentum"));
        }
    }
    match (&tokens.gate, rule.retention) {
        (Gate::None, Retention::ScalarDecay) => {
            return Err(value_error("gate", "absent", "a scalar gate, which this retention decays by"));
        }
        (Gate::None, Retention::ChannelDecay) | (Gate::Scalar(_), Retention::ChannelDecay) => {
            return Err(value_error("gate", "no channel gate", "one log decay a key channel, [B, T, H, K]"));
        }
        (Gate::None, _) => {}
        (_, Retention::None | Retention::Bregman) => {
            return Err(value_error("gate", "given", "none: this retention does not decay"));
        }
        (Gate::Scalar(gate), _) => {
            same("gate", gate, [batch, time, heads], &tokens.q)?;
            check_gate(gate)?;
        }
        (Gate::Channel(gate), Retention::ChannelDecay) => {
            same("gate", gate, [batch, time, heads, key], &tokens.q)?;
            check_gate(gate)?;
        }
        (Gate::Channel(_), _) => {
            return Err(value_error("gate", "a channel gate", "one log decay a head, [B, T, H]"));
        }
    }
    if let Some(offsets) = &options.offsets {
        if batch != 1 {
            return Err(OpError::PackedBatch { operator: NAME, batch }.into());
        }
        Offsets::new(offsets.as_slice(), time)?;
    }
    if !options.scale.is_finite() {
        return Err(value_error("scale", options.scale, "a finite number"));
    }
    Ok(())
}

pub(super) fn check_state(
    rule: &Rule,
    state: &RuleState,
    [batch, heads, key, value]: [usize; 4],
) -> Result<(), MemoryError> {
    if state.batch() != batch {
        return Err(MemoryError::StateBatch { expected: batch, found: state.batch() });
    }
    let expected: Vec<[usize; 4]> =
        rule.layer_shapes(key, value).into_iter().map(|[rows, cols]| [batch, heads, rows, cols]).collect();
    let found: Vec<[usize; 4]> = state.memory.iter().map(Tensor::dims).collect();
    let parts = [
        (state.start.len(), if rule.chunk > 1 { expected.len() } else { 0 }),
        (state.momentum.len(), if rule.has_momentum() { expected.len() } else { 0 }),
        (state.past.as_ref().map_or(0, |past| past.k.dims()[2]), rule.window - 1),
    ];
    if found != expected || parts.iter().any(|(found, expected)| found != expected) {
        let found = found.into_iter().flatten().collect();
        let expected = format!("a state of this rule with weights {expected:?}");
        return Err(MemoryError::Input { layer: NAME, found, expected });
    }
    Ok(())
}

pub(super) fn shape<const D: usize>(argument: &'static str, found: &Tensor<D>, expected: String) -> OpError {
    OpError::Shape { operator: NAME, argument, found: found.dims().to_vec(), expected }
}

pub(super) fn value_error(argument: &'static str, found: impl ToString, expected: &str) -> MemoryError {
    OpError::Value { operator: NAME, argument, found: found.to_string(), expected: expected.into() }.into()
}

pub(super) fn same<const D: usize>(
    argument: &'static str,
    tensor: &Tensor<D>,
    expected: [usize; D],
    first: &Tensor<4>,
) -> Result<(), MemoryError> {
    if tensor.dims() != expected {
        return Err(shape(argument, tensor, format!("{expected:?}")).into());
    }
    if tensor.dtype() != first.dtype() {
        let expected = format!("{:?}, as q has", first.dtype());
        return Err(value_error(argument, format!("{:?}", tensor.dtype()), &expected));
    }
    Ok(())
}

/// The gate's values must be `<= 0` where they are cheap to read.
pub(super) fn check_gate<const D: usize>(gate: &Tensor<D>) -> Result<(), MemoryError> {
    if !is_flex(&gate.device().inner()) {
        return Ok(());
    }
    let Ok(values) = gate.clone().without_autodiff().try_into_data() else { return Ok(()) };
    let bad = values.iter::<f32>().enumerate().find(|(_, g)| *g > 0.0 || g.is_nan());
    match bad {
        Some((position, value)) => {
            Err(OpError::Gate { operator: NAME, argument: "gate", value, position }.into())
        }
        None => Ok(()),
    }
}
