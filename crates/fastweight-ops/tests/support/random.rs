//! Random problems, the same for the same seed; every number is one that float32 holds.

use super::{Array, Arrays, Operator, Problem, ttt};

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

impl Random {
    /// Uniform numbers.
    pub fn between(&mut self, low: f64, high: f64, shape: &[usize]) -> Array {
        let count = shape.iter().product();
        Array::new(shape, vec![0.0; count]).map(|_| low + (high - low) * self.uniform())
    }
}

impl Array {
    /// Every number mapped, and rounded to one that float32 holds.
    pub fn map(&self, mut to: impl FnMut(f64) -> f64) -> Self {
        Self::new(&self.shape, self.values.iter().map(|&x| f64::from(to(x) as f32)).collect())
    }

    /// The same with two arrays.
    pub fn zip(&self, other: &Self, to: impl Fn(f64, f64) -> f64) -> Self {
        let mut others = other.values.iter();
        self.map(|x| to(x, *others.next().expect("as many numbers")))
    }
}

/// What the log gates of a random problem look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gates {
    /// None at all, zero where one is needed.
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
            Gates::Absent => 0.0,
            Gates::Weak | Gates::PerHead => -0.05 * size,
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
    let value = if operator == Operator::TttLinear { key } else { value };
    let sequences = sizes.sequences();
    let normalised = operator == Operator::NormalisedLinear;
    let mut problem = Problem {
        operator,
        inputs: Default::default(),
        up: Default::default(),
        scale: if normalised { 1.0 } else { f64::from(1.0 / (key as f32).sqrt()) },
        window: None,
        offsets: sizes.offsets.clone(),
    };
    tokens(&mut problem.inputs, operator, [batch, time, heads, key, value], gates, &mut random);
    problem.up.insert("o".into(), random.normals(&[batch, time, heads, value]));
    match operator {
        // One to three steps a token.
        Operator::DeltaProduct => {
            let written = [batch, time, 1 + (seed % 3) as usize, heads];
            let of = |size| [written.as_slice(), &[size]].concat();
            problem.inputs.insert("k".into(), random.unit_vectors(&of(key)));
            problem.inputs.insert("v".into(), random.normals(&of(value)));
            problem.inputs.insert("beta".into(), random.normals(&written).map(|x| 1.0 + x.tanh()));
        }
        Operator::TttLinear => {
            ttt::random(&mut problem, &mut random, seed, [sequences, heads, key, value]);
            return problem;
        }
        _ => {}
    }
    if operator == Operator::Softmax {
        for (name, size) in [("k_cache", key), ("v_cache", value)] {
            problem.inputs.insert(name.into(), random.normals(&[sequences, 5, heads, size]));
        }
        return problem;
    }
    for name in ["S", "M"].into_iter().take(1 + usize::from(operator.has_momentum())) {
        problem.inputs.insert(name.into(), random.normals(&[sequences, heads, key, value]));
        problem.up.insert(name.into(), random.normals(&[sequences, heads, key, value]));
    }
    if normalised {
        let z = random.normals(&[sequences, heads, key]).map(f64::abs);
        problem.inputs.insert("z".into(), z);
        problem.up.insert("z".into(), random.normals(&[sequences, heads, key]));
    }
    problem
}

fn tokens(
    inputs: &mut Arrays,
    operator: Operator,
    [batch, time, heads, key, value]: [usize; 5],
    gates: Gates,
    random: &mut Random,
) {
    let (vectors, numbers) = ([batch, time, heads, key], [batch, time, heads]);
    let mut input = |name: &str, array| drop(inputs.insert(name.into(), array));
    input("q", random.normals(&vectors));
    input("v", random.normals(&[batch, time, heads, value]));
    let unit = random.unit_vectors(&vectors);
    match operator {
        Operator::Softmax | Operator::NormalisedLinear | Operator::Linear | Operator::ScalarGatedLinear => {
            input("k", random.normals(&vectors));
        }
        Operator::Gla | Operator::Dplr | Operator::TttLinear => input("k", random.normals(&vectors)),
        _ => input("k", unit.clone()),
    }
    match operator {
        Operator::Softmax | Operator::Delta | Operator::TttLinear => {}
        Operator::Comba => {
            input("g", gate(random, gates, &numbers));
            input("beta", random.between(0.1, 1.0, &numbers));
            input("b_head", random.between(0.5, 1.5, &[heads]));
            input("d_head", random.normals(&[heads]));
        }
        Operator::Linear | Operator::ScalarGatedLinear if gates == Gates::PerHead => {
            input("g", gate(random, gates, &[heads]));
        }
        Operator::Linear
        | Operator::ScalarGatedLinear
        | Operator::NormalisedLinear
        | Operator::GatedDelta
        | Operator::DeltaProduct => {
            if gates != Gates::Absent {
                input("g", gate(random, gates, &numbers));
            }
        }
        Operator::Gla | Operator::Kda => input("g", gate(random, gates, &vectors)),
        // A reflection, nearly: the state stays of its size, and reading and writing are told apart.
        Operator::Dplr => {
            input("w", gate(random, gates, &vectors));
            let nearby = random.unit_vectors(&vectors);
            input("b", unit.zip(&nearby, |x, y| 0.7 * x + 0.1 * y));
            input("a", unit.map(|x| -x));
        }
        // Momentum has to die out, or errors are amplified.
        Operator::MomentumDelta => {
            input("log_alpha", gate(random, gates, &numbers));
            input("log_mu", gate(random, Gates::Strong, &numbers).map(|g| g - 0.1));
            let nearby = random.unit_vectors(&vectors);
            input("p", unit.zip(&nearby, |x, y| x + 0.2 * y));
            input("beta", random.between(0.1, 0.9, &numbers));
            input("eta", random.between(0.2, 1.2, &numbers));
        }
        Operator::Titans | Operator::TitansChannels => {
            let of_columns = [batch, time, heads, value];
            let shape = if operator == Operator::Titans { numbers.as_slice() } else { &of_columns };
            input("alpha", gate(random, gates, shape).map(|g| -g.exp_m1()));
            input("eta", random.between(0.0, 0.9, shape));
            input("theta", random.between(0.0, 0.9, shape));
        }
    }
    if matches!(operator, Operator::Delta | Operator::GatedDelta | Operator::Kda) {
        input("beta", random.normals(&numbers).map(|x| 1.0 + x.tanh()));
    }
}
