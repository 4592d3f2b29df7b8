//! Chunks computed a block of tokens at a time: long ones, resets inside them, keys that are all alike.

use burn::tensor::{DType, Device, Tensor};
use fastweight_memory::rule::reference::Token;
use fastweight_memory::rule::{Learner, Memory, Retention, Rule, run};

use crate::support::{assert_close, name, sizes, sound_rules, state, tensors, values};
use crate::tensors::{assert_memories, composed, cut, expected, problem};

/// Rules whose chunks are computed together.
fn chunked_rules() -> impl Iterator<Item = Rule> {
    sound_rules().into_iter().filter(|rule| {
        rule.learner != Learner::Proximal || (rule.is_linear_loss() && rule.retention != Retention::Bregman)
    })
}

#[test]
fn chunks_of_several_blocks_equal_the_definition_however_they_are_cut() {
    let device = Device::flex();
    let time = 75;
    for rule in chunked_rules() {
        let mut variants = Vec::new();
        if rule.learner != Learner::Proximal {
            variants.extend([Rule { chunk: 40, ..rule }, Rule { chunk: 40, window: 5, ..rule }]);
        }
        if rule.is_linear_loss() {
            variants.push(rule);
        }
        for rule in variants {
            let (sequences, starts) = problem(&rule, time);
            let (readings, ends) = expected(&rule, &sequences, &starts);
            // Every orthogonal step multiplies the rounding by up to 485.
            let tolerance = if rule.learner == Learner::NewtonSchulz { 1e-7 } else { 1e-10 };
            let tokens = tensors(&rule, &sequences, DType::F64, &device);
            for cuts in [vec![time], vec![33, 42], vec![50, 1, 24]] {
                let mut held = state(&rule, &starts, sizes(&rule)[1], DType::F64, &device);
                let (mut from, mut parts) = (0, Vec::new());
                for count in &cuts {
                    let (o, next) = run(&rule, cut(&tokens, from, *count), Some(held), &composed()).unwrap();
                    held = next;
                    parts.push(o);
                    from += count;
                }
                let what = format!("{}, cut in {cuts:?}", name(&rule));
                assert_close(&what, &values(&Tensor::cat(parts, 1)), &readings, tolerance);
                assert_memories(&what, &held, &ends, tolerance);
            }
        }
    }
}

#[test]
fn a_reset_inside_a_chunk_is_exact_and_has_finite_gradients() {
    let device = Device::flex().autodiff();
    for rule in chunked_rules().filter(|rule| {
        !matches!(rule.retention, Retention::None | Retention::Bregman) && rule.learner != Learner::Proximal
    }) {
        let rule = Rule { chunk: 7, ..rule };
        let (mut sequences, starts) = problem(&rule, 9);
        for token in sequences.iter_mut().flatten() {
            // A reset of all channels, of one, and a decay beneath the smallest float32.
            token[3].decay.fill(0.0);
            token[4].decay[0] = 0.0;
            token[6].decay.fill(1e-44);
        }
        let (readings, ends) = expected(&rule, &sequences, &starts);
        for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-4)] {
            let mut tokens = tensors(&rule, &sequences, dtype, &device);
            tokens.k = tokens.k.require_grad();
            let k = tokens.k.clone();
            let initial = state(&rule, &starts, sizes(&rule)[1], dtype, &device);
            let (o, end) = run(&rule, tokens, Some(initial), &composed()).unwrap();
            // Newton-Schulz in float32: see `every_sound_rule_equals_its_definition`.
            if dtype == DType::F64 || rule.learner != Learner::NewtonSchulz {
                assert_close(&name(&rule), &values(&o), &readings, tolerance);
                assert_memories(&name(&rule), &end, &ends, tolerance);
            }
            let grads = o.square().sum().backward();
            assert!(values(&k.grad(&grads).unwrap()).iter().all(|g| g.is_finite()), "{}", name(&rule));
        }
    }
}

/// Directed retention along one key again and again, each time all of it: what the removals have to do with one another
/// is the largest it can be.
#[test]
fn directed_retention_along_one_key_is_stable_in_float32() {
    let device = Device::flex();
    for memory in [Memory::Matrix, Memory::Vector] {
        for learner in [Learner::Gradient, Learner::Momentum] {
            let rule = Rule { memory, retention: Retention::Directed, learner, chunk: 32, ..Rule::default() };
            let (mut sequences, starts) = problem(&rule, 32);
            let key = vec![0.5; sizes(&rule)[0]];
            let length = key.iter().map(|x: &f64| x * x).sum::<f64>();
            for token in sequences.iter_mut().flatten().flatten() {
                let rate = if memory == Memory::Matrix { 1.0 / length } else { 4.0 };
                *token = Token { k: key.clone(), rate, decay: vec![1.0], momentum: 0.0, ..token.clone() };
            }
            let (readings, ends) = expected(&rule, &sequences, &starts);
            let initial = state(&rule, &starts, sizes(&rule)[1], DType::F32, &device);
            let tokens = tensors(&rule, &sequences, DType::F32, &device);
            let (o, end) = run(&rule, tokens, Some(initial), &composed()).unwrap();
            assert_close(&name(&rule), &values(&o), &readings, 1e-5);
            assert_memories(&name(&rule), &end, &ends, 1e-5);
        }
    }
}
