//! The rules of the literature: updates from their objectives, states, examples.

use burn::tensor::{DType, Device};
use fastweight_memory::MixerConfig;
use fastweight_memory::rule::explain::{KEYS, VALUES, example};
use fastweight_memory::rule::named::{Definition, Sizes, all, by_name};
use fastweight_memory::rule::reference::{self, Layer, State, Token};
use fastweight_memory::rule::special::{
    Rwkv7Token, comba, comba_objective, lstm, lstm_objective, nadaraya_watson, nadaraya_watson_objective,
    normalised, normalised_gradient, normalised_loss, normalised_objective, oja, oja_loss, rwkv7,
    rwkv7_objective, srwm, srwm_loss, srwm_token, ttt_gradient, ttt_loss,
};
use fastweight_memory::rule::{Bias, Learner, Memory, Retention, Rule};

use crate::fixtures::{key_first, load};
use crate::support::{Numbers, assert_close, start, state, tokens};

const PERTURBATIONS: usize = 400;

/// Checks that `objective` rises from `least` with every change of length 1e-3.
fn assert_minimiser(what: &str, least: &Layer, objective: impl Fn(&Layer) -> f64) {
    let mut numbers = Numbers::new(5);
    for _ in 0..PERTURBATIONS {
        let change = Layer::new(least.rows, least.cols, numbers.many(least.values.len()));
        let length = change.values.iter().map(|c| c * c).sum::<f64>().sqrt();
        let other = reference::add(std::slice::from_ref(least), 1e-3 / length, &[change]).remove(0);
        assert!(objective(&other) > objective(least), "{what}");
    }
}

fn matrix(rows: usize, cols: usize, seed: u64) -> Layer {
    Layer::new(rows, cols, Numbers::new(seed).many(rows * cols))
}

#[test]
fn rwkv7_is_the_minimiser_of_its_objective() {
    let mut numbers = Numbers::new(1);
    let mut s = matrix(5, 4, 2);
    for _ in 0..4 {
        let token = Rwkv7Token {
            w: numbers.many(5).iter().map(|w| 0.7 + 0.3 * w).collect(),
            kk: numbers.many(5),
            a: numbers.many(5),
            k: numbers.many(5),
            v: numbers.many(4),
        };
        let after = rwkv7(&s, &token);
        assert_minimiser("rwkv7", &after, |candidate| rwkv7_objective(candidate, &s, &token));
        s = after;
    }
}

#[test]
fn comba_is_the_minimiser_of_its_objective() {
    let (s, mut numbers) = (matrix(5, 4, 3), Numbers::new(4));
    let (k, v, numbers) = (numbers.many(5), numbers.many(4), [0.6, 0.9, 0.7]);
    let after = comba(&s, &k, &v, numbers);
    assert_minimiser("comba", &after, |candidate| comba_objective(candidate, &s, &k, &v, numbers));
}

#[test]
fn softmax_attention_is_the_minimiser_of_the_nadaraya_watson_objective() {
    let mut numbers = Numbers::new(6);
    let (q, scale) = (numbers.many(6), 1.0 / 6f64.sqrt());
    let keys: Vec<Vec<f64>> = (0..9).map(|_| numbers.many(6)).collect();
    let values: Vec<Vec<f64>> = (0..9).map(|_| numbers.many(5)).collect();
    let scores: Vec<f64> =
        keys.iter().map(|k| scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()).collect();
    let similarities: Vec<f64> = scores.iter().map(|score| score.exp()).collect();
    let z = nadaraya_watson(&similarities, &values);
    // The estimate is softmax attention.
    let top = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
    let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
    let attention: Vec<f64> = (0..5)
        .map(|j| scores.iter().zip(&values).map(|(s, v)| (s - top).exp() / total * v[j]).sum())
        .collect();
    assert_close("softmax", &z, &attention, 1e-14);
    let least = Layer::new(1, 5, z);
    assert_minimiser("softmax", &least, |z| nadaraya_watson_objective(&z.values, &similarities, &values));
}

#[test]
fn oja_gives_the_stored_memories_and_is_a_gradient_step() {
    let file = load("oja");
    let mut s = Layer::new(6, 5, key_first(&file["W"], 0));
    for t in 0..20 {
        let (k, v) = (&file["k"][t * 6..(t + 1) * 6], &file["v"][t * 5..(t + 1) * 5]);
        let after = oja(&s, k, v, file["eta"][t]);
        assert_close("oja", &after.values, &key_first(&file["W"], t + 1), 1e-10);
        for i in 0..30 {
            let at = |by: f64| {
                let mut moved = s.clone();
                moved.values[i] += by;
                oja_loss(&moved, k, v)
            };
            let expected = -file["eta"][t] * (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!((after.values[i] - s.values[i] - expected).abs() < 1e-8);
        }
        s = after;
    }
}

#[test]
fn test_time_training_steps_along_the_gradient_of_its_loss() {
    let shapes = [vec![[4, 4], [1, 4]], vec![[4, 16], [1, 16], [16, 4], [1, 4]]];
    for shapes in shapes {
        let weights: Vec<Layer> =
            shapes.iter().map(|[rows, cols]| matrix(*rows, *cols, (rows * cols) as u64)).collect();
        let mut numbers = Numbers::new(8);
        let (k, v) = (numbers.many(4), numbers.many(4));
        for (index, gradient) in ttt_gradient(&weights, &k, &v).iter().enumerate() {
            for (i, expected) in gradient.values.iter().enumerate() {
                let at = |by: f64| {
                    let mut moved = weights.clone();
                    moved[index].values[i] += by;
                    ttt_loss(&moved, &k, &v)
                };
                let found = (at(1e-5) - at(-1e-5)) / 2e-5;
                assert!((found - expected).abs() < 1e-7, "{found} against {expected}");
            }
        }
    }
}

#[test]
fn cells_and_chosen_memories_minimise_their_objectives() {
    let mut numbers = Numbers::new(12);
    let (cells, g) = (matrix(1, 6, 1), numbers.many(6));
    let gates = [0.3, 0.8];
    let after = lstm(&cells, &g, gates);
    assert_minimiser("lstm", &after, |c| lstm_objective(c, &cells, &g, gates));
    let memory = matrix(5, 4, 2);
    let (k, v) = (numbers.many(5), numbers.many(4));
    let after = normalised(&memory, &k, &v, [0.2, 0.1]);
    assert_minimiser("mixture", &after, |m| normalised_objective(m, &memory, &k, &v, [0.2, 0.1]));
    for (i, expected) in normalised_gradient(&memory, &k, &v).values.iter().enumerate() {
        let at = |by: f64| {
            let mut moved = memory.clone();
            moved.values[i] += by;
            normalised_loss(&moved, &k, &v)
        };
        assert!(((at(1e-5) - at(-1e-5)) / 2e-5 - expected).abs() < 1e-7);
    }
}

#[test]
fn a_self_referential_matrix_steps_along_the_gradient_of_its_loss() {
    let (key, value) = (3, 2);
    let w = matrix(key, value + 2 * key + 4, 4);
    let token = srwm_token(&w, &Numbers::new(13).many(key));
    assert_eq!((token.output.len(), token.rates.len()), (value, w.cols));
    let after = srwm(&w, &token);
    for i in 0..w.values.len() {
        let at = |by: f64| {
            let mut moved = w.clone();
            moved.values[i] += by;
            srwm_loss(&moved, &token)
        };
        let expected = -(at(1e-5) - at(-1e-5)) / 2e-5;
        assert!((after.values[i] - w.values[i] - expected).abs() < 1e-8);
    }
    // The rates of the four blocks are four numbers.
    let blocks = [0, value, value + key, value + 2 * key].map(|first| token.rates[first]);
    assert!(blocks.iter().enumerate().all(|(i, a)| blocks[..i].iter().all(|b| a != b)), "{blocks:?}");
}

/// Forgetting along the key and a dot product write what the delta rule writes.
#[test]
fn a_directed_hebbian_write_is_the_delta_rule() {
    let delta = Rule::default();
    let directed = Rule::new(Memory::Matrix, Bias::DotProduct, Retention::Directed, Learner::Gradient);
    let [mut a, mut b] = [delta, directed].map(|rule| State::new(&rule, start(&rule, [5, 4], 1)));
    for token in tokens(&delta, [5, 4], 6, 2) {
        reference::step(&delta, &mut a, &token);
        reference::step(&directed, &mut b, &token);
        assert_close("directed", &b.memory[0].values, &a.memory[0].values, 1e-14);
    }
}

/// Follow the regularised leader on squared losses: the learning-retaining step with the Bregman divergence of the
/// history gives the solutions of the whole least-squares problems.
#[test]
fn bregman_retention_follows_the_regularised_leader_on_squared_losses() {
    let rule = Rule::new(Memory::Matrix, Bias::Squared, Retention::Bregman, Learner::Proximal);
    let (key, value) = (5, 4);
    let mut state = State::zero(&rule, key, value);
    let all = tokens(&rule, [key, value], 12, 3);
    for t in 0..all.len() {
        reference::step(&rule, &mut state, &all[t]);
        // The gradient of sum eta/2 |S^T k - v|^2 + 1/2 |S|^2 at the memory.
        for i in 0..key {
            for j in 0..value {
                let mut gradient = state.memory[0].values[i * value + j];
                for token in &all[..=t] {
                    let read: f64 =
                        (0..key).map(|l| token.k[l] * state.memory[0].values[l * value + j]).sum();
                    gradient += token.rate * token.k[i] * (read - token.v[j]);
                }
                assert!(gradient.abs() < 1e-12, "token {t}: {gradient}");
            }
        }
    }
}

/// The same on logistic losses, which are convex and not quadratic, each step solved by Newton's method.
#[test]
fn bregman_retention_follows_the_regularised_leader_on_logistic_losses() {
    let eta = 0.7;
    let mut numbers = Numbers::new(9);
    let pairs: Vec<([f64; 2], f64)> =
        (0..15).map(|_| ([numbers.one(), numbers.one()].map(|x| 2.0 * x), numbers.one().signum())).collect();
    // Gradient and Hessian of one loss ln(1 + exp(-y x.w)).
    let loss = |(x, y): &([f64; 2], f64), w: [f64; 2]| {
        let s = 1.0 / (1.0 + (y * (x[0] * w[0] + x[1] * w[1])).exp());
        ([-y * x[0] * s, -y * x[1] * s], [x[0] * x[0], x[0] * x[1], x[1] * x[1]].map(|x| x * s * (1.0 - s)))
    };
    // h_t = sum_{i<t} loss_i + R / eta with R = 1/2 |w|^2.
    let history = |t: usize, w: [f64; 2]| {
        let start = (w.map(|w| w / eta), [1.0 / eta, 0.0, 1.0 / eta]);
        pairs[..t].iter().fold(start, |(g, h), pair| {
            let (dg, dh) = loss(pair, w);
            ([g[0] + dg[0], g[1] + dg[1]], [h[0] + dh[0], h[1] + dh[1], h[2] + dh[2]])
        })
    };
    let newton = |of: &dyn Fn([f64; 2]) -> ([f64; 2], [f64; 3])| {
        let mut w = [0.0; 2];
        for _ in 0..50 {
            let (g, [a, b, c]) = of(w);
            let determinant = a * c - b * b;
            w = [w[0] - (c * g[0] - b * g[1]) / determinant, w[1] - (a * g[1] - b * g[0]) / determinant];
        }
        w
    };
    let mut retained = [0.0; 2];
    for (t, pair) in pairs.iter().enumerate() {
        let leader = newton(&|w| history(t + 1, w));
        // argmin loss_t(w) + D_{h_t}(w, w_{t-1}): its gradient is that of the loss and of h_t, less h_t's at w_{t-1}.
        let anchor = history(t, retained).0;
        let step = newton(&|w| {
            let ((g, h), (dg, dh)) = (history(t, w), loss(pair, w));
            let gradient = [g[0] - anchor[0] + dg[0], g[1] - anchor[1] + dg[1]];
            (gradient, [h[0] + dh[0], h[1] + dh[1], h[2] + dh[2]])
        });
        retained = step;
        assert_close(&format!("token {t}"), &retained, &leader, 1e-12);
    }
    assert!(retained[0].abs() + retained[1].abs() > 0.1);
}

const NAMES: [&str; 31] = [
    "softmax_attention",
    "hebb",
    "linear_attention",
    "elu1_linear_attention",
    "retnet",
    "lightning_attention",
    "mamba2",
    "gla",
    "hgrn2",
    "delta_net",
    "gated_delta_net",
    "kda",
    "comba",
    "delta_product",
    "rwkv7",
    "oja",
    "dgd",
    "recursive_least_squares",
    "titans",
    "titans_mlp",
    "dla",
    "ttt_linear",
    "ttt_mlp",
    "moneta",
    "yaad",
    "memora",
    "omega",
    "atlas",
    "lstm",
    "srwm",
    "mixture_of_memories",
];

#[test]
fn every_rule_of_the_literature_is_named_once() {
    assert_eq!(all().map(|rule| rule.name).collect::<Vec<_>>(), NAMES);
    for rule in all() {
        if let Definition::Cell(cell) = rule.definition {
            cell.validate().unwrap();
        }
    }
    // Every memory layer is explained but the one that runs any rule, the one that runs two at once, and those that put
    // attention beside a memory.
    let others = ["rule", "rwkv7_dea", "titans_mac", "titans_mag", "titans_mal"];
    for name in MixerConfig::NAMES.into_iter().filter(|name| !others.contains(name)) {
        assert!(by_name(name).is_some(), "{name}");
    }
}

/// The bytes of a rule's state are those of the state it runs with.
#[test]
fn state_sizes_are_those_of_real_states() {
    let device = Device::flex();
    let sizes = Sizes { heads: 3, key: 8, value: 8, tokens: 100 };
    for rule in all() {
        let Definition::Cell(cell) = rule.definition else { continue };
        let starts = vec![(0..3).map(|head| start(&cell, [8, 8], head)).collect()];
        let held = state(&cell, &starts, 8, DType::F32, &device);
        assert_eq!(rule.state_bytes(&sizes), held.bytes(), "{}", rule.name);
    }
    let bytes = |name: &str| by_name(name).unwrap().state_bytes(&sizes);
    assert_eq!(bytes("softmax_attention"), 4 * 3 * 100 * 16);
    assert_eq!(bytes("elu1_linear_attention"), 4 * 3 * (64 + 8));
    assert_eq!(bytes("rwkv7"), 4 * 3 * 64);
    assert_eq!(bytes("recursive_least_squares"), 4 * 3 * 128);
    assert_eq!(bytes("titans"), 4 * 3 * 128);
    assert_eq!(bytes("ttt_linear"), 4 * 3 * (2 * 72 + 1));
    assert_eq!(bytes("ttt_mlp"), 4 * 3 * (2 * (8 * 64 + 32 + 8) + 1));
    assert_eq!(bytes("lstm"), 4 * 3 * 16);
    assert_eq!(bytes("srwm"), 4 * 3 * 8 * 28);
    assert_eq!(bytes("mixture_of_memories"), 4 * 3 * 2 * 5 * 64);
    assert_eq!(bytes("omega"), 4 * 3 * (2 * 4 * 64 + 3 * 17));
    assert_eq!(bytes("atlas"), 4 * 3 * (2 * 2 * 4 * 64 + 3 * 17));
}

#[test]
fn every_example_lowers_its_objective() {
    for rule in all() {
        let example = example(rule);
        assert_eq!(example.steps.len(), KEYS.len(), "{}", rule.name);
        for step in &example.steps {
            let numbers = step.memory.iter().flatten().chain(&step.read_after).chain(&step.read_before);
            assert!(numbers.copied().all(f64::is_finite), "{}", rule.name);
            assert_eq!(step.read_after.len(), 2, "{}", rule.name);
            if let (Some(before), Some(after)) = (step.objective_before, step.objective_after) {
                assert!(after <= before, "{}: {after} above {before}", rule.name);
            }
        }
    }
}

/// What one can check by hand: a unit key reads half of the old value and half of the new after a delta step of 1/2.
#[test]
fn the_examples_show_the_rules_numbers() {
    let steps = |name: &str| example(by_name(name).unwrap()).steps;
    for (step, value) in steps("delta_net").iter().zip(VALUES) {
        let expected: Vec<f64> =
            step.read_before.iter().zip(value).map(|(read, v)| 0.5 * (read + v)).collect();
        assert_close("delta_net", &step.read_after, &expected, 1e-14);
    }
    // gamma = (1/2) / (1 + 1/2) = 1/3.
    assert_close("dgd", &steps("dgd")[0].read_after, &[1.0 / 3.0, 2.0 / 3.0], 1e-14);
    assert_close("linear attention", &steps("linear_attention")[0].read_after, &[0.5, 1.0], 1e-14);
    assert_close("softmax attention", &steps("softmax_attention")[0].read_after, &[1.0, 2.0], 1e-14);
    // Three quarters of the read are left after one decay and a removal of 0.5 * 0.8: 0.9 - 0.4 = 0.5.
    let comba = steps("comba");
    let expected: Vec<f64> =
        comba[2].read_before.iter().zip(VALUES[2]).map(|(read, v)| 0.5 * read + 0.5 * v).collect();
    assert_close("comba", &comba[2].read_after, &expected, 1e-14);
    let gated = steps("gated_delta_net");
    let expected: Vec<f64> =
        gated[1].read_before.iter().zip(VALUES[1]).map(|(read, v)| 0.5 * 0.9 * read + 0.5 * v).collect();
    assert_close("gated_delta_net", &gated[1].read_after, &expected, 1e-14);
}

#[test]
fn a_token_of_rate_zero_leaves_a_memory_that_does_not_decay() {
    let rule = Rule::default();
    let mut state = State::new(&rule, start(&rule, [5, 4], 1));
    let before = state.memory.clone();
    let token = Token { rate: 0.0, ..tokens(&rule, [5, 4], 1, 2).remove(0) };
    reference::step(&rule, &mut state, &token);
    assert_eq!(state.memory, before);
}
