//! One token of TTT-Linear on tensors.

use burn::tensor::Tensor;

use crate::check::{Arguments, tracked};
use crate::fused::step_in_place;
use crate::kernel::Dims;
use crate::{OpError, Path};

use super::cpu::{self, StepInputs};
use super::{NAME, TttOptions, TttState, ttt_linear};

/// One token of TTT-Linear, for every row of the batch.
///
/// `q, k, v [B,H,K]`, `eta [B,H]`, `ln_w, ln_b [H,K]`; of the options, offsets and path do not matter.
/// Returns the output `[B,H,K]` and the next state, which is updated in place when nobody else holds it and no
/// gradient is needed.
///
/// # Errors
/// [`OpError::Shape`] or [`OpError::Value`] name the argument at fault.
#[allow(clippy::too_many_arguments, reason = "what the paper's layer computes, one by one")]
pub fn ttt_linear_step(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    eta: Tensor<2>,
    ln_w: Tensor<2>,
    ln_b: Tensor<2>,
    state: TttState,
    options: &TttOptions,
) -> Result<(Tensor<3>, TttState), OpError> {
    let gradients = tracked([&q, &k, &v, &state.bias, &state.gathered_bias])
        || tracked([&eta, &ln_w, &ln_b])
        || tracked([&state.weights, &state.gathered]);
    if Path::Auto.is_fused(NAME, &q)? && !gradients {
        let arguments = Arguments::new(NAME, &q);
        let dims = arguments.token(&q, &k, &v, options.scale)?;
        arguments.tensor("eta", &eta, [dims.batch, dims.heads])?;
        super::check_norm(&arguments, &dims, &v, &ln_w, &ln_b)?;
        state.check(&arguments, [dims.batch, dims.heads, dims.key], options.mini_batch)?;
        return Ok(in_place(&dims, options.mini_batch, [q, k, v], eta, [ln_w, ln_b], state));
    }
    let options = TttOptions { offsets: None, path: Path::Auto, ..*options };
    let (q, k, v) = (q.unsqueeze_dim(1), k.unsqueeze_dim(1), v.unsqueeze_dim(1));
    let (o, state) = ttt_linear(q, k, v, eta.unsqueeze_dim(1), ln_w, ln_b, Some(state), &options)?;
    Ok((o.squeeze_dim(1), state))
}

fn in_place(
    dims: &Dims,
    mini_batch: usize,
    [q, k, v]: [Tensor<3>; 3],
    eta: Tensor<2>,
    [ln_w, ln_b]: [Tensor<2>; 2],
    state: TttState,
) -> (Tensor<3>, TttState) {
    let TttState { mut weights, mut bias, mut gathered, gathered_bias, position, .. } = state;
    let shape = v.dims();
    let length: usize = shape.iter().product();
    let two_rows = |out| {
        let out = Tensor::<1>::from_dispatch(out);
        [0, length].map(|start| out.clone().narrow(0, start, length).reshape(shape))
    };
    // The small sum of the bias leaves beside the output, only the large one stays in place.
    let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch()];
    inputs.extend([eta.clone().into_dispatch(), ln_w.into_dispatch(), ln_b.into_dispatch()]);
    inputs.extend([weights.clone().into_dispatch(), bias.clone().into_dispatch()]);
    inputs.push(gathered_bias.into_dispatch());
    let (out, next) = step_in_place(gathered, inputs, &[2 * length], |gathered, x, out| {
        let (o, gathered_bias) = out.split_at_mut(length);
        gathered_bias.copy_from_slice(x[8]);
        let inputs = StepInputs {
            dims,
            position: &position,
            q: x[0],
            k: x[1],
            v: x[2],
            eta: x[3],
            ln_w: x[4],
            ln_b: x[5],
            weights: x[6],
            bias: x[7],
        };
        cpu::step(inputs, gathered, gathered_bias, o);
    });
    gathered = next;
    let [o, mut gathered_bias] = two_rows(out);

    let ends: Vec<bool> = position.iter().map(|position| position + 1 == mini_batch).collect();
    if ends.contains(&true) {
        let mut inputs = vec![eta.clone().into_dispatch(), gathered.clone().into_dispatch()];
        inputs.extend([bias.into_dispatch(), gathered_bias.into_dispatch()]);
        let (out, next) = step_in_place(weights, inputs, &[2 * length], |weights, x, out| {
            let (bias, gathered_bias) = out.split_at_mut(length);
            bias.copy_from_slice(x[2]);
            gathered_bias.copy_from_slice(x[3]);
            cpu::learn(&ends, x[0], (weights, x[1]), (bias, x[3]));
            clear(&ends, gathered_bias);
        });
        weights = next;
        [bias, gathered_bias] = two_rows(out);
        gathered = step_in_place(gathered, Vec::new(), &[1], |gathered, _, _| clear(&ends, gathered)).1;
    }
    let position = position.iter().map(|position| (position + 1) % mini_batch).collect();
    (o, TttState { weights, bias, gathered, gathered_bias, rate: eta, position })
}

/// Zeroes the rows whose mini-batch ended.
fn clear(ends: &[bool], values: &mut [f32]) {
    let size = values.len() / ends.len();
    for (row, _) in values.chunks_exact_mut(size).zip(ends).filter(|(_, ends)| **ends) {
        row.fill(0.0);
    }
}
