//! Checks of the arguments of a deep memory.

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::options::is_flex;
use crate::{Offsets, OpError};

use super::config::wrong;
use super::{DeepMemory, DeepNorm, DeepState, DeepTokens, NAME, RateOf};

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
    let share = |x: f64| (0.0..=1.0).contains(&x);
    let rate = |x: f64| x >= 0.0 && x.is_finite();
    numbers(&arguments, "rate", &tokens.rate, per_token, rate, "a finite number, at least 0")?;
    numbers(&arguments, "momentum", &tokens.momentum, per_token, share, "0 to 1")?;
    numbers(&arguments, "decay", &tokens.decay, per_token, share, "0 to 1")?;
    numbers(&arguments, "threshold", &tokens.threshold, per_token, |x| x > 0.0, "above 0")?;
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

/// Shape, and values where they are cheap to read.
fn numbers(
    arguments: &Arguments,
    name: &'static str,
    tensor: &Option<Tensor<3>>,
    shape: [usize; 3],
    valid: impl Fn(f64) -> bool,
    expected: &str,
) -> Result<(), OpError> {
    let Some(tensor) = tensor else { return Ok(()) };
    arguments.tensor(name, tensor, shape)?;
    if !is_flex(&tensor.device()) {
        return Ok(());
    }
    let Ok(values) = tensor.clone().without_autodiff().try_into_data() else { return Ok(()) };
    match values.iter::<f64>().enumerate().find(|&(_, x)| !valid(x)) {
        Some((at, x)) => Err(wrong(name, format!("{x} at flat position {at}"), expected)),
        None => Ok(()),
    }
}
