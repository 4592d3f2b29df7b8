//! The plain float64 loops of the delta rule's relatives, on named arrays.

use fastweight_ops::kernel::Dims;

use super::loops::Run;

pub(super) fn delta_product(run: &mut Run, dims: &Dims) {
    use fastweight_ops::delta_product::reference::{Inputs, backward, forward};
    let inputs = Inputs {
        dims,
        steps: run.problem.shape("k")[2],
        scale: run.problem.scale,
        q: run.needed("q"),
        k: run.needed("k"),
        v: run.needed("v"),
        beta: run.needed("beta"),
        gate: run.input("g"),
        initial: run.input("S"),
    };
    let out = forward(&inputs);
    let grads = backward(&inputs, &run.up("o", out.o.len()), &run.up("S", out.state.len()));
    run.output("o", vec![dims.batch, dims.time, dims.heads, dims.value], out.o);
    run.output("S", vec![dims.states(), dims.heads, dims.key, dims.value], out.state);
    run.grad("q", grads.q);
    run.grad("k", grads.k);
    run.grad("v", grads.v);
    run.grad("beta", grads.beta);
    run.grad("g", grads.gate);
    run.grad("S", grads.initial);
}

pub(super) fn comba(run: &mut Run, dims: &Dims) {
    use fastweight_ops::comba::reference::{Inputs, backward, forward};
    let inputs = Inputs {
        dims,
        scale: run.problem.scale,
        q: run.needed("q"),
        k: run.needed("k"),
        v: run.needed("v"),
        beta: run.needed("beta"),
        gate: run.needed("g"),
        b: run.needed("b_head"),
        d: run.needed("d_head"),
        initial: run.input("S"),
    };
    let out = forward(&inputs);
    let grads = backward(&inputs, &run.up("o", out.o.len()), &run.up("S", out.state.len()));
    run.output("o", vec![dims.batch, dims.time, dims.heads, dims.value], out.o);
    run.output("S", vec![dims.states(), dims.heads, dims.key, dims.value], out.state);
    run.grad("q", grads.q);
    run.grad("k", grads.k);
    run.grad("v", grads.v);
    run.grad("beta", grads.beta);
    run.grad("g", grads.gate);
    run.grad("b_head", grads.b);
    run.grad("d_head", grads.d);
    run.grad("S", grads.initial);
}
