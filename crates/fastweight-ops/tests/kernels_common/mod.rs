//! Random problems for the fused kernels, and the float64 loops' answers to them.
#![allow(dead_code)]

use fastweight_ops::delta::{cpu::FusedDelta, reference as delta};
use fastweight_ops::fused::FusedOp;
use fastweight_ops::kernel::Dims;
use fastweight_ops::linear::cpu::{FusedLinear, GateKind};
use fastweight_ops::linear::reference as linear;
use fastweight_ops::normalised_linear::{cpu::FusedNormalisedLinear, reference as normalised};

/// Seeded uniform numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `[0, 1)`.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| 2.0 * self.unit() - 1.0).collect()
    }
}

/// How strong the log gates are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gates {
    None,
    Zero,
    Weak,
    Strong,
    Twenty,
    /// Weak, with `-inf` now and then.
    Resets,
    /// Zero, weak, strong, beyond float32's exponents, `-inf`.
    Mixed,
}

impl Gates {
    pub const ALL: [Self; 7] =
        [Self::None, Self::Zero, Self::Weak, Self::Strong, Self::Twenty, Self::Resets, Self::Mixed];

    pub fn draw(self, random: &mut Random) -> f32 {
        let weak = -0.2 * random.unit();
        match self {
            Self::None | Self::Zero => 0.0,
            Self::Weak => weak,
            Self::Strong => -60.0 * random.unit(),
            Self::Twenty => -20.0,
            Self::Resets if random.below(9) == 0 => f32::NEG_INFINITY,
            Self::Resets => weak,
            Self::Mixed => match random.below(8) {
                0 => f32::NEG_INFINITY,
                1 => -1e30,
                2 => -20.3,
                3 => 0.0,
                4 => -3.7,
                _ => weak,
            },
        }
    }
}

/// Which operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Operator {
    Delta,
    Linear,
    LinearPerHead,
    Normalised,
}

impl Operator {
    pub const ALL: [Self; 4] = [Self::Delta, Self::Linear, Self::LinearPerHead, Self::Normalised];
}

/// A problem: an operator, its inputs in the kernel's order, gradients of its outputs.
#[derive(Debug, Clone)]
pub struct Problem {
    pub operator: Operator,
    pub dims: Dims,
    pub gates: Gates,
    pub inputs: Vec<Vec<f32>>,
    pub grads: Vec<Vec<f32>>,
}

pub fn dims(batch: usize, time: usize, heads: usize, key: usize, value: usize) -> Dims {
    Dims { batch, time, heads, key, value, scale: 1.0 / (key as f32).sqrt(), offsets: None }
}

impl Problem {
    pub fn new(operator: Operator, dims: Dims, gates: Gates, seed: u64) -> Self {
        let r = &mut Random(seed);
        let tokens = dims.batch * dims.time * dims.heads;
        let states = dims.states() * dims.heads;
        let q = r.vector(tokens * dims.key);
        let mut k = r.vector(tokens * dims.key);
        let v = r.vector(tokens * dims.value);
        let state = r.vector(states * dims.key * dims.value);
        let mut inputs = match operator {
            Operator::Delta => {
                for key in k.chunks_exact_mut(dims.key) {
                    let norm = key.iter().map(|x| x * x).sum::<f32>().sqrt();
                    key.iter_mut().for_each(|x| *x /= norm);
                }
                let beta = (0..tokens).map(|_| match r.below(5) {
                    0 => 0.0,
                    1 => 1.0,
                    2 => 2.0,
                    _ => 2.0 * r.unit(),
                });
                let beta = beta.collect();
                vec![q, k, v, beta, state]
            }
            Operator::Normalised => {
                let state = state.iter().map(|x| x.abs()).collect();
                let z = r.vector(states * dims.key).iter().map(|x| x.abs()).collect();
                vec![q, k, v, state, z]
            }
            _ => vec![q, k, v, state],
        };
        if gates != Gates::None {
            let count = if operator == Operator::LinearPerHead { dims.heads } else { tokens };
            inputs.push((0..count).map(|_| gates.draw(r)).collect());
        }
        let mut grads = vec![r.vector(tokens * dims.value), r.vector(states * dims.key * dims.value)];
        if operator == Operator::Normalised {
            grads.push(r.vector(states * dims.key));
        }
        Self { operator, dims, gates, inputs, grads }
    }

    pub fn op(&self) -> Box<dyn FusedOp> {
        let dims = self.dims.clone();
        let gated = self.gates != Gates::None;
        match self.operator {
            Operator::Delta => Box::new(FusedDelta { dims, gated }),
            Operator::Normalised => Box::new(FusedNormalisedLinear { dims, gated }),
            Operator::Linear | Operator::LinearPerHead => {
                let gate = match self.operator {
                    _ if !gated => GateKind::None,
                    Operator::Linear => GateKind::PerToken,
                    _ => GateKind::PerHead,
                };
                Box::new(FusedLinear { dims, gate })
            }
        }
    }

    /// Outputs, then gradients of the inputs, from the fused kernel.
    pub fn fused(&self) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let op = self.op();
        let inputs: Vec<&[f32]> = self.inputs.iter().map(Vec::as_slice).collect();
        let plain = op.forward(&inputs, false);
        let forward = op.forward(&inputs, true);
        assert_eq!(bits(&plain.outputs), bits(&forward.outputs), "saving must not change the outputs");
        let shapes: Vec<usize> = op.output_shapes().iter().map(|shape| shape.iter().product()).collect();
        let lens: Vec<usize> = forward.outputs.iter().map(Vec::len).collect();
        assert_eq!(shapes, lens, "output shapes");
        let grads: Vec<Option<&[f32]>> = self.grads.iter().map(|g| Some(g.as_slice())).collect();
        let needs = vec![true; inputs.len()];
        let gradients = op.backward(&inputs, &forward.saved, &grads, &needs);
        (forward.outputs, gradients.into_iter().map(|g| g.expect("a needed gradient")).collect())
    }

    /// The same from the float64 loops.
    pub fn reference(&self) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let x: Vec<Vec<f64>> = self.inputs.iter().map(|x| wide(x)).collect();
        let g: Vec<Vec<f64>> = self.grads.iter().map(|x| wide(x)).collect();
        let dims = &self.dims;
        let scale = f64::from(dims.scale);
        let gated = self.gates != Gates::None;
        let (q, k, v) = (&x[0][..], &x[1][..], &x[2][..]);
        let (outputs, mut gradients) = match self.operator {
            Operator::Delta => {
                let gate = gated.then(|| &x[5][..]);
                let inputs = delta::Inputs { dims, scale, q, k, v, beta: &x[3], gate, initial: Some(&x[4]) };
                let out = delta::forward(&inputs);
                let d = delta::backward(&inputs, &g[0], &g[1]);
                (vec![out.o, out.state], vec![d.q, d.k, d.v, d.beta, d.initial, d.gate])
            }
            Operator::Normalised => {
                let gate = gated.then(|| &x[5][..]);
                let inputs = normalised::Inputs { dims, q, k, v, gate, initial: Some((&x[3], &x[4])) };
                let out = normalised::forward(&inputs);
                let d = normalised::backward(&inputs, &g[0], &g[1], &g[2]);
                (vec![out.o, out.s, out.z], vec![d.q, d.k, d.v, d.s, d.z, d.gate])
            }
            Operator::Linear | Operator::LinearPerHead => {
                let gate = match self.operator {
                    _ if !gated => linear::Gate::None,
                    Operator::Linear => linear::Gate::PerToken(&x[4]),
                    _ => linear::Gate::PerHead(&x[4]),
                };
                let inputs = linear::Inputs { dims, scale, q, k, v, gate, initial: Some(&x[3]) };
                let out = linear::forward(&inputs);
                let d = linear::backward(&inputs, &g[0], &g[1]);
                (vec![out.o, out.state], vec![d.q, d.k, d.v, d.initial, d.gate])
            }
        };
        gradients.truncate(self.inputs.len());
        (outputs, gradients)
    }

    /// Checks the fused kernel against the loops: relative RMS 1e-5 on outputs, 1e-4 on gradients, and
    /// everything finite. A gradient of strong gates is next to nothing, so it is measured against that of v.
    pub fn check(&self) {
        let what = format!("{:?} {:?} gates {:?}", self.operator, self.dims, self.gates);
        let (outputs, gradients) = self.fused();
        let (outputs64, gradients64) = self.reference();
        for (i, (found, expected)) in outputs.iter().zip(&outputs64).enumerate() {
            let error = rms_error(found, expected) / rms(expected).max(1e-30);
            assert!(error < 1e-5, "{what}: output {i}: relative RMS error {error:.2e}");
        }
        let floor = rms(&gradients64[2]) * 1e-1;
        for (i, (found, expected)) in gradients.iter().zip(&gradients64).enumerate() {
            // One key makes the normalised output independent of q, up to eps.
            let tiny = self.dims.key == 1 && self.operator == Operator::Normalised;
            let strong = tiny || !matches!(self.gates, Gates::None | Gates::Zero | Gates::Weak);
            let size = if strong { rms(expected).max(floor) } else { rms(expected) };
            let error = rms_error(found, expected) / size.max(1e-30);
            assert!(error < 1e-4, "{what}: gradient {i}: relative RMS error {error:.2e}");
        }
    }
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

pub fn bits(x: &[Vec<f32>]) -> Vec<Vec<u32>> {
    x.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
}

pub fn rms(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

pub fn rms_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "lengths");
    assert!(found.iter().all(|x| x.is_finite()), "not finite");
    let differences: Vec<f64> = found.iter().zip(expected).map(|(a, b)| f64::from(*a) - b).collect();
    rms(&differences)
}
