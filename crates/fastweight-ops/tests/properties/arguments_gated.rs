//! Arguments that do not fit the operators with channel gates or momentum.

use burn::tensor::{Device, Tensor, TensorData};
use fastweight_ops::dplr::{dplr, dplr_step};
use fastweight_ops::gla::{gated_linear_attention, gated_linear_attention_step};
use fastweight_ops::kda::{kimi_delta_attention, kimi_delta_attention_step};
use fastweight_ops::momentum_delta::{
    MomentumToken, MomentumTokens, momentum_delta_rule, momentum_delta_rule_step,
};
use fastweight_ops::titans::{
    titans_memory, titans_memory_channelwise, titans_memory_channelwise_step, titans_memory_step,
};
use fastweight_ops::{Offsets, OpError, Path, SequenceOptions};

use crate::arguments::{B, H, K, T, V, argument, ones, zeros};

const KEYS: [usize; 4] = [B, T, H, K];
const VALUES: [usize; 4] = [B, T, H, V];
const NUMBERS: [usize; 3] = [B, T, H];
const STATE: [usize; 4] = [B, H, K, V];

type Named = Result<(), &'static str>;

fn named<O>(result: Result<O, OpError>) -> Named {
    result.map(drop).map_err(argument)
}

fn gla(k: [usize; 4], v: [usize; 4], gate: [usize; 4], state: [usize; 4]) -> Named {
    let options = SequenceOptions::default();
    named(gated_linear_attention(ones(KEYS), ones(k), ones(v), zeros(gate), Some(ones(state)), &options))
}

fn kda(beta: [usize; 3], gate: [usize; 4], state: [usize; 4]) -> Named {
    let (q, k, v, options) = (ones(KEYS), ones(KEYS), ones(VALUES), SequenceOptions::default());
    named(kimi_delta_attention(q, k, v, ones(beta), zeros(gate), Some(ones(state)), &options))
}

fn low_rank(w: [usize; 4], k: [usize; 4], a: [usize; 4], b: [usize; 4], state: [usize; 4]) -> Named {
    let (q, v, options) = (ones(KEYS), ones(VALUES), SequenceOptions::default());
    named(dplr(q, zeros(w), ones(k), v, ones(a), ones(b), Some(ones(state)), &options))
}

fn momentum_tokens() -> MomentumTokens {
    MomentumTokens {
        q: ones(KEYS),
        k: ones(KEYS),
        p: ones(KEYS),
        v: ones(VALUES),
        log_alpha: zeros(NUMBERS),
        log_mu: zeros(NUMBERS),
        beta: ones(NUMBERS),
        eta: ones(NUMBERS),
    }
}

fn momentum(change: impl FnOnce(&mut MomentumTokens), states: [[usize; 4]; 2]) -> Named {
    let mut tokens = momentum_tokens();
    change(&mut tokens);
    let [s, m] = states.map(ones);
    named(momentum_delta_rule(tokens, Some((s, m)), &SequenceOptions::default()))
}

fn titans(numbers: [[usize; 3]; 3], states: [[usize; 4]; 2]) -> Named {
    let [theta, eta, alpha] = numbers.map(zeros);
    let [m, s] = states.map(ones);
    let (q, k, v, options) = (ones(KEYS), ones(KEYS), ones(VALUES), SequenceOptions::default());
    named(titans_memory(q, k, v, theta, eta, alpha, Some((m, s)), &options))
}

fn titans_channels(gates: [[usize; 4]; 3], states: [[usize; 4]; 2]) -> Named {
    let [theta, eta, alpha] = gates.map(zeros);
    let [m, s] = states.map(ones);
    let (q, k, v, options) = (ones(KEYS), ones(KEYS), ones(VALUES), SequenceOptions::default());
    named(titans_memory_channelwise(q, k, v, theta, eta, alpha, Some((m, s)), &options))
}

#[test]
fn arguments_of_other_shapes_are_named() {
    let (other, turned) = ([B, T, H, K + 1], [B, H, V, K]);
    assert_eq!(gla(KEYS, VALUES, KEYS, STATE), Ok(()));
    assert_eq!(gla(other, VALUES, KEYS, STATE), Err("k"));
    assert_eq!(gla(KEYS, [B, T + 1, H, V], KEYS, STATE), Err("v"));
    assert_eq!(gla(KEYS, VALUES, VALUES, STATE), Err("gate"));
    assert_eq!(gla(KEYS, VALUES, [B, T, H, 1], STATE), Err("gate"));
    assert_eq!(gla(KEYS, VALUES, KEYS, turned), Err("initial"));

    assert_eq!(kda(NUMBERS, KEYS, STATE), Ok(()));
    assert_eq!(kda([B, H, T], KEYS, STATE), Err("beta"));
    assert_eq!(kda(NUMBERS, VALUES, STATE), Err("gate"));
    assert_eq!(kda(NUMBERS, KEYS, turned), Err("initial"));

    assert_eq!(low_rank(KEYS, KEYS, KEYS, KEYS, STATE), Ok(()));
    assert_eq!(low_rank(other, KEYS, KEYS, KEYS, STATE), Err("w"));
    assert_eq!(low_rank(KEYS, other, KEYS, KEYS, STATE), Err("k"));
    assert_eq!(low_rank(KEYS, KEYS, other, KEYS, STATE), Err("a"));
    assert_eq!(low_rank(KEYS, KEYS, KEYS, other, STATE), Err("b"));
    assert_eq!(low_rank(KEYS, KEYS, KEYS, KEYS, turned), Err("initial"));

    let fine = [STATE; 2];
    assert_eq!(momentum(|_| (), fine), Ok(()));
    assert_eq!(momentum(|x| x.p = ones(VALUES), fine), Err("p"));
    assert_eq!(momentum(|x| x.log_alpha = zeros([T, B, H]), fine), Err("log_alpha"));
    assert_eq!(momentum(|x| x.log_mu = zeros([T, B, H]), fine), Err("log_mu"));
    assert_eq!(momentum(|x| x.beta = zeros([B, T, 1]), fine), Err("beta"));
    assert_eq!(momentum(|x| x.eta = zeros([B, T, 1]), fine), Err("eta"));
    assert_eq!(momentum(|_| (), [turned, STATE]), Err("initial memory"));
    assert_eq!(momentum(|_| (), [STATE, turned]), Err("initial momentum"));

    let wrong = [B, T, H + 1];
    assert_eq!(titans([NUMBERS; 3], fine), Ok(()));
    assert_eq!(titans([wrong, NUMBERS, NUMBERS], fine), Err("theta"));
    assert_eq!(titans([NUMBERS, wrong, NUMBERS], fine), Err("eta"));
    assert_eq!(titans([NUMBERS, NUMBERS, wrong], fine), Err("alpha"));
    assert_eq!(titans([NUMBERS; 3], [turned, STATE]), Err("initial memory"));
    assert_eq!(titans([NUMBERS; 3], [STATE, turned]), Err("initial momentum"));

    // Not by key channel, and not one for all channels.
    for wrong in [KEYS, [B, T, H, 1]] {
        assert_eq!(titans_channels([wrong, VALUES, VALUES], fine), Err("theta"));
        assert_eq!(titans_channels([VALUES, wrong, VALUES], fine), Err("eta"));
        assert_eq!(titans_channels([VALUES, VALUES, wrong], fine), Err("alpha"));
    }
    assert_eq!(titans_channels([VALUES; 3], fine), Ok(()));
    assert_eq!(titans_channels([VALUES; 3], [turned, STATE]), Err("initial memory"));
    assert_eq!(titans_channels([VALUES; 3], [STATE, turned]), Err("initial momentum"));
}

fn token_of_momentum() -> MomentumToken {
    let (keys, numbers) = ([B, H, K], [B, H]);
    MomentumToken {
        q: ones(keys),
        k: ones(keys),
        p: ones(keys),
        v: ones([B, H, V]),
        log_alpha: zeros(numbers),
        log_mu: zeros(numbers),
        beta: ones(numbers),
        eta: ones(numbers),
    }
}

#[test]
fn steps_name_what_does_not_fit() {
    let (q, v, number) = (|| ones([B, H, K]), || ones([B, H, V]), || ones([B, H]));
    let gate = || zeros([B, H, K]);
    let turned = || ones([B, H, V, K]);
    let gla = |gate, state| named(gated_linear_attention_step(q(), q(), v(), gate, state, None));
    assert_eq!(gla(gate(), ones(STATE)), Ok(()));
    assert_eq!(gla(zeros([B, H, V]), ones(STATE)), Err("gate"));
    assert_eq!(gla(gate(), turned()), Err("state"));
    let kda = |beta, gate, state| named(kimi_delta_attention_step(q(), q(), v(), beta, gate, state, None));
    assert_eq!(kda(number(), gate(), ones(STATE)), Ok(()));
    assert_eq!(kda(ones([H, B]), gate(), ones(STATE)), Err("beta"));
    assert_eq!(kda(number(), zeros([B, H, V]), ones(STATE)), Err("gate"));
    assert_eq!(kda(number(), gate(), turned()), Err("state"));
    let low_rank = |w, a, b, state, scale| named(dplr_step(q(), w, q(), v(), a, b, state, scale));
    assert_eq!(low_rank(gate(), q(), q(), ones(STATE), None), Ok(()));
    assert_eq!(low_rank(zeros([B, H, V]), q(), q(), ones(STATE), None), Err("w"));
    assert_eq!(low_rank(gate(), v(), q(), ones(STATE), None), Err("a"));
    assert_eq!(low_rank(gate(), q(), v(), ones(STATE), None), Err("b"));
    assert_eq!(low_rank(gate(), q(), q(), turned(), None), Err("state"));
    assert_eq!(low_rank(gate(), q(), q(), ones(STATE), Some(f32::NAN)), Err("scale"));
    let momentum = |change: fn(&mut MomentumToken), s, m| {
        let mut token = token_of_momentum();
        change(&mut token);
        named(momentum_delta_rule_step(token, (s, m), None))
    };
    assert_eq!(momentum(|_| (), ones(STATE), ones(STATE)), Ok(()));
    assert_eq!(momentum(|x| x.p = ones([B, H, V]), ones(STATE), ones(STATE)), Err("p"));
    assert_eq!(momentum(|x| x.log_alpha = zeros([H, B]), ones(STATE), ones(STATE)), Err("log_alpha"));
    assert_eq!(momentum(|x| x.log_mu = zeros([H, B]), ones(STATE), ones(STATE)), Err("log_mu"));
    assert_eq!(momentum(|x| x.beta = zeros([H, B]), ones(STATE), ones(STATE)), Err("beta"));
    assert_eq!(momentum(|x| x.eta = zeros([H, B]), ones(STATE), ones(STATE)), Err("eta"));
    assert_eq!(momentum(|_| (), turned(), ones(STATE)), Err("memory"));
    assert_eq!(momentum(|_| (), ones(STATE), turned()), Err("momentum"));
    let titans = |numbers: [[usize; 2]; 3], m, s| {
        let [theta, eta, alpha] = numbers.map(zeros);
        named(titans_memory_step(q(), q(), v(), theta, eta, alpha, (m, s), None))
    };
    let (fine, wrong) = ([B, H], [H, B]);
    assert_eq!(titans([fine; 3], ones(STATE), ones(STATE)), Ok(()));
    assert_eq!(titans([wrong, fine, fine], ones(STATE), ones(STATE)), Err("theta"));
    assert_eq!(titans([fine, wrong, fine], ones(STATE), ones(STATE)), Err("eta"));
    assert_eq!(titans([fine, fine, wrong], ones(STATE), ones(STATE)), Err("alpha"));
    assert_eq!(titans([fine; 3], turned(), ones(STATE)), Err("memory"));
    assert_eq!(titans([fine; 3], ones(STATE), turned()), Err("momentum"));
    let titans = |gates: [[usize; 3]; 3], m, s| {
        let [theta, eta, alpha] = gates.map(zeros);
        named(titans_memory_channelwise_step(q(), q(), v(), theta, eta, alpha, (m, s), None))
    };
    let (fine, wrong) = ([B, H, V], [B, H, K]);
    assert_eq!(titans([fine; 3], ones(STATE), ones(STATE)), Ok(()));
    assert_eq!(titans([wrong, fine, fine], ones(STATE), ones(STATE)), Err("theta"));
    assert_eq!(titans([fine, wrong, fine], ones(STATE), ones(STATE)), Err("eta"));
    assert_eq!(titans([fine, fine, wrong], ones(STATE), ones(STATE)), Err("alpha"));
    assert_eq!(titans([fine; 3], turned(), ones(STATE)), Err("memory"));
    assert_eq!(titans([fine; 3], ones(STATE), turned()), Err("momentum"));
}

/// A log gate above zero or NaN is named with its value and its place, on every path and in steps.
#[test]
fn gates_above_zero_or_nan_are_named() {
    for bad in [176.0, 1e-30, f32::NAN, f32::INFINITY] {
        let device = Device::flex();
        let numbers = |shape: &[usize], at: usize| {
            let mut values = vec![-0.5_f32; shape.iter().product()];
            values[at] = bad;
            TensorData::new(values, shape.to_vec())
        };
        let vectors = |at| Tensor::<4>::from_data(numbers(&KEYS, at), &device);
        let scalars = |at| Tensor::<3>::from_data(numbers(&NUMBERS, at), &device);
        let check = |result: Result<(), OpError>, name: &str, at: usize| {
            let Err(OpError::Gate { argument, value, position, .. }) = result else {
                panic!("{bad} of {name}: {result:?}");
            };
            assert_eq!((argument, value.to_bits(), position), (name, bad.to_bits(), at));
        };
        let (q, v) = (|| ones(KEYS), || ones(VALUES));
        for path in [Path::Auto, Path::Fused, Path::Composed] {
            let options = SequenceOptions { path, ..SequenceOptions::default() };
            let gla = gated_linear_attention(q(), q(), v(), vectors(77), None, &options);
            check(gla.map(drop), "gate", 77);
            let kda = kimi_delta_attention(q(), q(), v(), ones(NUMBERS), vectors(78), None, &options);
            check(kda.map(drop), "gate", 78);
            let low_rank = dplr(q(), vectors(79), q(), v(), q(), q(), None, &options);
            check(low_rank.map(drop), "w", 79);
            let tokens = MomentumTokens { log_alpha: scalars(7), ..momentum_tokens() };
            check(momentum_delta_rule(tokens, None, &options).map(drop), "log_alpha", 7);
            let tokens = MomentumTokens { log_mu: scalars(8), ..momentum_tokens() };
            check(momentum_delta_rule(tokens, None, &options).map(drop), "log_mu", 8);
        }
        let token = || ones([B, H, K]);
        let vectors = |at| Tensor::<3>::from_data(numbers(&[B, H, K], at), &device);
        let scalars = |at| Tensor::<2>::from_data(numbers(&[B, H], at), &device);
        let v = || ones([B, H, V]);
        let gla = gated_linear_attention_step(token(), token(), v(), vectors(5), ones(STATE), None);
        check(gla.map(drop), "gate", 5);
        let beta = ones([B, H]);
        let kda = kimi_delta_attention_step(token(), token(), v(), beta, vectors(6), ones(STATE), None);
        check(kda.map(drop), "gate", 6);
        let low_rank = dplr_step(token(), vectors(7), token(), v(), token(), token(), ones(STATE), None);
        check(low_rank.map(drop), "w", 7);
        let state = || (ones(STATE), ones(STATE));
        let token = MomentumToken { log_alpha: scalars(3), ..token_of_momentum() };
        check(momentum_delta_rule_step(token, state(), None).map(drop), "log_alpha", 3);
        let token = MomentumToken { log_mu: scalars(4), ..token_of_momentum() };
        check(momentum_delta_rule_step(token, state(), None).map(drop), "log_mu", 4);
    }
}

#[test]
fn offsets_need_one_row() {
    let offsets = Some(Offsets::new(&[0, 2, T], T).expect("offsets"));
    let options = SequenceOptions { offsets, ..SequenceOptions::default() };
    let (q, v, numbers) = (|| ones(KEYS), || ones(VALUES), || zeros(NUMBERS));
    let results = [
        gated_linear_attention(q(), q(), v(), zeros(KEYS), None, &options).map(drop),
        kimi_delta_attention(q(), q(), v(), numbers(), zeros(KEYS), None, &options).map(drop),
        dplr(q(), zeros(KEYS), q(), v(), q(), q(), None, &options).map(drop),
        momentum_delta_rule(momentum_tokens(), None, &options).map(drop),
        titans_memory(q(), q(), v(), numbers(), numbers(), numbers(), None, &options).map(drop),
    ];
    for result in results {
        assert!(matches!(result, Err(OpError::PackedBatch { batch: B, .. })), "{result:?}");
    }
}
