//! Seeded tokens and memories of any rule.

use burn::tensor::{DType, Device, Tensor, TensorData};
use fastweight_memory::rule::reference::{Layer, State, Token, Weights};
use fastweight_memory::rule::soundness::{cells, unsound};
use fastweight_memory::rule::{Bias, Gate, Learner, Memory, Retention, Rule, RuleState, Tokens};

/// Numbers in (-1, 1) that depend on the seed only.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        let mut numbers = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d);
        (0..16).for_each(|_| {
            numbers.one();
        });
        numbers
    }

    pub fn one(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) as f64 + 0.5) / (1u64 << 52) as f64 - 1.0
    }

    pub fn many(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.one()).collect()
    }
}

/// Every sound rule, with the variants of its numbers that change its way through the code.
pub fn sound_rules() -> Vec<Rule> {
    let mut rules = Vec::new();
    for (memory, bias, retention, learner) in cells() {
        if unsound(memory, bias, retention, learner).is_some() {
            continue;
        }
        // A threshold inside the range of the errors, a visible l1, a small MLP, where the rule has them.
        let mut rule = Rule::new(memory, bias, retention, learner);
        if bias == Bias::Huber {
            rule.huber_delta = 0.6;
        }
        if retention == Retention::ElasticNet {
            rule.l1 = 0.2;
        }
        if memory == Memory::Mlp {
            rule.expansion = 2;
        }
        rules.push(rule);
        if retention == Retention::Lq && !rule.mirror {
            rules.push(Rule { mirror: true, ..rule });
        }
    }
    rules
}

/// A rule in a few words.
pub fn name(rule: &Rule) -> String {
    format!(
        "{} {} {} {} window {} chunk {} {:?}{}",
        rule.memory.name(),
        rule.bias.name(),
        rule.retention.name(),
        rule.learner.name(),
        rule.window,
        rule.chunk,
        rule.gradient_at,
        if rule.mirror { " mirror" } else { "" }
    )
}

/// `count` tokens for a rule.
pub fn tokens(rule: &Rule, [key, value]: [usize; 2], count: usize, seed: u64) -> Vec<Token> {
    let mut numbers = Numbers::new(seed);
    // The l_p loss grows with the third power of the error: small rates keep it from running away.
    let most = if rule.bias == Bias::Lp && rule.learner != Learner::NewtonSchulz { 0.02 } else { 0.1 };
    (0..count)
        .map(|_| Token {
            q: numbers.many(key),
            k: numbers.many(key),
            v: numbers.many(value),
            rate: most * (0.6 + 0.4 * numbers.one()),
            decay: match rule.retention {
                Retention::None | Retention::Bregman => vec![1.0],
                Retention::ChannelDecay => (0..key).map(|_| 0.8 + 0.2 * numbers.one()).collect(),
                _ => vec![0.8 + 0.2 * numbers.one()],
            },
            momentum: if rule.has_momentum() { 0.5 + 0.4 * numbers.one() } else { 0.0 },
        })
        .collect()
}

/// A memory to start from, positive with rows of sum one where the retention asks for it.
pub fn start(rule: &Rule, [key, value]: [usize; 2], seed: u64) -> Weights {
    let mut numbers = Numbers::new(seed);
    let layer = |[rows, cols]: [usize; 2]| {
        let mut layer = Layer::new(rows, cols, numbers.many(rows * cols));
        if rule.retention == Retention::Lq {
            // Away from zero, where the l_q direction turns quickly; the size makes a memory of moderate weights.
            let size = if rule.mirror { 0.05 } else { 0.6 };
            layer.values.iter_mut().for_each(|a| *a = size * (*a + a.signum()));
        }
        if rule.retention == Retention::Kl {
            for j in 0..cols {
                let weight = |i: usize| layer.values[i * cols + j].exp();
                let sum: f64 = (0..rows).map(weight).sum();
                let column: Vec<f64> = (0..rows).map(|i| weight(i) / sum).collect();
                (0..rows).for_each(|i| layer.values[i * cols + j] = column[i]);
            }
        }
        layer
    };
    rule.layer_shapes(key, value).into_iter().map(layer).collect()
}

/// Sizes a rule can have: K = V unless the memory is a matrix.
pub fn sizes(rule: &Rule) -> [usize; 2] {
    if rule.memory == Memory::Matrix { [5, 4] } else { [4, 4] }
}

/// A tensor of float64 numbers in the given element type.
pub fn tensor<const D: usize>(
    values: Vec<f64>,
    shape: [usize; D],
    dtype: DType,
    device: &Device,
) -> Tensor<D> {
    match dtype {
        DType::F64 => Tensor::from_data(TensorData::new(values, shape), (device, dtype)),
        _ => {
            let values: Vec<f32> = values.into_iter().map(|v| v as f32).collect();
            Tensor::from_data(TensorData::new(values, shape), (device, dtype))
        }
    }
}

pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// Sequences `[row][head]` of tokens as tensors.
pub fn tensors(rule: &Rule, sequences: &[Vec<Vec<Token>>], dtype: DType, device: &Device) -> Tokens {
    let (batch, heads, time) = (sequences.len(), sequences[0].len(), sequences[0][0].len());
    let gather = |of: &dyn Fn(&Token) -> Vec<f64>| -> (Vec<f64>, usize) {
        let mut all = Vec::new();
        for row in sequences {
            for t in 0..time {
                row.iter().for_each(|head| all.extend(of(&head[t])));
            }
        }
        let dim = all.len() / (batch * time * heads);
        (all, dim)
    };
    let vectors = |of: &dyn Fn(&Token) -> Vec<f64>| {
        let (all, dim) = gather(of);
        tensor(all, [batch, time, heads, dim], dtype, device)
    };
    let scalars =
        |of: &dyn Fn(&Token) -> f64| tensor(gather(&|t| vec![of(t)]).0, [batch, time, heads], dtype, device);
    Tokens {
        q: vectors(&|t| t.q.clone()),
        k: vectors(&|t| t.k.clone()),
        v: vectors(&|t| t.v.clone()),
        rate: scalars(&|t| t.rate),
        gate: match rule.retention {
            Retention::None | Retention::Bregman => Gate::None,
            Retention::ChannelDecay => Gate::Channel(vectors(&|t| t.decay.iter().map(|d| d.ln()).collect())),
            _ => Gate::Scalar(scalars(&|t| t.decay[0].ln())),
        },
        momentum: rule.has_momentum().then(|| scalars(&|t| t.momentum)),
    }
}

/// Start memories `[row][head]` as a state.
pub fn state(rule: &Rule, starts: &[Vec<Weights>], value: usize, dtype: DType, device: &Device) -> RuleState {
    let (batch, heads) = (starts.len(), starts[0].len());
    let layer = |index: usize| {
        let first = &starts[0][0][index];
        let of = |w: &f64| if rule.retention == Retention::Kl { w.ln() } else { *w };
        let all = starts.iter().flatten().flat_map(|weights| weights[index].values.iter().map(of)).collect();
        tensor(all, [batch, heads, first.rows, first.cols], dtype, device)
    };
    RuleState::new(rule, (0..starts[0][0].len()).map(layer).collect(), value).unwrap()
}

/// The final memory of one row and head in the space of [`RuleState::memory`].
pub fn stored(rule: &Rule, state: &State) -> Vec<f64> {
    let layers = if rule.retention == Retention::Lq { &state.dual } else { &state.memory };
    let of = |w: &f64| if rule.retention == Retention::Kl { w.ln() } else { *w };
    layers.iter().flat_map(|layer| layer.values.iter().map(of)).collect()
}

#[track_caller]
pub fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: number of values");
    let scale = expected.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * scale, "{what}: value {i} is {a}, expected {b}");
    }
}
