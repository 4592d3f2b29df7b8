//! Choices that do not go together say why, and the documentation shows the same matrix.

use std::path::Path;

use burn::tensor::{Device, Tensor};
use fastweight_memory::rule::reference::{self, State};
use fastweight_memory::rule::soundness::{cells, markdown, unsound};
use fastweight_memory::rule::{
    Bias, Gate, GradientAt, Learner, Memory, Retention, Rule, RuleState, RunOptions, Tokens, run,
};

use crate::support::{sizes, sound_rules, start, tokens};

#[test]
fn the_documentation_shows_the_matrix_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/rules.md");
    let text = std::fs::read_to_string(path).unwrap();
    assert!(
        text.contains(&markdown()),
        "docs/rules.md is not what `fastweight rules matrix` prints; replace its matrix by that"
    );
}

#[test]
fn every_unsound_cell_gives_its_reason_and_a_way_out() {
    let mut sound = 0;
    for (memory, bias, retention, learner) in cells() {
        let rule = Rule::new(memory, bias, retention, learner);
        match unsound(memory, bias, retention, learner) {
            None => {
                sound += 1;
                rule.validate().unwrap();
            }
            Some(reason) => {
                let message = rule.validate().unwrap_err().to_string();
                for word in [memory.name(), bias.name(), retention.name(), learner.name(), reason] {
                    assert!(message.contains(word), "{message}");
                }
                assert!(reason.contains("use ") && reason.contains(" = \""), "{reason}");
            }
        }
    }
    // Vector 61, matrix 89, MLP 60.
    assert_eq!((sound, cells().count()), (210, 384));
}

#[test]
fn the_reasons_are_those_of_the_mathematics() {
    use {Bias as B, Learner as L, Memory as M, Retention as R};
    let reason = |m, b, r, l| unsound(m, b, r, l).unwrap_or("sound");
    assert!(reason(M::Vector, B::Squared, R::Kl, L::Gradient).contains("constant 1"));
    assert!(reason(M::Vector, B::Squared, R::None, L::NewtonSchulz).contains("orthogonal"));
    assert!(reason(M::Mlp, B::DotProduct, R::None, L::Proximal).contains("not linear in its weights"));
    assert!(reason(M::Matrix, B::Lp, R::None, L::Proximal).contains("no closed form"));
    assert!(reason(M::Matrix, B::Squared, R::Kl, L::Proximal).contains("couples all weights"));
    assert!(reason(M::Matrix, B::Squared, R::Lq, L::NewtonSchulz).contains("dual space"));
    assert!(reason(M::Matrix, B::Squared, R::Bregman, L::Gradient).contains("regularised-leader"));
    assert!(reason(M::Matrix, B::Squared, R::ElasticNet, L::Proximal).contains("lasso"));
    // A diagonal memory separates the lasso, and a linear loss makes every exact step a gradient step.
    assert_eq!(reason(M::Vector, B::Squared, R::ElasticNet, L::Proximal), "sound");
    assert_eq!(reason(M::Matrix, B::DotProduct, R::Kl, L::Proximal), "sound");
    assert_eq!(reason(M::Matrix, B::Huber, R::ScalarDecay, L::Proximal), "sound");
    assert!(reason(M::Vector, B::Huber, R::ScalarDecay, L::Proximal).contains("couples all channels"));
    assert_eq!(reason(M::Mlp, B::Squared, R::Kl, L::Momentum), "sound");
}

#[test]
fn numbers_out_of_range_are_named() {
    let rule = Rule::default();
    let proximal = Rule { learner: Learner::Proximal, ..rule };
    let cases = [
        (Rule { huber_delta: 0.0, ..rule }, "huber_delta is 0"),
        (Rule { p: 0.5, ..rule }, "p is 0.5"),
        (Rule { p: f64::NAN, ..rule }, "p is NaN"),
        (Rule { bias: Bias::Lp, p: 1.5, ..rule }, "smooth = true"),
        (Rule { q: 1.0, ..rule }, "q is 1"),
        (Rule { l1: -1.0, ..rule }, "l1 is -1"),
        (Rule { window: 0, ..rule }, "window is 0"),
        (Rule { chunk: 0, ..rule }, "chunk is 0"),
        (Rule { expansion: 65, ..rule }, "expansion is 65"),
        (Rule { chunk: 2, gradient_at: GradientAt::Decayed, ..rule }, "chunk is 2, expected 1"),
        (Rule { chunk: 2, ..proximal }, "chunk is 2, expected 1"),
        (Rule { window: 2, ..proximal }, "window is 2, expected 1"),
        (Rule { bias: Bias::DotProduct, retention: Retention::Lq, ..proximal }, "mirror is false"),
    ];
    for (rule, words) in cases {
        let message = rule.validate().unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }
}

/// What the float64 definition reads in four tokens.
fn readings(rule: &Rule) -> Vec<Vec<f64>> {
    let sizes = sizes(rule);
    let mut state = State::new(rule, start(rule, sizes, 1));
    tokens(rule, sizes, 4, 2).iter().map(|token| reference::step(rule, &mut state, token)).collect()
}

#[test]
fn a_number_is_refused_where_it_changes_nothing_and_only_there() {
    for rule in sound_rules() {
        rule.validate_used().unwrap();
        let changes = [
            ("huber_delta", Rule { huber_delta: 0.3, ..rule }),
            ("p", Rule { p: 2.5, ..rule }),
            ("smooth", Rule { smooth: true, ..rule }),
            ("q", Rule { q: 3.0, ..rule }),
            ("l1", Rule { l1: 0.1, ..rule }),
            ("expansion", Rule { expansion: 3, ..rule }),
            ("gradient_at", Rule { gradient_at: GradientAt::Decayed, ..rule }),
        ];
        for (name, changed) in changes {
            let used = readings(&rule) != readings(&changed);
            let error = changed.validate_used().err().map(|error| error.to_string());
            assert_eq!(error.is_none(), used, "{name} of {}: {error:?}", crate::support::name(&rule));
            if let Some(error) = error {
                assert!(error.contains(name) && error.contains("it belongs to"), "{error}");
            }
        }
        let mirrored = Rule { mirror: true, ..rule };
        assert_eq!(mirrored.validate_used().is_ok(), rule.retention == Retention::Lq);
    }
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    let device = Device::flex();
    let ones = |dims: [usize; 4]| Tensor::<4>::ones(dims, &device);
    let three = |dims: [usize; 3]| Tensor::<3>::zeros(dims, &device);
    let good = Tokens {
        q: ones([2, 3, 1, 4]),
        k: ones([2, 3, 1, 4]),
        v: ones([2, 3, 1, 4]),
        rate: three([2, 3, 1]),
        gate: Gate::None,
        momentum: None,
    };
    let rule = Rule::default();
    let decay = Rule { retention: Retention::ScalarDecay, ..rule };
    let channels = Rule { retention: Retention::ChannelDecay, ..rule };
    let mlp = Rule { memory: Memory::Mlp, ..rule };
    let scalar = Gate::Scalar(three([2, 3, 1]));
    let nan = three([2, 3, 1]) * f32::NAN;
    let cases = [
        (rule, Tokens { k: ones([2, 3, 1, 5]), ..good.clone() }, "k has shape"),
        (rule, Tokens { rate: three([2, 3, 2]), ..good.clone() }, "rate has shape"),
        (rule, Tokens { momentum: Some(three([2, 3, 1])), ..good.clone() }, "momentum is given"),
        (rule, Tokens { gate: scalar.clone(), ..good.clone() }, "gate is given"),
        (decay, good.clone(), "gate is absent"),
        (channels, Tokens { gate: scalar.clone(), ..good.clone() }, "one log decay a key channel"),
        (decay, Tokens { gate: Gate::Scalar(three([2, 3, 1]) + 0.5), ..good.clone() }, "gate is 0.5"),
        (decay, Tokens { gate: Gate::Scalar(nan), ..good.clone() }, "gate is NaN"),
        (mlp, Tokens { v: ones([2, 3, 1, 5]), ..good.clone() }, "v has shape"),
        (mlp, good.clone(), "start of the memory is absent"),
    ];
    for (rule, tokens, words) in cases {
        let message = run(&rule, tokens, None, &RunOptions::default()).unwrap_err().to_string();
        assert!(message.contains(words), "{words}: {message}");
    }
    let other = RuleState::zero(&rule, [3, 1, 4, 4], &device).unwrap();
    let message = run(&rule, good.clone(), Some(other), &RunOptions::default()).unwrap_err().to_string();
    assert!(message.contains("holds 3 sequences"), "{message}");
    let other = RuleState::zero(&Rule { window: 3, ..rule }, [2, 1, 4, 4], &device).unwrap();
    let message = run(&rule, good, Some(other), &RunOptions::default()).unwrap_err().to_string();
    assert!(message.contains("a state of this rule"), "{message}");
}
