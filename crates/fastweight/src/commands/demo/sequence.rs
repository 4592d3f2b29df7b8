//! One head of one row, run through the operators: their float64 definitions and their float32 functions.

use burn::tensor::{DType, Device, Tensor, TensorData};
use fastweight::ops::kernel::Dims;
use fastweight::ops::softmax::{self, SoftmaxOptions};
use fastweight::ops::{OpError, SequenceOptions, delta, linear, normalised_linear};

use crate::error::CommandError;

/// How a sequence is computed.
#[derive(Debug, Clone, Copy)]
pub enum Precision<'a> {
    /// The plain loop that defines the operator.
    Float64,
    /// The public function on tensors of a device.
    Float32(&'a Device),
}

impl<'a> Precision<'a> {
    /// Both, the definition first.
    pub fn both(device: &'a Device) -> [Self; 2] {
        [Self::Float64, Self::Float32(device)]
    }

    /// For the name of a quantity.
    pub fn label(self) -> &'static str {
        match self {
            Self::Float64 => "float64 loop",
            Self::Float32(_) => "float32 operator",
        }
    }

    /// Largest error of a few operations on numbers near 1.
    pub fn tolerance(self) -> f64 {
        match self {
            Self::Float64 => 1e-12,
            Self::Float32(_) => 1e-5,
        }
    }
}

/// Which memory reads the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Linear attention: values are added.
    Additive,
    /// The delta rule: what a key reads is corrected.
    Delta,
    /// ELU+1 linear attention with its normaliser.
    Normalised,
    /// Softmax attention.
    Softmax,
}

/// Tokens of one head.
#[derive(Debug, Clone, Default)]
pub struct Sequence {
    /// Key size.
    pub key: usize,
    /// Value size.
    pub value: usize,
    /// Queries `[T,K]`.
    pub q: Vec<f64>,
    /// Keys `[T,K]`.
    pub k: Vec<f64>,
    /// Values `[T,V]`.
    pub v: Vec<f64>,
    /// Write strengths `[T]`, read by the delta rule.
    pub beta: Vec<f64>,
    /// Log decays `[T]`, read by the additive and the delta rule.
    pub gate: Vec<f64>,
    /// The state before the first token `[K,V]`, zero when absent; read by the additive and the delta rule.
    pub initial: Option<Vec<f64>>,
}

/// What comes out of a sequence.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Readings `[T,V]`.
    pub o: Vec<f64>,
    /// The memory after the last token `[K,V]`; empty for softmax attention.
    pub state: Vec<f64>,
}

/// One association to write.
#[derive(Debug, Clone, Copy)]
pub struct Write<'a> {
    /// Key.
    pub key: &'a [f64],
    /// Value.
    pub value: &'a [f64],
    /// Write strength.
    pub beta: f64,
    /// What the state is multiplied by before the write.
    pub decay: f64,
}

impl<'a> Write<'a> {
    /// A full write without decay.
    pub fn new(key: &'a [f64], value: &'a [f64]) -> Self {
        Self { key, value, beta: 1.0, decay: 1.0 }
    }
}

impl Sequence {
    /// Full writes without decay of `q, k [T,K]`, `v [T,V]`.
    pub fn new(key: usize, value: usize, q: Vec<f64>, k: Vec<f64>, v: Vec<f64>) -> Self {
        let time = k.len() / key.max(1);
        Self { key, value, q, k, v, beta: vec![1.0; time], gate: vec![0.0; time], initial: None }
    }

    /// Writes one association after the other; the last token reads `query`.
    pub fn of_writes(writes: &[Write], query: &[f64]) -> Self {
        let concat = |part: fn(&Write) -> Vec<f64>| writes.iter().flat_map(part).collect();
        let mut q = vec![0.0; query.len() * (writes.len() - 1)];
        q.extend(query);
        Self {
            key: query.len(),
            value: writes[0].value.len(),
            q,
            k: concat(|write| write.key.to_vec()),
            v: concat(|write| write.value.to_vec()),
            beta: concat(|write| vec![write.beta]),
            gate: concat(|write| vec![write.decay.ln()]),
            initial: None,
        }
    }

    fn time(&self) -> usize {
        self.beta.len()
    }

    /// Runs the sequence. The additive and the delta rule read without a scale, softmax attention with
    /// `1 / sqrt(K)`.
    ///
    /// # Errors
    /// [`CommandError::Failure`] when the operator refuses the sequence.
    pub fn run(&self, rule: Rule, precision: Precision) -> Result<Outcome, CommandError> {
        match precision {
            Precision::Float64 => Ok(self.in_float64(rule)),
            Precision::Float32(device) => self.in_float32(rule, device).map_err(CommandError::failure),
        }
    }

    /// What the last token reads.
    ///
    /// # Errors
    /// As [`Sequence::run`].
    pub fn answer(&self, rule: Rule, precision: Precision) -> Result<Vec<f64>, CommandError> {
        Ok(self.run(rule, precision)?.o.split_off((self.time() - 1) * self.value))
    }

    fn in_float64(&self, rule: Rule) -> Outcome {
        let Self { key, value, q, k, v, beta, gate, initial } = self;
        let dims = &Dims {
            batch: 1,
            time: self.time(),
            heads: 1,
            key: *key,
            value: *value,
            scale: 1.0,
            offsets: None,
        };
        let initial = initial.as_deref();
        match rule {
            Rule::Additive => {
                let gate = linear::reference::Gate::PerToken(gate);
                let out = linear::reference::forward(&linear::reference::Inputs {
                    dims,
                    scale: 1.0,
                    q,
                    k,
                    v,
                    gate,
                    initial,
                });
                Outcome { o: out.o, state: out.state }
            }
            Rule::Delta => {
                let gate = Some(gate.as_slice());
                let inputs = delta::reference::Inputs { dims, scale: 1.0, q, k, v, beta, gate, initial };
                let out = delta::reference::forward(&inputs);
                Outcome { o: out.o, state: out.state }
            }
            Rule::Normalised => {
                let out = normalised_linear::reference::forward(&self.normalised_inputs(dims));
                Outcome { o: out.o, state: out.s }
            }
            Rule::Softmax => {
                let sizes = &softmax::Sizes {
                    batch: 1,
                    time: self.time(),
                    heads: 1,
                    groups: 1,
                    key: *key,
                    value: *value,
                    scale: 1.0,
                    window: usize::MAX,
                    offsets: None,
                    cache: (0, vec![0]),
                };
                let scale = 1.0 / (*key as f64).sqrt();
                let inputs = softmax::reference::Inputs { sizes, scale, q, k, v, cache: None };
                Outcome { o: softmax::reference::forward(&inputs), state: Vec::new() }
            }
        }
    }

    fn normalised_inputs<'a>(&'a self, dims: &'a Dims) -> normalised_linear::reference::Inputs<'a> {
        normalised_linear::reference::Inputs {
            dims,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            gate: None,
            initial: None,
        }
    }

    /// ELU+1 linear attention without a state, in float64: every token weighs all earlier ones and itself. `[T,V]`.
    pub fn explicit(&self) -> Vec<f64> {
        let dims = Dims {
            batch: 1,
            time: self.time(),
            heads: 1,
            key: self.key,
            value: self.value,
            scale: 1.0,
            offsets: None,
        };
        normalised_linear::reference::forward_explicit(&self.normalised_inputs(&dims))
    }

    fn in_float32(&self, rule: Rule, device: &Device) -> Result<Outcome, OpError> {
        let time = self.time();
        let (q, k) = (
            self.tensor(&self.q, [1, time, 1, self.key], device),
            self.tensor(&self.k, [1, time, 1, self.key], device),
        );
        let v = self.tensor(&self.v, [1, time, 1, self.value], device);
        let per_token = |values: &[f64]| self.tensor(values, [1, time, 1], device);
        let initial = self.initial.as_ref().map(|s| self.tensor(s, [1, 1, self.key, self.value], device));
        let options = SequenceOptions::with_scale(1.0);
        let (o, state) = match rule {
            Rule::Additive => {
                let gate = linear::LinearGate::PerToken(per_token(&self.gate));
                linear::linear_attention(q, k, v, gate, initial, &options)?
            }
            Rule::Delta => {
                let gate = Some(per_token(&self.gate));
                delta::delta_rule(q, k, v, per_token(&self.beta), gate, initial, &options)?
            }
            Rule::Normalised => {
                let (o, s, _) =
                    normalised_linear::normalised_linear_attention(q, k, v, None, None, &options)?;
                (o, s)
            }
            Rule::Softmax => {
                let o = softmax::softmax_attention(q, k, v, None, &SoftmaxOptions::default())?;
                return Ok(Outcome { o: numbers(o), state: Vec::new() });
            }
        };
        Ok(Outcome { o: numbers(o), state: numbers(state) })
    }

    /// ELU+1 linear attention in float32, one token after the other. `[T,V]`.
    ///
    /// # Errors
    /// [`CommandError::Failure`] when the operator refuses a token.
    pub fn normalised_steps(&self, device: &Device) -> Result<Vec<f64>, CommandError> {
        let mut s = Tensor::zeros([1, 1, self.key, self.value], device);
        let mut z = Tensor::zeros([1, 1, self.key], device);
        let mut readings = Vec::with_capacity(self.v.len());
        let tokens = self.q.chunks(self.key).zip(self.k.chunks(self.key)).zip(self.v.chunks(self.value));
        for ((q, k), v) in tokens {
            let (q, k) = (self.tensor(q, [1, 1, self.key], device), self.tensor(k, [1, 1, self.key], device));
            let v = self.tensor(v, [1, 1, self.value], device);
            let o;
            (o, s, z) = normalised_linear::normalised_linear_attention_step(q, k, v, None, s, z)
                .map_err(CommandError::failure)?;
            readings.extend(numbers(o));
        }
        Ok(readings)
    }

    /// Linear attention without a direction in float32: every token reads the sum over all. `[T,V]`.
    ///
    /// # Errors
    /// [`CommandError::Failure`] when the operator refuses the sequence.
    pub fn noncausal(&self, device: &Device) -> Result<Vec<f64>, CommandError> {
        let shape = |size| [1, self.time(), 1, size];
        let (q, k) =
            (self.tensor(&self.q, shape(self.key), device), self.tensor(&self.k, shape(self.key), device));
        let v = self.tensor(&self.v, shape(self.value), device);
        let options = SequenceOptions::with_scale(1.0);
        linear::linear_attention_noncausal(q, k, v, &options).map(numbers).map_err(CommandError::failure)
    }

    fn tensor<const D: usize>(&self, values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), device)
    }
}

/// The numbers of a tensor, row-major.
pub fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().convert_dtype(DType::F64).iter::<f64>().collect()
}

/// The largest difference between two lists of the same length.
pub fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |largest, x| if x > largest || x.is_nan() { x } else { largest })
}
