//! The plain float64 loops of the operators with a gate for each channel, on named arrays.

use fastweight_ops::kernel::Dims;

use super::loops::Run;

pub(super) fn gla(run: &mut Run, dims: &Dims) {
    use fastweight_ops::gla::reference::{Inputs, backward, forward};
    let inputs = Inputs {
        dims,
        scale: run.problem.scale,
        q: run.needed("q"),
        k: run.needed("k"),
        v: run.needed("v"),
        gate: run.needed("g"),
        initial: run.input("S"),
    };
    let out = forward(&inputs);
    let grads = backward(&inputs, &run.up("o", out.o.len()), &run.up("S", out.state.len()));
    run.output("o", vec![dims.batch, dims.time, dims.heads, dims.value], out.o);
    run.output("S", vec![dims.states(), dims.heads, dims.key, dims.value], out.state);
    run.grad("q", grads.q);
    run.grad("k", grads.k);
    run.grad("v", grads.v);
    run.grad("g", grads.gate);
    run.grad("S", grads.initial);
}

pub(super) fn kda(run: &mut Run, dims: &Dims) {
    use fastweight_ops::kda::reference::{Inputs, backward, forward};
    let inputs = Inputs {
        dims,
        scale: run.problem.scale,
        q: run.needed("q"),
        k: run.needed("k"),
        v: run.needed("v"),
        beta: run.needed("beta"),
        gate: run.needed("g"),
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

pub(super) fn dplr(run: &mut Run, dims: &Dims) {
    use fastweight_ops::dplr::reference::{Inputs, backward, forward};
    let inputs = Inputs {
        dims,
        scale: run.problem.scale,
        q: run.needed("q"),
        w: run.needed("w"),
        k: run.needed("k"),
        v: run.needed("v"),
        a: run.needed("a"),
        b: run.needed("b"),
        initial: run.input("S"),
    };
    let out = forward(&inputs);
    let grads = backward(&inputs, &run.up("o", out.o.len()), &run.up("S", out.state.len()));
    run.output("o", vec![dims.batch, dims.time, dims.heads, dims.value], out.o);
    run.output("S", vec![dims.states(), dims.heads, dims.key, dims.value], out.state);
    run.grad("q", grads.q);
    run.grad("w", grads.w);
    run.grad("k", grads.k);
    run.grad("v", grads.v);
    run.grad("a", grads.a);
    run.grad("b", grads.b);
    run.grad("S", grads.initial);
}
