//! Random problems, the same for the same seed; every number is one that float32 holds.

use super::{Array, Operator, Problem};

/// SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.next() >> 40) as f64 / (1_u64 << 24) as f64
    }

    /// Standard normal, rounded to float32.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        f64::from((radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32)
    }

    pub fn normals(&mut self, shape: &[usize]) -> Array {
        let count = shape.iter().product();
        Array::new(shape, (0..count).map(|_| self.normal()).collect())
    }

    /// Vectors of length 1 along the last axis.
    pub fn unit_vectors(&mut self, shape: &[usize]) -> Array {
        let mut array = self.normals(shape);
        for vector in array.values.chunks_mut(shape[shape.len() - 1]) {
            let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-3);
            vector.iter_mut().for_each(|x| *x = f64::from((*x / norm) as f32));
        }
        array
    }
}

/// What the log gates of a random problem look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gates {
    /// None at all.
    Absent,
    /// Close to zero.
    Weak,
    /// About -1.
    Strong,
    /// Weak and strong ones, zeros, -20 and resets of `-inf`, mixed.
    Mixed,
    /// -20 at every token.
    Twenty,
    /// One for each head (linear attention only, weak elsewhere).
    PerHead,
}

/// Sizes of a random problem.
#[derive(Debug, Clone)]
pub struct Sizes {
    pub batch: usize,
    pub time: usize,
    pub heads: usize,
    pub key: usize,
    pub value: usize,
    /// Documents packed in the one row; then `batch` is 1.
    pub offsets: Option<Vec<usize>>,
}

impl Sizes {
    pub fn of(batch: usize, time: usize, heads: usize, key: usize, value: usize) -> Self {
        Self { batch, time, heads, key, value, offsets: None }
    }

    pub fn sequences(&self) -> usize {
        self.offsets.as_ref().map_or(self.batch, |offsets| offsets.len() - 1)
    }
}

fn gate(random: &mut Random, gates: Gates, shape: &[usize]) -> Array {
    let mut array = random.normals(shape);
    for g in &mut array.values {
        let size = g.abs();
        *g = match gates {
            Gates::Absent | Gates::Weak | Gates::PerHead => -0.05 * size,
            Gates::Strong => -size,
            Gates::Twenty => -20.0,
            Gates::Mixed => match random.next() % 8 {
                0 => f64::NEG_INFINITY,
                1 => -20.0,
                2 => 0.0,
                3 => -3.0 * size,
                _ => -0.05 * size,
            },
        };
        *g = f64::from(*g as f32);
    }
    array
}

/// A random problem with initial states that are not symmetric and gradients from every output.
pub fn problem(operator: Operator, sizes: &Sizes, gates: Gates, seed: u64) -> Problem {
    let mut random = Random::new(seed);
    let &Sizes { batch, time, heads, key, value, .. } = sizes;
    let sequences = sizes.sequences();
    let delta = matches!(operator, Operator::Delta | Operator::GatedDelta);
    let normalised = operator == Operator::NormalisedLinear;
    let mut problem = Problem {
        operator,
        inputs: Default::default(),
        up: Default::default(),
        scale: if normalised { 1.0 } else { f64::from(1.0 / (key as f32).sqrt()) },
        window: None,
        offsets: sizes.offsets.clone(),
    };
    let mut input = |name: &str, array| drop(problem.inputs.insert(name.into(), array));
    input("q", random.normals(&[batch, time, heads, key]));
    let keys = [batch, time, heads, key];
    input("k", if delta { random.unit_vectors(&keys) } else { random.normals(&keys) });
    input("v", random.normals(&[batch, time, heads, value]));
    if delta {
        let mut beta = random.normals(&[batch, time, heads]);
        beta.values.iter_mut().for_each(|b| *b = f64::from((1.0 + (*b).tanh()) as f32));
        input("beta", beta);
    }
    let gates = if operator == Operator::Delta { Gates::Absent } else { gates };
    if operator == Operator::Softmax {
        input("k_cache", random.normals(&[sequences, 5, heads, key]));
        input("v_cache", random.normals(&[sequences, 5, heads, value]));
    } else {
        let linear = matches!(operator, Operator::Linear | Operator::ScalarGatedLinear);
        match gates {
            Gates::Absent => {}
            Gates::PerHead if linear => input("g", gate(&mut random, gates, &[heads])),
            _ => input("g", gate(&mut random, gates, &[batch, time, heads])),
        }
        input("S", random.normals(&[sequences, heads, key, value]));
    }
    problem.up.insert("o".into(), random.normals(&[batch, time, heads, value]));
    if operator != Operator::Softmax {
        problem.up.insert("S".into(), random.normals(&[sequences, heads, key, value]));
    }
    if normalised {
        let mut z = random.normals(&[sequences, heads, key]);
        z.values.iter_mut().for_each(|z| *z = z.abs());
        problem.inputs.insert("z".into(), z);
        problem.up.insert("z".into(), random.normals(&[sequences, heads, key]));
    }
    problem
}
