//! Training through a deep memory, to see that nothing stops being a number.

use std::time::{Duration, Instant};

use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor, TensorData};
use fastweight_ops::deep_memory::{DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, deep_memory};
use fastweight_ops::norm::l2_normalise;
use fastweight_ops::{OpError, Path};

/// What is trained: projections into a memory, the memory's start, its LayerNorm.
#[derive(Debug, Clone)]
pub struct Training {
    pub memory: DeepMemory,
    pub batch: usize,
    pub context: usize,
    pub heads: usize,
    /// Numbers of a head's key and value.
    pub size: usize,
    pub steps: usize,
    /// Largest rate of a token.
    pub rate: f32,
    /// Share forgotten at a token before training.
    pub decay: f32,
    /// Whether every output has gates of its own.
    pub outputs: bool,
    pub path: Path,
}

/// The loss before each step, and the time they took.
#[derive(Debug, Clone)]
pub struct Trained {
    pub losses: Vec<f32>,
    /// The largest RMS of a parameter's gradient.
    pub gradients: Vec<f32>,
    pub forward: Duration,
    pub backward: Duration,
}

/// Numbers of mean zero in `(-bound, bound)`, a pure function of the seed.
fn uniform<const D: usize>(seed: u64, shape: [usize; D], bound: f32, device: &Device) -> Tensor<D> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * bound
    };
    let values: Vec<f32> = (0..8 + shape.iter().product::<usize>()).map(|_| next()).skip(8).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

impl Training {
    /// Numbers of a gate.
    fn gates(&self) -> usize {
        self.heads * if self.outputs { self.memory.output_count(self.size, self.size) } else { 1 }
    }

    /// Gates, projections, the memory's weights, the LayerNorm.
    fn start(&self, device: &Device) -> Vec<Tensor<3>> {
        let width = self.heads * self.size;
        let bound = (3.0 / width as f32).sqrt();
        let mut all: Vec<Tensor<3>> =
            (0..3).map(|i| uniform(10 + i, [1, width, width], bound, device)).collect();
        all.push(uniform(13, [1, width, 3 * self.gates()], bound, device));
        all.push(Tensor::ones([1, self.heads, self.size], device));
        all.push(Tensor::zeros([1, self.heads, self.size], device));
        for (i, [from, to]) in self.memory.weight_shapes(self.size, self.size).into_iter().enumerate() {
            all.push(uniform(20 + i as u64, [self.heads, from, to], (3.0 / from as f32).sqrt(), device));
        }
        all
    }

    /// The mean squared error of the memory's reading against the value before, as a next-token loss.
    fn loss(&self, parameters: &[Tensor<3>], x: Tensor<3>) -> Result<Tensor<1>, OpError> {
        let Self { batch, context, heads, size, .. } = *self;
        let vectors =
            |i: usize| x.clone().matmul(parameters[i].clone()).reshape([batch, context, heads, size]);
        let gates = x.clone().matmul(parameters[3].clone());
        let gate = |i: usize, shift: f32, factor: f32| {
            let count = self.gates();
            let x = sigmoid(gates.clone().narrow(2, i * count, count) + shift) * factor;
            Some(match self.outputs {
                true => DeepGate::Outputs(x.reshape([batch, context, heads, count / heads])),
                false => DeepGate::Heads(x),
            })
        };
        let tokens = DeepTokens {
            q: l2_normalise(vectors(0), 1e-6),
            k: l2_normalise(vectors(1), 1e-6),
            v: vectors(2),
            rate: gate(0, 0.0, self.rate),
            momentum: gate(1, 0.0, 1.0),
            decay: gate(2, self.decay.ln(), 1.0),
            threshold: None,
        };
        let norm = DeepNorm {
            weight: parameters[4].clone().squeeze_dim(0),
            bias: parameters[5].clone().squeeze_dim(0),
        };
        let state = DeepState::shared(&parameters[6..], batch);
        let (o, _) = deep_memory(&self.memory, tokens, Some(&norm), state, None, self.path)?;
        let target = x.narrow(1, 1, context - 1).reshape([batch, context - 1, heads, size]);
        Ok((o.narrow(1, 0, context - 1) - target).square().mean())
    }

    /// Steps of normalised gradient descent with new random sequences.
    ///
    /// # Errors
    /// What the memory refuses, as text, or the first step whose loss or gradient is not a number.
    pub fn run(&self) -> Result<Trained, String> {
        let device = Device::flex().autodiff();
        let mut parameters: Vec<Tensor<3>> =
            self.start(&device).into_iter().map(Tensor::require_grad).collect();
        let mut trained = Trained {
            losses: Vec::new(),
            gradients: Vec::new(),
            forward: Duration::ZERO,
            backward: Duration::ZERO,
        };
        for step in 0..self.steps {
            let width = self.heads * self.size;
            // A walk, so that the next token has something to do with this one.
            let x = uniform(1000 + step as u64, [self.batch, self.context, width], 1.7, &device);
            let x = x.clone() + x.roll_dim(1, 1);
            let begin = Instant::now();
            let loss = self.loss(&parameters, x).map_err(|error| error.to_string())?;
            let value = loss.to_data().iter::<f32>().next().unwrap_or(f32::NAN);
            trained.forward += begin.elapsed();
            trained.losses.push(value);
            let begin = Instant::now();
            let grads = loss.backward();
            trained.backward += begin.elapsed();
            let mut largest = 0.0_f32;
            for (i, parameter) in parameters.iter_mut().enumerate() {
                let Some(grad) = parameter.grad(&grads) else { continue };
                let size =
                    grad.clone().square().mean().sqrt().to_data().iter::<f32>().next().unwrap_or(f32::NAN);
                if !(value.is_finite() && size.is_finite()) {
                    return Err(format!("step {step}: loss {value}, gradient of parameter {i} {size}"));
                }
                largest = largest.max(size);
                let moved = parameter.clone().inner() - grad.mul_scalar(0.01 / (size + 1e-8));
                *parameter = Tensor::from_inner(moved).require_grad();
            }
            trained.gradients.push(largest);
        }
        Ok(trained)
    }
}
