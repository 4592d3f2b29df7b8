//! The public functions on named arrays, over whole sequences and token by token.

use std::ops::Range;

use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use fastweight_ops::delta::{delta_rule, delta_rule_step};
use fastweight_ops::linear::{LinearGate, linear_attention, linear_attention_step};
use fastweight_ops::normalised_linear::{normalised_linear_attention, normalised_linear_attention_step};
use fastweight_ops::softmax::{KvCache, SoftmaxOptions, softmax_attention};
use fastweight_ops::{OpError, Path, SequenceOptions};

use super::{Array, Form, Operator, Outcome, Problem};

type Gradient = Box<dyn Fn(&Gradients) -> Option<Array>>;

/// Inputs as tensors, and the loss that gathers the outputs.
struct Tape<'a> {
    problem: &'a Problem,
    device: Device,
    dtype: DType,
    tracked: bool,
    gradients: Vec<(String, Gradient)>,
    loss: Option<Tensor<1>>,
    outcome: Outcome,
}

fn read<const D: usize>(tensor: &Tensor<D>) -> Array {
    Array::new(&tensor.dims(), tensor.to_data().iter::<f64>().collect())
}

impl Tape<'_> {
    fn constant<const D: usize>(&self, array: &Array) -> Tensor<D> {
        let options = (&self.device, self.dtype);
        match self.dtype {
            DType::F64 => {
                Tensor::from_data(TensorData::new(array.values.clone(), array.shape.clone()), options)
            }
            _ => {
                let values: Vec<f32> = array.values.iter().map(|&x| x as f32).collect();
                Tensor::from_data(TensorData::new(values, array.shape.clone()), options)
            }
        }
    }

    fn input<const D: usize>(&mut self, name: &str) -> Option<Tensor<D>> {
        let tensor = self.constant(self.problem.inputs.get(name)?);
        if !self.tracked {
            return Some(tensor);
        }
        let leaf = tensor.require_grad();
        let kept = leaf.clone();
        self.gradients.push((name.into(), Box::new(move |grads| kept.grad(grads).map(|g| read(&g)))));
        Some(leaf)
    }

    fn needed<const D: usize>(&mut self, name: &str) -> Tensor<D> {
        self.input(name).unwrap_or_else(|| panic!("the problem has no {name}"))
    }

    /// `q`, and the scale left to the operator: float64 cannot pass through the float32 option.
    fn query(&mut self) -> (Tensor<4>, Option<f32>) {
        let q = self.needed("q");
        match self.dtype {
            DType::F64 if self.problem.operator != Operator::NormalisedLinear => {
                (q.mul_scalar(self.problem.scale), Some(1.0))
            }
            _ => (q, Some(self.problem.scale as f32)),
        }
    }

    fn output<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) {
        if let Some(up) = self.problem.up.get(name).filter(|_| self.tracked) {
            let term = (tensor.clone() * self.constant(up)).sum();
            self.loss = Some(match self.loss.take() {
                Some(loss) => loss + term,
                None => term,
            });
        }
        self.outcome.outputs.insert(name.into(), read(&tensor));
    }

    fn finish(mut self) -> Outcome {
        if let Some(loss) = self.loss.take() {
            let grads = loss.backward();
            for (name, gradient) in &self.gradients {
                if let Some(array) = gradient(&grads) {
                    self.outcome.grads.insert(name.clone(), array);
                }
            }
        }
        self.outcome
    }
}

pub fn run(problem: &Problem, form: Form) -> Result<Outcome, OpError> {
    let tracked = form != Form::Steps;
    let device = if tracked { Device::flex().autodiff() } else { Device::flex() };
    let dtype = if form.is_f64() { DType::F64 } else { DType::F32 };
    let outcome = Outcome::default();
    let mut tape = Tape { problem, device, dtype, tracked, gradients: Vec::new(), loss: None, outcome };
    match form {
        Form::Fused => sequence(&mut tape, Path::Fused)?,
        Form::Steps | Form::TrackedSteps => steps(&mut tape)?,
        _ => sequence(&mut tape, Path::Composed)?,
    }
    Ok(tape.finish())
}

fn sequence(tape: &mut Tape, path: Path) -> Result<(), OpError> {
    let problem = tape.problem;
    let (q, scale) = tape.query();
    let (k, v) = (tape.needed("k"), tape.needed("v"));
    let offsets = problem.offsets()?;
    let options = SequenceOptions { scale, offsets: offsets.clone(), path };
    match problem.operator {
        Operator::Softmax => {
            let cache = tape.input("k_cache").zip(tape.input("v_cache"));
            let cache = cache.map(|(k, v)| KvCache { k, v, lengths: None });
            let options = SoftmaxOptions { scale, window: problem.window, offsets, path };
            let o = softmax_attention(q, k, v, cache, &options)?;
            tape.output("o", o);
        }
        Operator::Linear | Operator::ScalarGatedLinear => {
            let gate = match problem.inputs.get("g").map(|gate| gate.shape.len()) {
                None => LinearGate::None,
                Some(1) => LinearGate::PerHead(tape.needed("g")),
                Some(_) => LinearGate::PerToken(tape.needed("g")),
            };
            let initial = tape.input("S");
            let (o, s) = linear_attention(q, k, v, gate, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
        }
        Operator::NormalisedLinear => {
            let initial = tape.input("S").zip(tape.input("z"));
            let (o, s, z) = normalised_linear_attention(q, k, v, tape.input("g"), initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
            tape.output("z", z);
        }
        Operator::Delta | Operator::GatedDelta => {
            let (beta, gate, initial) = (tape.needed("beta"), tape.input("g"), tape.input("S"));
            let (o, s) = delta_rule(q, k, v, beta, gate, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
        }
    }
    Ok(())
}

/// What one sequence, or all rows of a batch, hold between two tokens.
#[derive(Default)]
struct Held {
    s: Option<Tensor<4>>,
    z: Option<Tensor<3>>,
    cache: Option<KvCache>,
}

fn steps(tape: &mut Tape) -> Result<(), OpError> {
    let problem = tape.problem;
    let (q, scale) = tape.query();
    let (k, v): (Tensor<4>, Tensor<4>) = (tape.needed("k"), tape.needed("v"));
    let (beta, gate) = (tape.input::<3>("beta"), steps_gate(tape));
    let (s, z) = (tape.input::<4>("S"), tape.input::<3>("z"));
    let cache = tape.input::<4>("k_cache").zip(tape.input::<4>("v_cache"));
    let runs: Vec<(Range<usize>, Range<usize>)> = match problem.offsets()? {
        None => vec![(0..problem.shape("q")[0], 0..problem.time())],
        Some(offsets) => offsets.ranges().enumerate().map(|(n, tokens)| (n..n + 1, tokens)).collect(),
    };
    let (mut outputs, mut states, mut normalisers) = (Vec::new(), Vec::new(), Vec::new());
    for (rows, tokens) in runs {
        let of4 = |x: &Tensor<4>| x.clone().narrow(0, rows.start, rows.len());
        let mut held = Held {
            s: s.as_ref().map(of4),
            z: z.as_ref().map(|z| z.clone().narrow(0, rows.start, rows.len())),
            cache: cache.as_ref().map(|(k, v)| KvCache { k: of4(k), v: of4(v), lengths: None }),
        };
        for t in tokens {
            let at4 = |x: &Tensor<4>| x.clone().narrow(1, t, 1);
            let at = |x: &Tensor<4>| at4(x).squeeze_dim::<3>(1);
            let scalar = |x: &Tensor<3>| x.clone().narrow(1, t, 1).squeeze_dim::<2>(1);
            let (beta, gate) = (beta.as_ref().map(scalar), gate.as_ref().map(scalar));
            let o = match problem.operator {
                Operator::Softmax => {
                    let options = SoftmaxOptions { scale, window: problem.window, ..Default::default() };
                    let (q, k, v) = (at4(&q), at4(&k), at4(&v));
                    let o = softmax_attention(q, k.clone(), v.clone(), held.cache.clone(), &options)?;
                    held.cache = Some(match held.cache.take() {
                        Some(cache) => {
                            let [k, v] = [[cache.k, k], [cache.v, v]].map(|pair| Tensor::cat(pair.into(), 1));
                            KvCache { k, v, lengths: None }
                        }
                        None => KvCache { k, v, lengths: None },
                    });
                    o.squeeze_dim(1)
                }
                Operator::Linear | Operator::ScalarGatedLinear => {
                    let s = held.s.take().expect("a state");
                    let (o, s) = linear_attention_step(at(&q), at(&k), at(&v), gate, s, scale)?;
                    held.s = Some(s);
                    o
                }
                Operator::NormalisedLinear => {
                    let (s, z) = held.s.take().zip(held.z.take()).expect("a state");
                    let (o, s, z) = normalised_linear_attention_step(at(&q), at(&k), at(&v), gate, s, z)?;
                    (held.s, held.z) = (Some(s), Some(z));
                    o
                }
                Operator::Delta | Operator::GatedDelta => {
                    let (s, beta) = (held.s.take().expect("a state"), beta.expect("beta"));
                    let (o, s) = delta_rule_step(at(&q), at(&k), at(&v), beta, gate, s, scale)?;
                    held.s = Some(s);
                    o
                }
            };
            outputs.push(o.unsqueeze_dim::<4>(1));
        }
        states.extend(held.s);
        normalisers.extend(held.z);
    }
    tape.output("o", Tensor::cat(outputs, 1));
    if !states.is_empty() {
        tape.output("S", Tensor::cat(states, 0));
    }
    if !normalisers.is_empty() {
        tape.output("z", Tensor::cat(normalisers, 0));
    }
    Ok(())
}

/// The gate of each token; a gate per head is the same at every token.
fn steps_gate(tape: &mut Tape) -> Option<Tensor<3>> {
    let [batch, time, heads, _] = tape.problem.shape("q").try_into().unwrap();
    match tape.problem.inputs.get("g")?.shape.len() {
        1 => Some(tape.needed::<1>("g").reshape([1, 1, heads]).expand([batch, time, heads])),
        _ => tape.input("g"),
    }
}
