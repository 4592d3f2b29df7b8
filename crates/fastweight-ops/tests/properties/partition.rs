//! Parts of a problem computed alone give the parts of the whole: time, rows, heads, documents.

use proptest::prelude::*;

use crate::support::parts::{Axis, concatenate, concatenate_documents, documents, part};
use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Array, Arrays, Form, Operator, Outcome, Problem, STATES};
use crate::{PUBLIC, assert_same, cases, compute};

fn each_alone(problem: &Problem, axis: Axis, count: usize, form: Form) -> Outcome {
    let parts: Vec<Outcome> = (0..count).map(|i| compute(&part(problem, axis, i..i + 1), form)).collect();
    joined(&parts, |arrays| concatenate(arrays, axis))
}

fn joined(parts: &[Outcome], join: impl Fn(&[Arrays]) -> Arrays) -> Outcome {
    let outputs: Vec<Arrays> = parts.iter().map(|part| part.outputs.clone()).collect();
    let grads: Vec<Arrays> = parts.iter().map(|part| part.grads.clone()).collect();
    Outcome { outputs: join(&outputs), grads: join(&grads) }
}

/// Operators whose final states are what the next stretch starts from; those of TTT-Linear are flushed here,
/// its own tests cut it.
fn with_one_state() -> Vec<Operator> {
    Operator::ALL.into_iter().filter(|&operator| operator != Operator::TttLinear).collect()
}

/// What the second stretch starts from: the states, or the longer cache, that the first one leaves.
fn hand_over(problem: &Problem, first: &Problem, left: &Outcome, second: &mut Problem) {
    for name in STATES {
        if let Some(state) = left.outputs.get(name) {
            second.inputs.insert(name.into(), state.clone());
        }
    }
    if problem.operator == Operator::Softmax {
        for (cache, tokens) in [("k_cache", "k"), ("v_cache", "v")] {
            let longer = [first.inputs[cache].clone(), first.inputs[tokens].clone()];
            second.inputs.insert(cache.into(), Array::concatenate(&longer, 1));
        }
    }
}

/// Adds to the first stretch's gradients of keys, values and cache what the second sent through its cache.
fn add_cache_gradients(first: &mut Arrays, second: &Arrays, cut: usize) {
    for (cache, tokens) in [("k_cache", "k"), ("v_cache", "v")] {
        let Some(through) = second.get(cache) else { continue };
        let held = through.shape[1] - cut;
        for (name, from) in [(cache, through.slice(1, 0..held)), (tokens, through.slice(1, held..held + cut))]
        {
            let sum = first[name].add(&from);
            first.insert(name.into(), sum);
        }
    }
}

fn in_two_stretches(problem: &Problem, cut: usize, form: Form) -> Outcome {
    let mut first = part(problem, Axis::Time, 0..cut);
    let mut second = part(problem, Axis::Time, cut..problem.time());
    hand_over(problem, &first, &compute(&first, form), &mut second);
    let last = compute(&second, form);
    for name in STATES {
        if let Some(grad) = last.grads.get(name) {
            first.up.insert(name.into(), grad.clone());
        }
    }
    let mut start = compute(&first, form);
    add_cache_gradients(&mut start.grads, &last.grads, cut);
    let outputs = concatenate(&[start.outputs, last.outputs], Axis::Time);
    let mut grads = concatenate(&[start.grads.clone(), last.grads], Axis::Time);
    for name in STATES.into_iter().chain(["k_cache", "v_cache"]) {
        if let Some(grad) = start.grads.get(name) {
            grads.insert(name.into(), grad.clone());
        }
    }
    Outcome { outputs, grads }
}

proptest! {
    #![proptest_config(cases(25))]

    #[test]
    fn a_cut_sequence_with_the_state_handed_over_equals_the_whole(
        operator in prop::sample::select(with_one_state()),
        (time, cut) in (2..150_usize).prop_flat_map(|time| (Just(time), 1..time)),
        seed in any::<u64>(),
    ) {
        let problem = problem(operator, &Sizes::of(2, time, 3, 9, 14), Gates::Mixed, seed);
        for form in PUBLIC {
            let whole = compute(&problem, form);
            let label = format!("{operator:?} {cut} of {time} {}", form.name());
            assert_same(&label, &in_two_stretches(&problem, cut, form), &whole, false);
        }
    }

    #[test]
    fn packed_documents_equal_documents_alone(
        operator in prop::sample::select(Operator::ALL.to_vec()),
        lengths in prop::collection::vec(1..90_usize, 1..5), seed in any::<u64>(),
    ) {
        let mut offsets = vec![0];
        for n in lengths {
            offsets.push(offsets[offsets.len() - 1] + n);
        }
        let sizes = Sizes { offsets: Some(offsets.clone()), ..Sizes::of(1, offsets[offsets.len() - 1], 2, 10, 6) };
        let problem = problem(operator, &sizes, Gates::Strong, seed);
        for form in PUBLIC {
            let alone: Vec<Outcome> = documents(&problem).iter().map(|document| compute(document, form)).collect();
            let label = format!("{operator:?} {offsets:?} {}", form.name());
            assert_same(&label, &compute(&problem, form), &joined(&alone, concatenate_documents), false);
        }
    }
}

/// One sequence, then 64 single tokens from the state it leaves, are one longer sequence.
#[test]
fn steps_go_on_where_a_sequence_ends() {
    for operator in with_one_state() {
        let problem = problem(operator, &Sizes::of(2, 104, 2, 12, 20), Gates::Strong, 14);
        for form in [Form::Fused, Form::Composed] {
            let whole = compute(&problem, form);
            let first = part(&problem, Axis::Time, 0..40);
            let mut rest = part(&problem, Axis::Time, 40..104);
            let start = compute(&first, form);
            hand_over(&problem, &first, &start, &mut rest);
            let outputs = concatenate(&[start.outputs, compute(&rest, Form::Steps).outputs], Axis::Time);
            let found = Outcome { outputs, grads: Arrays::new() };
            assert_same(&format!("{operator:?} {}", form.name()), &found, &whole, false);
        }
    }
}

#[test]
fn rows_of_a_batch_are_independent() {
    for operator in Operator::ALL {
        let problem = problem(operator, &Sizes::of(3, 80, 2, 16, 24), Gates::Strong, 11);
        for form in PUBLIC {
            let label = format!("{operator:?} {}", form.name());
            assert_same(&label, &compute(&problem, form), &each_alone(&problem, Axis::Batch, 3, form), false);
        }
    }
}

#[test]
fn heads_are_independent() {
    for operator in Operator::ALL {
        let problem = problem(operator, &Sizes::of(2, 80, 3, 16, 24), Gates::Strong, 12);
        for form in PUBLIC {
            let label = format!("{operator:?} {}", form.name());
            assert_same(&label, &compute(&problem, form), &each_alone(&problem, Axis::Heads, 3, form), false);
        }
    }
}

/// NaN in one row must not reach another.
#[test]
fn a_row_of_nan_leaves_the_others_alone() {
    for operator in Operator::ALL {
        let healthy = problem(operator, &Sizes::of(2, 40, 2, 8, 8), Gates::Weak, 13);
        let mut sick = healthy.clone();
        let v = sick.inputs.get_mut("v").expect("values");
        let row = v.values.len() / 2;
        v.values[row..].fill(f64::NAN);
        for form in PUBLIC {
            let [expected, found] =
                [&healthy, &sick].map(|p| compute(p, form).outputs["o"].slice(0, 0..1).values);
            assert_eq!(found, expected, "{operator:?} {}", form.name());
        }
    }
}
