//! The plain float64 loops of the operators with momentum, on named arrays.
//!
//! The fixtures call the memory `S` and the momentum `M` in one operator, and the other way round in the other.

use fastweight_ops::kernel::Dims;

use super::loops::Run;

pub(super) fn momentum_delta(run: &mut Run, dims: &Dims) {
    use fastweight_ops::momentum_delta::reference::{Inputs, backward, forward};
    let inputs = Inputs {
        dims,
        scale: run.problem.scale,
        q: run.needed("q"),
        k: run.needed("k"),
        p: run.needed("p"),
        v: run.needed("v"),
        log_alpha: run.needed("log_alpha"),
        log_mu: run.needed("log_mu"),
        beta: run.needed("beta"),
        eta: run.needed("eta"),
        memory: run.input("S"),
        momentum: run.input("M"),
    };
    let out = forward(&inputs);
    let states = out.memory.len();
    let grads = backward(&inputs, &run.up("o", out.o.len()), &run.up("S", states), &run.up("M", states));
    let shape = vec![dims.states(), dims.heads, dims.key, dims.value];
    run.output("o", vec![dims.batch, dims.time, dims.heads, dims.value], out.o);
    run.output("S", shape.clone(), out.memory);
    run.output("M", shape, out.momentum);
    run.grad("q", grads.q);
    run.grad("k", grads.k);
    run.grad("p", grads.p);
    run.grad("v", grads.v);
    run.grad("log_alpha", grads.log_alpha);
    run.grad("log_mu", grads.log_mu);
    run.grad("beta", grads.beta);
    run.grad("eta", grads.eta);
    run.grad("S", grads.memory);
    run.grad("M", grads.momentum);
}

pub(super) fn titans(run: &mut Run, dims: &Dims) {
    use fastweight_ops::titans::reference::{Inputs, backward, forward};
    let inputs = Inputs {
        dims,
        scale: run.problem.scale,
        q: run.needed("q"),
        k: run.needed("k"),
        v: run.needed("v"),
        theta: run.needed("theta"),
        eta: run.needed("eta"),
        alpha: run.needed("alpha"),
        memory: run.input("M"),
        momentum: run.input("S"),
    };
    let out = forward(&inputs);
    let states = out.memory.len();
    let grads = backward(&inputs, &run.up("o", out.o.len()), &run.up("M", states), &run.up("S", states));
    let shape = vec![dims.states(), dims.heads, dims.key, dims.value];
    run.output("o", vec![dims.batch, dims.time, dims.heads, dims.value], out.o);
    run.output("M", shape.clone(), out.memory);
    run.output("S", shape, out.momentum);
    run.grad("q", grads.q);
    run.grad("k", grads.k);
    run.grad("v", grads.v);
    run.grad("theta", grads.theta);
    run.grad("eta", grads.eta);
    run.grad("alpha", grads.alpha);
    run.grad("M", grads.memory);
    run.grad("S", grads.momentum);
}
