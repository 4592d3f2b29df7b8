//! The plain loop, the fused kernel, tensor operations and single steps agree.

use proptest::prelude::*;

use crate::support::parts::is_per_token;
use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Form, Operator};
use crate::{PUBLIC, assert_same, cases, compute};

fn operators() -> impl Strategy<Value = Operator> {
    prop::sample::select(Operator::ALL.to_vec())
}

fn gates() -> impl Strategy<Value = Gates> {
    use Gates::{Absent, Mixed, PerHead, Strong, Twenty, Weak};
    prop::sample::select(vec![Absent, Weak, Strong, Mixed, Twenty, PerHead])
}

/// Sizes of a batch, or of a few documents in one row, some of them empty.
pub fn sizes(longest: usize) -> impl Strategy<Value = Sizes> {
    let batch = (1..4_usize, 1..=longest).prop_map(|(batch, time)| (batch, time, None));
    let lengths =
        prop::collection::vec(0..longest / 2, 1..5).prop_filter("no token", |n| n.iter().sum::<usize>() > 0);
    let packed = lengths.prop_map(|lengths| {
        let offsets: Vec<usize> = std::iter::once(0)
            .chain(lengths.iter().scan(0, |end, n| {
                *end += n;
                Some(*end)
            }))
            .collect();
        (1, offsets[offsets.len() - 1], Some(offsets))
    });
    (prop_oneof![batch, packed], 1..4_usize, 1..28_usize, 1..28_usize).prop_map(
        |((batch, time, offsets), heads, key, value)| Sizes { batch, time, heads, key, value, offsets },
    )
}

proptest! {
    #![proptest_config(cases(110))]

    #[test]
    fn loop_fused_composed_and_steps_agree(
        operator in operators(), sizes in sizes(150), gates in gates(), seed in any::<u64>()
    ) {
        let problem = problem(operator, &sizes, gates, seed);
        let expected = compute(&problem, Form::Reference);
        for form in Form::ALL {
            let label = format!("{operator:?} {gates:?} {sizes:?} {}", form.name());
            assert_same(&label, &compute(&problem, form), &expected, form.is_f64());
        }
    }

    #[test]
    fn windows_and_grouped_heads_of_softmax_agree(
        groups in 1..4_usize, shared in 1..4_usize, sizes in sizes(80), window in 1..90_usize, seed in any::<u64>()
    ) {
        let mut sizes = sizes;
        sizes.heads = groups;
        let mut problem = problem(Operator::Softmax, &sizes, Gates::Absent, seed);
        sizes.heads = groups * shared;
        let wide = crate::support::random::problem(Operator::Softmax, &sizes, Gates::Absent, !seed);
        problem.inputs.insert("q".into(), wide.inputs["q"].clone());
        problem.up = wide.up;
        problem.window = Some(window);
        let expected = compute(&problem, Form::Reference);
        for form in Form::ALL {
            let label = format!("window {window}, {shared} shared, {sizes:?}, {}", form.name());
            assert_same(&label, &compute(&problem, form), &expected, form.is_f64());
        }
    }
}

#[test]
fn lengths_around_the_chunks_agree() {
    for operator in Operator::ALL {
        for time in [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191] {
            let problem = problem(operator, &Sizes::of(2, time, 2, 12, 20), Gates::Weak, time as u64);
            let expected = compute(&problem, Form::Reference);
            for form in PUBLIC {
                let label = format!("{operator:?} T {time} {}", form.name());
                assert_same(&label, &compute(&problem, form), &expected, false);
            }
        }
    }
}

#[test]
fn head_sizes_that_are_no_power_of_two_agree() {
    for operator in Operator::ALL {
        for (key, value) in [(60, 60), (20, 12), (12, 20), (64, 128), (128, 64), (1, 1), (33, 7)] {
            let problem = problem(operator, &Sizes::of(1, 70, 2, key, value), Gates::Strong, 3);
            let expected = compute(&problem, Form::Reference);
            for form in [Form::Fused, Form::Composed, Form::Steps] {
                let label = format!("{operator:?} K {key} V {value} {}", form.name());
                assert_same(&label, &compute(&problem, form), &expected, false);
            }
        }
    }
}

#[test]
fn two_runs_give_the_same_bits() {
    for operator in Operator::ALL {
        let problem = problem(operator, &Sizes::of(2, 200, 3, 64, 72), Gates::Strong, 5);
        for form in [Form::Fused, Form::Composed] {
            let (first, second) = (compute(&problem, form), compute(&problem, form));
            assert_eq!(first.outputs, second.outputs, "{operator:?} {}", form.name());
            assert_eq!(first.grads, second.grads, "{operator:?} {}", form.name());
        }
    }
}

#[test]
fn no_output_sees_a_later_token() {
    for operator in Operator::ALL {
        let sizes = Sizes::of(1, 100, 2, 8, 8);
        let before = problem(operator, &sizes, Gates::Weak, 1);
        let mut after = before.clone();
        let other = problem(operator, &sizes, Gates::Weak, 4);
        for (name, array) in &mut after.inputs {
            if !is_per_token(name, array) {
                continue;
            }
            let changed = &other.inputs[name];
            let from = array.values.len() / 100 * 70;
            array.values[from..].copy_from_slice(&changed.values[from..]);
        }
        for form in PUBLIC {
            let [first, second] =
                [&before, &after].map(|p| compute(p, form).outputs["o"].slice(1, 0..70).values);
            crate::close(&second, &first, 1e-6);
        }
    }
}
