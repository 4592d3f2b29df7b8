//! The public functions on named arrays, over whole sequences and token by token.

mod delta_product;
mod sequence;
mod steps;
mod ttt;

use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use fastweight_ops::{OpError, Path};

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
                // What TTT gathered takes no part at the start of a mini-batch.
                let idle = name.starts_with("G").then(|| Array::zeros(self.problem.shape(name)));
                if let Some(array) = gradient(&grads).or(idle) {
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
        Form::Fused => sequence::run(&mut tape, Path::Fused)?,
        Form::Steps | Form::TrackedSteps => steps::run(&mut tape)?,
        _ => sequence::run(&mut tape, Path::Composed)?,
    }
    Ok(tape.finish())
}
