//! DeltaProduct on named arrays: what a token writes has an axis for its steps.

use burn::tensor::Tensor;
use fastweight_ops::delta_product::{delta_product, delta_product_step};
use fastweight_ops::{OpError, SequenceOptions};

use super::Tape;
use super::steps::runs;

pub(super) fn sequence(tape: &mut Tape, q: Tensor<4>, options: &SequenceOptions) -> Result<(), OpError> {
    let (k, v, beta) = (tape.needed("k"), tape.needed("v"), tape.needed("beta"));
    let (gate, initial) = (tape.input("g"), tape.input("S"));
    let (o, s) = delta_product(q, k, v, beta, gate, initial, options)?;
    tape.output("o", o);
    tape.output("S", s);
    Ok(())
}

pub(super) fn steps(tape: &mut Tape) -> Result<(), OpError> {
    let (q, scale) = tape.query();
    let (k, v, beta) = (tape.needed::<5>("k"), tape.needed::<5>("v"), tape.needed::<4>("beta"));
    let (gate, initial) = (tape.input::<3>("g"), tape.needed::<4>("S"));
    let (mut outputs, mut states) = (Vec::new(), Vec::new());
    for (rows, tokens) in runs(tape.problem)? {
        let mut state = initial.clone().narrow(0, rows.start, rows.len());
        for t in tokens {
            let written = |x: &Tensor<5>| x.clone().narrow(1, t, 1).squeeze_dim::<4>(1);
            let (q, beta) = (q.clone().narrow(1, t, 1), beta.clone().narrow(1, t, 1));
            let gate = gate.as_ref().map(|gate| gate.clone().narrow(1, t, 1).squeeze_dim(1));
            let (q, k, v, beta) = (q.squeeze_dim(1), written(&k), written(&v), beta.squeeze_dim(1));
            let (o, next) = delta_product_step(q, k, v, beta, gate, state, scale)?;
            outputs.push(o.unsqueeze_dim::<4>(1));
            state = next;
        }
        states.push(state);
    }
    tape.output("o", Tensor::cat(outputs, 1));
    tape.output("S", Tensor::cat(states, 0));
    Ok(())
}
