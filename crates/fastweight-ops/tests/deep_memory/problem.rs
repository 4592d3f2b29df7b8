//! A call of a deep memory as plain numbers, computed by the definition and by the tensor form.

use burn::tensor::{DType, Device, Tensor, TensorData};
use fastweight_ops::deep_memory::{
    DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, InnerLoss, deep_memory, reference,
};
use fastweight_ops::kernel::Dims;
use fastweight_ops::{Offsets, Path};

use crate::comparing::{numbers, widen};

/// Numbers with a shape.
#[derive(Debug, Clone)]
pub struct Array {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

/// Which optional inputs there are.
#[derive(Debug, Clone, Copy)]
pub struct Parts {
    pub rate: bool,
    pub momentum: bool,
    pub decay: bool,
    pub norm: bool,
    /// Whether the rate, the momentum and the decay have a number for every output.
    pub outputs: [bool; 3],
}

pub const ALL: Parts = Parts { rate: true, momentum: true, decay: true, norm: true, outputs: [false; 3] };

/// One call. `inputs` by name: q k v rate momentum decay threshold norm.weight norm.bias start.i current.i momentum.i.
#[derive(Debug, Clone)]
pub struct Problem {
    pub memory: DeepMemory,
    pub dims: Dims,
    pub parts: Parts,
    pub inputs: Vec<(String, Array)>,
    pub positions: Vec<usize>,
}

/// Outputs and gradients by name.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    pub outputs: Vec<(String, Array)>,
    pub grads: Vec<(String, Array)>,
}

/// Sizes of a problem.
#[derive(Debug, Clone)]
pub struct Sizes {
    pub batch: usize,
    pub time: usize,
    pub heads: usize,
    pub key: usize,
    pub value: usize,
    pub offsets: Option<Vec<usize>>,
}

impl Sizes {
    pub fn of(batch: usize, time: usize, heads: usize, size: usize) -> Self {
        Self { batch, time, heads, key: size, value: size, offsets: None }
    }
}

fn spread(seed: u64, shape: &[usize], from: f64, to: f64) -> Array {
    let count = shape.iter().product();
    let values = widen(&numbers(seed, count))
        .iter()
        .map(|x| f64::from((from + (x + 1.0) / 2.0 * (to - from)) as f32))
        .collect();
    Array { shape: shape.to_vec(), values }
}

impl Problem {
    /// Random numbers; every row begins at `position`, in the middle of what happened before.
    pub fn new(memory: DeepMemory, sizes: &Sizes, parts: Parts, position: usize, seed: u64) -> Self {
        let Sizes { batch, time, heads, key, value, .. } = *sizes;
        let offsets = sizes.offsets.as_ref().map(|offsets| Offsets::new(offsets, time).unwrap());
        let dims = Dims { batch, time, heads, key, value, scale: 1.0, offsets };
        let mut seed = seed * 1000;
        let mut next = || {
            seed += 1;
            seed
        };
        let scalars = [batch, time, heads];
        let outputs = [batch, time, heads, memory.output_count(key, value)];
        let gate = |outputs_too: bool| if outputs_too { outputs.as_slice() } else { scalars.as_slice() };
        let [rate, momentum, decay] = parts.outputs.map(gate);
        let mut inputs: Vec<(String, Array)> = Vec::new();
        for (name, size) in [("q", key), ("k", key), ("v", value)] {
            inputs.push((name.into(), spread(next(), &[batch, time, heads, size], -1.0, 1.0)));
        }
        if parts.rate {
            inputs.push(("rate".into(), spread(next(), rate, 0.0, 0.03)));
        }
        if parts.momentum {
            inputs.push(("momentum".into(), spread(next(), momentum, 0.1, 0.9)));
        }
        if parts.decay {
            inputs.push(("decay".into(), spread(next(), decay, 0.0, 0.1)));
        }
        if memory.loss == InnerLoss::Huber {
            inputs.push(("threshold".into(), spread(next(), &scalars, 0.2, 2.5)));
        }
        if parts.norm {
            inputs.push(("norm.weight".into(), spread(next(), &[heads, value], 0.5, 1.5)));
            inputs.push(("norm.bias".into(), spread(next(), &[heads, value], -0.3, 0.3)));
        }
        let states = dims.states();
        let boundary = position.is_multiple_of(memory.chunk);
        for (layer, [from, to]) in memory.weight_shapes(key, value).into_iter().enumerate() {
            let shape = [states, heads, from, to];
            let bound = 2.5 / (from as f64).sqrt();
            let start = spread(next(), &shape, -bound, bound);
            let moved = spread(next(), &shape, -0.1, 0.1);
            let mut current = start.clone();
            if !boundary {
                current.values.iter_mut().zip(&moved.values).for_each(|(w, m)| *w += m);
            }
            inputs.push((format!("start.{layer}"), start));
            inputs.push((format!("current.{layer}"), current));
            if parts.momentum {
                inputs.push((format!("momentum.{layer}"), spread(next(), &shape, -0.1, 0.1)));
            }
        }
        if memory.window > 1 {
            let columns = key + value + 2;
            let mut recent = spread(next(), &[states, heads, memory.window - 1, columns], -1.0, 1.0);
            for token in recent.values.chunks_mut(columns) {
                token[columns - 2] = if position == 0 { 0.0 } else { 0.015 * (1.0 + token[columns - 2]) };
                token[columns - 1] += 1.2;
            }
            inputs.push(("recent.0".into(), recent));
        }
        Self { memory, dims, parts, inputs, positions: vec![position; states] }
    }

    pub fn get(&self, name: &str) -> Option<&[f64]> {
        self.inputs.iter().find(|(n, _)| n == name).map(|(_, array)| array.values.as_slice())
    }

    fn gate(&self, name: &str) -> Option<reference::Gate<'_>> {
        let (_, Array { shape, values }) = self.inputs.iter().find(|(n, _)| n == name)?;
        Some(match shape.len() {
            3 => reference::Gate::Heads(values),
            _ => reference::Gate::Outputs(values),
        })
    }

    fn layers(&self, group: &str) -> Vec<Vec<f64>> {
        (0..self.memory.depth)
            .filter_map(|i| self.get(&format!("{group}.{i}")))
            .map(<[f64]>::to_vec)
            .collect()
    }

    /// The upstream gradient of an output.
    pub fn up(&self, name: &str, count: usize) -> Vec<f64> {
        let seed = name.bytes().fold(77, |seed, byte| seed * 31 % 100_003 + u64::from(byte));
        widen(&numbers(seed, count))
    }

    /// Outputs of the definition.
    pub fn definition(&self) -> Vec<(String, Array)> {
        let current = self.layers("current");
        let mut momentum = self.layers("momentum");
        if momentum.is_empty() {
            momentum = current.iter().map(|w| vec![0.0; w.len()]).collect();
        }
        let state = reference::State {
            start: self.layers("start"),
            current,
            momentum,
            recent: self.get("recent.0").unwrap_or_default().to_vec(),
            positions: self.positions.clone(),
        };
        let recent = state.recent.len();
        let reference::Outputs { o, state } = reference::forward(&reference::Inputs {
            memory: &self.memory,
            dims: &self.dims,
            q: self.get("q").unwrap(),
            k: self.get("k").unwrap(),
            v: self.get("v").unwrap(),
            rate: self.gate("rate"),
            momentum: self.gate("momentum"),
            decay: self.gate("decay"),
            threshold: self.get("threshold"),
            norm: self.get("norm.weight").zip(self.get("norm.bias")),
            state,
        });
        let Dims { batch, time, heads, key, value, .. } = self.dims;
        let mut outputs =
            vec![("o".to_string(), Array { shape: vec![batch, time, heads, value], values: o })];
        let groups = [("start", state.start), ("current", state.current), ("momentum", state.momentum)];
        for (name, layers) in groups {
            if name == "momentum" && !self.keeps_momentum() {
                continue;
            }
            for (layer, values) in layers.into_iter().enumerate() {
                let [from, to] = self.memory.weight_shapes(key, value)[layer];
                let shape = vec![self.dims.states(), heads, from, to];
                outputs.push((format!("{name}.{layer}"), Array { shape, values }));
            }
        }
        if recent > 0 {
            let shape = vec![self.dims.states(), heads, self.memory.window - 1, key + value + 2];
            outputs.push(("recent.0".to_string(), Array { shape, values: state.recent }));
        }
        outputs
    }

    pub fn keeps_momentum(&self) -> bool {
        self.parts.momentum || self.memory.rate == fastweight_ops::deep_memory::RateOf::Reading
    }

    /// `sum(output * up)` over all outputs of the definition.
    pub fn loss(&self) -> f64 {
        let terms = self.definition().into_iter().map(|(name, array)| {
            let up = self.up(&name, array.values.len());
            array.values.iter().zip(&up).map(|(x, up)| x * up).sum::<f64>()
        });
        terms.sum()
    }

    /// Central differences of [`loss`](Self::loss) for every number of every input.
    pub fn differences(&self) -> Vec<(String, Array)> {
        // Newton-Schulz steps bend the loss hundreds of times more.
        let step = if self.memory.newton_schulz { 3e-6 } else { 3e-5 };
        let mut moved = self.clone();
        let mut grads = Vec::new();
        for (slot, (name, array)) in self.inputs.iter().enumerate() {
            let slope = |at: usize| {
                let mut at_distance = |by: f64| {
                    moved.inputs[slot].1.values[at] = array.values[at] + by;
                    let loss = moved.loss();
                    moved.inputs[slot].1.values[at] = array.values[at];
                    loss
                };
                let mut pair = |by: f64| at_distance(by) - at_distance(-by);
                (8.0 * pair(step) - pair(2.0 * step)) / (12.0 * step)
            };
            let values = (0..array.values.len()).map(slope).collect();
            grads.push((name.clone(), Array { shape: array.shape.clone(), values }));
        }
        grads
    }

    /// The tensor form over the stretches that end at `cuts` and at the end.
    pub fn tensors(&self, dtype: DType, path: Path, tracked: bool, cuts: &[usize]) -> Outcome {
        let device = if tracked { Device::flex().autodiff() } else { Device::flex() };
        let leaves: Vec<(String, Leaf)> = self
            .inputs
            .iter()
            .map(|(name, array)| (name.clone(), Leaf::new(array, &device, dtype, tracked)))
            .collect();
        let find = |name: &str| leaves.iter().find(|(n, _)| n == name).map(|(_, leaf)| leaf);
        let four = |name: &str| find(name).map(Leaf::four);
        let three = |name: &str| find(name).map(Leaf::three);
        let two = |name: &str| find(name).map(Leaf::two);
        let gate = |name: &str| {
            find(name).map(|leaf| match leaf {
                Leaf::Three(x) => DeepGate::Heads(x.clone()),
                leaf => DeepGate::Outputs(leaf.four()),
            })
        };
        let tokens = DeepTokens {
            q: four("q").unwrap(),
            k: four("k").unwrap(),
            v: four("v").unwrap(),
            rate: gate("rate"),
            momentum: gate("momentum"),
            decay: gate("decay"),
            threshold: three("threshold"),
        };
        let norm = two("norm.weight").zip(two("norm.bias")).map(|(weight, bias)| DeepNorm { weight, bias });
        let group = |group: &str| -> Vec<Tensor<4>> {
            (0..self.memory.depth).filter_map(|i| four(&format!("{group}.{i}"))).collect()
        };
        let momentum = group("momentum");
        let mut state = DeepState {
            start: group("start"),
            current: group("current"),
            momentum: (!momentum.is_empty()).then_some(momentum),
            recent: four("recent.0"),
            positions: self.positions.clone(),
        };
        let mut outputs = Vec::new();
        let mut from = 0;
        for &to in cuts.iter().chain([&self.dims.time]) {
            let part = narrow(&tokens, from, to - from);
            let offsets = self.dims.offsets.as_ref().filter(|_| cuts.is_empty());
            let (o, after) = deep_memory(&self.memory, part, norm.as_ref(), state, offsets, path).unwrap();
            outputs.push(o);
            state = after;
            from = to;
        }
        let mut results = vec![("o".to_string(), Tensor::cat(outputs, 1))];
        results.extend(state.tensors());
        let mut outcome = Outcome::default();
        let mut loss: Option<Tensor<1>> = None;
        for (name, tensor) in results {
            let array = read(&tensor);
            if tracked {
                let up = Array { shape: array.shape.clone(), values: self.up(&name, array.values.len()) };
                let term = (tensor * constant::<4>(&up, &device, dtype)).sum();
                loss = Some(match loss {
                    Some(loss) => loss + term,
                    None => term,
                });
            }
            outcome.outputs.push((name, array));
        }
        if let Some(loss) = loss {
            let grads = loss.backward();
            for ((name, leaf), (_, array)) in leaves.iter().zip(&self.inputs) {
                let values = leaf.grad(&grads).unwrap_or_else(|| vec![0.0; array.values.len()]);
                outcome.grads.push((name.clone(), Array { shape: array.shape.clone(), values }));
            }
        }
        outcome
    }
}

/// Tokens `from..from + length`.
pub fn narrow(tokens: &DeepTokens, from: usize, length: usize) -> DeepTokens {
    let vector = |x: &Tensor<4>| x.clone().narrow(1, from, length);
    let gate = |gate: &Option<DeepGate>| {
        gate.as_ref().map(|gate| match gate {
            DeepGate::Heads(x) => DeepGate::Heads(x.clone().narrow(1, from, length)),
            DeepGate::Outputs(x) => DeepGate::Outputs(vector(x)),
        })
    };
    DeepTokens {
        q: vector(&tokens.q),
        k: vector(&tokens.k),
        v: vector(&tokens.v),
        rate: gate(&tokens.rate),
        momentum: gate(&tokens.momentum),
        decay: gate(&tokens.decay),
        threshold: tokens.threshold.as_ref().map(|x| x.clone().narrow(1, from, length)),
    }
}

fn constant<const D: usize>(array: &Array, device: &Device, dtype: DType) -> Tensor<D> {
    let shape = array.shape.clone();
    match dtype {
        DType::F64 => Tensor::from_data(TensorData::new(array.values.clone(), shape), (device, dtype)),
        _ => {
            let values: Vec<f32> = array.values.iter().map(|&x| x as f32).collect();
            Tensor::from_data(TensorData::new(values, shape), (device, dtype))
        }
    }
}

pub fn read<const D: usize>(tensor: &Tensor<D>) -> Array {
    Array { shape: tensor.dims().to_vec(), values: tensor.to_data().iter::<f64>().collect() }
}

/// An input tensor of any rank.
enum Leaf {
    Two(Tensor<2>),
    Three(Tensor<3>),
    Four(Tensor<4>),
}

impl Leaf {
    fn new(array: &Array, device: &Device, dtype: DType, tracked: bool) -> Self {
        fn leaf<const D: usize>(tensor: Tensor<D>, tracked: bool) -> Tensor<D> {
            if tracked { tensor.require_grad() } else { tensor }
        }
        match array.shape.len() {
            2 => Self::Two(leaf(constant(array, device, dtype), tracked)),
            3 => Self::Three(leaf(constant(array, device, dtype), tracked)),
            _ => Self::Four(leaf(constant(array, device, dtype), tracked)),
        }
    }

    fn two(&self) -> Tensor<2> {
        let Self::Two(tensor) = self else { panic!("rank") };
        tensor.clone()
    }

    fn three(&self) -> Tensor<3> {
        let Self::Three(tensor) = self else { panic!("rank") };
        tensor.clone()
    }

    fn four(&self) -> Tensor<4> {
        let Self::Four(tensor) = self else { panic!("rank") };
        tensor.clone()
    }

    fn grad(&self, grads: &burn::tensor::Gradients) -> Option<Vec<f64>> {
        match self {
            Self::Two(tensor) => tensor.grad(grads).map(|g| read(&g).values),
            Self::Three(tensor) => tensor.grad(grads).map(|g| read(&g).values),
            Self::Four(tensor) => tensor.grad(grads).map(|g| read(&g).values),
        }
    }
}

fn rms(values: &[f64]) -> f64 {
    (values.iter().map(|x| x * x).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// Each array within `limit` of the expected, relative to its RMS or to a hundredth of the first's.
pub fn assert_same(label: &str, found: &[(String, Array)], expected: &[(String, Array)], limit: f64) {
    let floor = expected.first().map_or(0.0, |(_, array)| 0.01 * rms(&array.values));
    for (name, expected) in expected {
        let Some((_, found)) = found.iter().find(|(n, _)| n == name) else { panic!("{label}: no {name}") };
        assert_eq!(found.shape, expected.shape, "{label}: {name}");
        let difference: Vec<f64> = found.values.iter().zip(&expected.values).map(|(a, b)| a - b).collect();
        let error = rms(&difference) / rms(&expected.values).max(floor).max(1e-30);
        assert!(error <= limit, "{label}: {name} is off by {error:.2e}, allowed {limit:.0e}");
    }
    assert_eq!(found.len(), expected.len(), "{label}");
}
