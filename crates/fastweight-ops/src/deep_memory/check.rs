//! Checks of the arguments of a deep memory.

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::options::is_flex;
use crate::{Offsets, OpError};

use super::config::wrong;
use super::{DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, NAME, RateOf};

/// Checks everything against the queries and the memory.
pub(super) fn check(
    memory: &DeepMemory,
    tokens: &DeepTokens,
    norm: Option<&DeepNorm>,
    state: &DeepState,
    offsets: Option<&Offsets>,
) -> Result<(), OpError> {
    let arguments = Arguments::new(NAME, &tokens.q);
    let dims = arguments.sequence(&tokens.q, &tokens.k, &tokens.v, Some(1.0), offsets)?;
    memory.check(dims.key, dims.value)?;
    check_norm(&arguments, norm, dims.heads, dims.value)?;
    state.check(memory, [dims.states(), dims.heads, dims.key, dims.value], |weight, shape| {
        arguments.tensor("state", weight, shape)
    })?;

    let per_token = [dims.batch, dims.time, dims.heads];
    let share: fn(f64) -> bool = |x| (0.0..=1.0).contains(&x);
    let rate: fn(f64) -> bool = |x| x >= 0.0 && x.is_finite();
    let outputs = memory.output_count(dims.key, dims.value);
    let gate = |name, gate: &Option<DeepGate>, valid: fn(f64) -> bool, expected| match gate {
        None => Ok(()),
        Some(DeepGate::Heads(x)) => numbers(&arguments, name, x, per_token, valid, expected),
        Some(DeepGate::Outputs(x)) => {
            let shape = [dims.batch, dims.time, dims.heads, outputs];
            numbers(&arguments, name, x, shape, valid, expected)
        }
    };
    gate("rate", &tokens.rate, rate, "a finite number, at least 0")?;
    gate("momentum", &tokens.momentum, share, "0 to 1")?;
    gate("decay", &tokens.decay, share, "0 to 1")?;
    if let Some(threshold) = &tokens.threshold {
        numbers(&arguments, "threshold", threshold, per_token, |x| x > 0.0, "above 0")?;
    }
    if tokens.has_output_gates() {
        check_output_gates(memory)?;
    }
    if memory.rate == RateOf::Reading && (tokens.momentum.is_some() || tokens.decay.is_some()) {
        let found = "given with the rate of the reading token";
        return Err(wrong("momentum or decay", found, "neither of them, or RateOf::Written"));
    }
    if state.momentum.is_some() && tokens.momentum.is_none() && memory.rate == RateOf::Written {
        return Err(wrong("momentum", "absent", "the factors of the momentum that the state holds"));
    }
    Ok(())
}

pub(super) fn check_norm(
    arguments: &Arguments,
    norm: Option<&DeepNorm>,
    heads: usize,
    value: usize,
) -> Result<(), OpError> {
    let Some(DeepNorm { weight, bias }) = norm else { return Ok(()) };
    arguments.tensor("norm.weight", weight, [heads, value])?;
    arguments.tensor("norm.bias", bias, [heads, value])
}

/// What gates for every output go together with.
fn check_output_gates(memory: &DeepMemory) -> Result<(), OpError> {
    let with = |expected: &str| format!("{expected} with gates for every output");
    if memory.rate == RateOf::Reading {
        return Err(wrong("rate", "RateOf::Reading", with("RateOf::Written")));
    }
    if memory.window > 1 {
        return Err(wrong("window", memory.window, with("1")));
    }
    if memory.newton_schulz {
        return Err(wrong("newton_schulz", true, with("false")));
    }
    Ok(())
}

/// Shape, and values where they are cheap to read.
fn numbers<const D: usize>(
    arguments: &Arguments,
    name: &'static str,
    tensor: &Tensor<D>,
    shape: [usize; D],
    valid: impl Fn(f64) -> bool,
    expected: &str,
) -> Result<(), OpError> {
    arguments.tensor(name, tensor, shape)?;
    if !is_flex(&tensor.device()) {
        return Ok(());
    }
    let Ok(values) = tensor.clone().without_autodiff().try_into_data() else { return Ok(()) };
    let bad = match values.as_slice::<f32>() {
        Ok(slice) => {
            let at = slice.iter().position(|&x| !valid(f64::from(x)));
            at.map(|at| (at, f64::from(slice[at])))
        }
        Err(_) => values.iter::<f64>().enumerate().find(|&(_, x)| !valid(x)),
    };
    match bad {
        Some((at, x)) => Err(wrong(name, format!("{x} at flat position {at}"), expected)),
        None => Ok(()),
    }
}
