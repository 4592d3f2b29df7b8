//! The plain float64 loops on named arrays.

use fastweight_ops::kernel::Dims;
use fastweight_ops::softmax::Sizes;
use fastweight_ops::{OpError, delta, linear, normalised_linear, softmax};

use super::{Array, Arrays, Operator, Outcome, Problem, delta_loops, gated_loops, momentum_loops, ttt};

pub(super) struct Run<'a> {
    pub(super) problem: &'a Problem,
    outcome: Outcome,
}

impl<'a> Run<'a> {
    pub(super) fn input(&self, name: &str) -> Option<&'a [f64]> {
        self.problem.inputs.get(name).map(|array| array.values.as_slice())
    }

    pub(super) fn needed(&self, name: &str) -> &'a [f64] {
        self.problem.inputs[name].values.as_slice()
    }

    pub(super) fn up(&self, name: &str, length: usize) -> Vec<f64> {
        self.problem.up.get(name).map_or_else(|| vec![0.0; length], |array| array.values.clone())
    }

    pub(super) fn output(&mut self, name: &str, shape: Vec<usize>, values: Vec<f64>) {
        self.outcome.outputs.insert(name.into(), Array::new(&shape, values));
    }

    pub(super) fn grad(&mut self, name: &str, values: Vec<f64>) {
        if let Some(input) = self.problem.inputs.get(name) {
            self.outcome.grads.insert(name.into(), Array::new(&input.shape, values));
        }
    }
}

pub fn run(problem: &Problem) -> Result<Outcome, OpError> {
    let [batch, time, heads, key] = problem.shape("q").try_into().unwrap();
    if problem.operator == Operator::TttLinear {
        return ttt::reference(problem);
    }
    let value = problem.value();
    let offsets = problem.offsets()?;
    let dims = Dims { batch, time, heads, key, value, scale: problem.scale as f32, offsets: offsets.clone() };
    let mut run = Run { problem, outcome: Outcome { outputs: Arrays::new(), grads: Arrays::new() } };
    let (q, k, v) = (run.needed("q"), run.needed("k"), run.needed("v"));
    let o_shape = vec![batch, time, heads, value];
    let o_length = o_shape.iter().product();
    let s_shape = vec![dims.states(), heads, key, value];
    let s_length = s_shape.iter().product();
    match problem.operator {
        Operator::Softmax => {
            let held = problem.inputs.get("k_cache").map_or(0, |cache| cache.shape[1]);
            let sizes = Sizes {
                batch,
                time,
                heads,
                groups: problem.shape("k")[2],
                key,
                value,
                scale: problem.scale as f32,
                window: problem.window.unwrap_or(usize::MAX),
                offsets,
                cache: (held, vec![held; dims.states()]),
            };
            let cache = run.input("k_cache").zip(run.input("v_cache"));
            let inputs = softmax::reference::Inputs { sizes: &sizes, scale: problem.scale, q, k, v, cache };
            run.output("o", o_shape, softmax::reference::forward(&inputs));
            let grads = softmax::reference::backward(&inputs, &run.up("o", o_length));
            run.grad("q", grads.q);
            run.grad("k", grads.k);
            run.grad("v", grads.v);
            run.grad("k_cache", grads.k_cache);
            run.grad("v_cache", grads.v_cache);
        }
        Operator::Linear | Operator::ScalarGatedLinear => {
            use linear::reference::Gate;
            let gate = match problem.inputs.get("g") {
                None => Gate::None,
                Some(gate) if gate.shape.len() == 1 => Gate::PerHead(&gate.values),
                Some(gate) => Gate::PerToken(&gate.values),
            };
            let initial = run.input("S");
            let inputs =
                linear::reference::Inputs { dims: &dims, scale: problem.scale, q, k, v, gate, initial };
            let out = linear::reference::forward(&inputs);
            let grads = linear::reference::backward(&inputs, &run.up("o", o_length), &run.up("S", s_length));
            run.output("o", o_shape, out.o);
            run.output("S", s_shape, out.state);
            run.grad("q", grads.q);
            run.grad("k", grads.k);
            run.grad("v", grads.v);
            run.grad("g", grads.gate);
            run.grad("S", grads.initial);
        }
        Operator::NormalisedLinear => {
            let z_shape = vec![dims.states(), heads, key];
            let z_length = z_shape.iter().product();
            let initial = run.input("S").zip(run.input("z"));
            let gate = run.input("g");
            let inputs = normalised_linear::reference::Inputs { dims: &dims, q, k, v, gate, initial };
            let out = normalised_linear::reference::forward(&inputs);
            let (up_o, up_s, up_z) = (run.up("o", o_length), run.up("S", s_length), run.up("z", z_length));
            let grads = normalised_linear::reference::backward(&inputs, &up_o, &up_s, &up_z);
            run.output("o", o_shape, out.o);
            run.output("S", s_shape, out.s);
            run.output("z", z_shape, out.z);
            run.grad("q", grads.q);
            run.grad("k", grads.k);
            run.grad("v", grads.v);
            run.grad("g", grads.gate);
            run.grad("S", grads.s);
            run.grad("z", grads.z);
        }
        Operator::Delta | Operator::GatedDelta => {
            let (beta, gate, initial) = (run.needed("beta"), run.input("g"), run.input("S"));
            let inputs =
                delta::reference::Inputs { dims: &dims, scale: problem.scale, q, k, v, beta, gate, initial };
            let out = delta::reference::forward(&inputs);
            let grads = delta::reference::backward(&inputs, &run.up("o", o_length), &run.up("S", s_length));
            run.output("o", o_shape, out.o);
            run.output("S", s_shape, out.state);
            run.grad("q", grads.q);
            run.grad("k", grads.k);
            run.grad("v", grads.v);
            run.grad("beta", grads.beta);
            run.grad("g", grads.gate);
            run.grad("S", grads.initial);
        }
        Operator::Gla => gated_loops::gla(&mut run, &dims),
        Operator::Kda => gated_loops::kda(&mut run, &dims),
        Operator::Dplr => gated_loops::dplr(&mut run, &dims),
        Operator::MomentumDelta => momentum_loops::momentum_delta(&mut run, &dims),
        Operator::Titans | Operator::TitansChannels => momentum_loops::titans(&mut run, &dims),
        Operator::DeltaProduct => delta_loops::delta_product(&mut run, &dims),
        Operator::Comba => delta_loops::comba(&mut run, &dims),
        Operator::TttLinear => {}
    }
    Ok(run.outcome)
}
