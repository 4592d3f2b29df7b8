//! TTT-Linear over whole sequences and token by token; see `support/ttt.rs` for the names.

use burn::tensor::Tensor;
use fastweight_ops::ttt::{TttOptions, TttState, ttt_linear, ttt_linear_step};
use fastweight_ops::{OpError, SequenceOptions};

use super::super::ttt::{mini_batch, positions};
use super::Tape;
use super::steps::runs;

struct Inputs {
    k: Tensor<4>,
    v: Tensor<4>,
    eta: Tensor<3>,
    ln_w: Tensor<2>,
    ln_b: Tensor<2>,
    state: TttState,
}

fn inputs(tape: &mut Tape) -> Inputs {
    let position = positions(tape.problem);
    let mut state = TttState::new(tape.needed("W"), tape.needed::<4>("bias").squeeze_dim(2));
    if let Some((gathered, bias)) = tape.input("G").zip(tape.input::<4>("G_bias")) {
        (state.gathered, state.gathered_bias, state.position) = (gathered, bias.squeeze_dim(2), position);
    }
    let eta = tape.needed::<4>("eta").squeeze_dim(3);
    let (ln_w, ln_b) = (tape.needed("ln_w"), tape.needed("ln_b"));
    Inputs { k: tape.needed("k"), v: tape.needed("v"), eta, ln_w, ln_b, state }
}

fn finish(tape: &mut Tape, o: Tensor<4>, states: Vec<TttState>) {
    let all4 = |part: fn(&TttState) -> Tensor<4>| Tensor::cat(states.iter().map(part).collect(), 0);
    let all3 = |part: fn(&TttState) -> Tensor<3>| {
        Tensor::cat(states.iter().map(part).collect(), 0).unsqueeze_dim::<4>(2)
    };
    tape.output("o", o);
    tape.output("G", all4(|state| state.gathered.clone()));
    tape.output("G_bias", all3(|state| state.gathered_bias.clone()));
    tape.output("W", all4(|state| state.clone().flush().weights));
    tape.output("bias", all3(|state| state.clone().flush().bias));
}

pub(super) fn sequence(tape: &mut Tape, q: Tensor<4>, options: SequenceOptions) -> Result<(), OpError> {
    let Inputs { k, v, eta, ln_w, ln_b, state } = inputs(tape);
    let options = TttOptions { mini_batch: mini_batch(tape.problem), ..options.into() };
    let (o, state) = ttt_linear(q, k, v, eta, ln_w, ln_b, Some(state), &options)?;
    finish(tape, o, vec![state]);
    Ok(())
}

pub(super) fn steps(tape: &mut Tape) -> Result<(), OpError> {
    let (q, scale) = tape.query();
    let Inputs { k, v, eta, ln_w, ln_b, state } = inputs(tape);
    let options = TttOptions { scale, mini_batch: mini_batch(tape.problem), ..TttOptions::default() };
    let (mut outputs, mut states) = (Vec::new(), Vec::new());
    for (rows, tokens) in runs(tape.problem)? {
        let of4 = |x: &Tensor<4>| x.clone().narrow(0, rows.start, rows.len());
        let of3 = |x: &Tensor<3>| x.clone().narrow(0, rows.start, rows.len());
        let mut state = TttState {
            weights: of4(&state.weights),
            bias: of3(&state.bias),
            gathered: of4(&state.gathered),
            gathered_bias: of3(&state.gathered_bias),
            rate: state.rate.clone().narrow(0, rows.start, rows.len()),
            position: state.position[rows.clone()].to_vec(),
        };
        for t in tokens {
            let at = |x: &Tensor<4>| x.clone().narrow(1, t, 1).squeeze_dim::<3>(1);
            let rate = eta.clone().narrow(1, t, 1).squeeze_dim::<2>(1);
            let (q, k, v) = (at(&q), at(&k), at(&v));
            let (o, next) = ttt_linear_step(q, k, v, rate, ln_w.clone(), ln_b.clone(), state, &options)?;
            outputs.push(o.unsqueeze_dim::<4>(1));
            state = next;
        }
        states.push(state);
    }
    finish(tape, Tensor::cat(outputs, 1), states);
    Ok(())
}
