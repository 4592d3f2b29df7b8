//! What must hold exactly between runs of the fused matrix-memory kernels.

mod kernels_common;

use fastweight_ops::delta::cpu::FusedDelta;
use fastweight_ops::fused::FusedOp;
use fastweight_ops::kernel::{Dims, InstructionSet, with_instruction_set};
use kernels_common::{Gates, Operator, Problem, bits, dims, rms_error, wide};

fn in_pool<R: Send>(threads: usize, body: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(body)
}

fn for_each_set_and_operator(body: impl Fn(Operator)) {
    for set in InstructionSet::available() {
        with_instruction_set(set, || Operator::ALL.into_iter().for_each(&body));
    }
}

/// Relative RMS difference below `tolerance`.
fn assert_close(found: &[f32], expected: &[f32], tolerance: f64, what: &str) {
    let expected = wide(expected);
    let error = rms_error(found, &expected) / kernels_common::rms(&expected).max(1e-30);
    assert!(error < tolerance, "{what}: relative RMS difference {error:.2e}");
}

#[test]
fn two_runs_give_the_same_bits() {
    for threads in [1, 2, 5] {
        for_each_set_and_operator(|operator| {
            for (heads, value) in [(3, 33), (1, 100)] {
                let problem = Problem::new(operator, dims(2, 75, heads, 20, value), Gates::Mixed, 1);
                let run = || {
                    let (outputs, gradients) = problem.fused();
                    (bits(&outputs), bits(&gradients))
                };
                let set = InstructionSet::active();
                let run = || in_pool(threads, || with_instruction_set(set, run));
                assert_eq!(run(), run(), "{operator:?} on {threads} threads");
            }
        });
    }
}

#[test]
fn shared_heads_equal_whole_heads() {
    for_each_set_and_operator(|operator| {
        let problem = Problem::new(operator, dims(1, 90, 1, 20, 130), Gates::Weak, 2);
        let set = InstructionSet::active();
        let run = |threads| in_pool(threads, || with_instruction_set(set, || problem.fused()));
        let ((whole, whole_grads), (shared, shared_grads)) = (run(1), run(4));
        assert_eq!(bits(&whole), bits(&shared), "{operator:?}: columns never meet in the forward pass");
        for (i, (a, b)) in shared_grads.iter().zip(&whole_grads).enumerate() {
            assert_close(a, b, 2e-6, &format!("{operator:?} gradient {i}"));
        }
    });
}

#[test]
fn no_gate_equals_gate_zero() {
    for_each_set_and_operator(|operator| {
        let zero = Problem::new(operator, dims(2, 70, 2, 16, 24), Gates::Zero, 3);
        let mut none = zero.clone();
        none.gates = Gates::None;
        none.inputs.pop();
        let ((zero, mut zero_grads), (none, none_grads)) = (zero.fused(), none.fused());
        zero_grads.pop();
        assert_eq!(bits(&zero), bits(&none), "{operator:?} outputs");
        assert_eq!(bits(&zero_grads), bits(&none_grads), "{operator:?} gradients");
    });
}

#[test]
fn rows_do_not_see_each_other() {
    for_each_set_and_operator(|operator| {
        let both = Problem::new(operator, dims(2, 40, 2, 12, 20), Gates::None, 4);
        let mut first = both.clone();
        first.dims.batch = 1;
        first.inputs.iter_mut().chain(&mut first.grads).for_each(|x| x.truncate(x.len() / 2));
        let ((both, both_grads), (first, first_grads)) = (both.fused(), first.fused());
        for (a, b) in both.iter().chain(&both_grads).zip(first.iter().chain(&first_grads)) {
            assert_eq!(&a[..b.len()], &b[..], "{operator:?}");
        }
    });
}

#[test]
fn state_handed_over_at_a_cut() {
    for_each_set_and_operator(|operator| {
        for cut in [1, 31, 32, 45] {
            let whole = Problem::new(operator, dims(1, 70, 2, 12, 20), Gates::None, 5);
            let states = if operator == Operator::Normalised { 2 } else { 1 };
            let first_state = whole.inputs.len() - states;
            let part = |from: usize, to: usize, states: &[Vec<f32>]| {
                let mut part = whole.clone();
                part.dims.time = to - from;
                for x in part.inputs.iter_mut().take(first_state) {
                    let token = x.len() / 70;
                    *x = x[from * token..to * token].to_vec();
                }
                part.inputs.truncate(first_state);
                part.inputs.extend_from_slice(states);
                let inputs: Vec<&[f32]> = part.inputs.iter().map(Vec::as_slice).collect();
                part.op().forward(&inputs, false).outputs
            };
            let (expected, _) = whole.fused();
            let first = part(0, cut, &whole.inputs[first_state..]);
            let second = part(cut, 70, &first[1..]);
            let o = [&first[0][..], &second[0][..]].concat();
            assert_close(&o, &expected[0], 1e-5, &format!("{operator:?} cut at {cut}"));
            for (a, b) in second[1..].iter().zip(&expected[1..]) {
                assert_close(a, b, 1e-5, &format!("{operator:?} state after a cut at {cut}"));
            }
        }
    });
}

#[test]
fn absent_output_gradients_are_zeros() {
    for_each_set_and_operator(|operator| {
        let problem = Problem::new(operator, dims(2, 40, 2, 12, 20), Gates::Weak, 6);
        let op = problem.op();
        let inputs: Vec<&[f32]> = problem.inputs.iter().map(Vec::as_slice).collect();
        let saved = op.forward(&inputs, true).saved;
        let needs = vec![true; inputs.len()];
        for absent in 0..problem.grads.len() {
            let zeros = vec![0.0; problem.grads[absent].len()];
            let grads = |replacement: Option<&'static [f32]>| -> Vec<Option<Vec<f32>>> {
                let grads: Vec<Option<&[f32]>> = (0..problem.grads.len())
                    .map(|i| match (i == absent, replacement) {
                        (false, _) => Some(&problem.grads[i][..]),
                        (true, None) => None,
                        (true, Some(_)) => Some(&zeros[..]),
                    })
                    .collect();
                op.backward(&inputs, &saved, &grads, &needs)
            };
            assert_eq!(grads(None), grads(Some(&[])), "{operator:?} output {absent}");
        }
        let mut needs = needs;
        needs[1] = false;
        let grads: Vec<Option<&[f32]>> = problem.grads.iter().map(|g| Some(&g[..])).collect();
        let gradients = op.backward(&inputs, &saved, &grads, &needs);
        assert!(gradients[1].is_none() && gradients[0].is_some(), "only what is needed");
    });
}

/// Bytes kept for the backward pass, from the vectors that are kept.
fn saved_bytes(operator: Operator, dims: Dims) -> usize {
    let problem = Problem::new(operator, dims, Gates::Weak, 7);
    let inputs: Vec<&[f32]> = problem.inputs.iter().map(Vec::as_slice).collect();
    problem.op().forward(&inputs, true).saved.iter().map(|x| x.len() * size_of::<f32>()).sum()
}

#[test]
fn saved_memory_grows_by_the_stated_slope() {
    let (key, value, heads) = (20, 12, 3);
    for operator in Operator::ALL {
        let per_token_and_head = match operator {
            Operator::Delta => 4.0 * (key as f64 * value as f64 / 32.0 + value as f64),
            Operator::Normalised => 4.0 * (key as f64 * value as f64 / 32.0 + key as f64 / 32.0),
            Operator::Linear | Operator::LinearPerHead => 4.0 * key as f64 * value as f64 / 32.0,
        };
        let at = |time| saved_bytes(operator, dims(1, time, heads, key, value));
        let slope = (at(3200) - at(320)) as f64 / (2880 * heads) as f64;
        assert!(
            (slope - per_token_and_head).abs() < 1e-9,
            "{operator:?}: {slope} against {per_token_and_head}"
        );
        assert_eq!(at(3200) - at(320), 10 * (at(576) - at(288)), "{operator:?}: linear in the length");
    }
}

#[test]
fn ten_thousand_tokens_at_the_edge_of_stability() {
    for beta in [1.0, 2.0] {
        let mut problem = Problem::new(Operator::Delta, dims(1, 10_000, 1, 16, 16), Gates::None, 8);
        problem.inputs[3].fill(beta);
        let (outputs, gradients) = problem.fused();
        let largest = |x: &[f32]| x.iter().fold(0f32, |m, x| m.max(x.abs()));
        assert!(largest(&outputs[1]) < 300.0, "beta {beta}: state {}", largest(&outputs[1]));
        assert!(gradients.iter().flatten().all(|x| x.is_finite()), "beta {beta}: finite gradients");
    }
}

#[test]
fn an_idle_state_decays_to_zero_without_denormals() {
    let dims = dims(1, 2048, 1, 8, 16);
    let mut problem = Problem::new(Operator::Delta, dims.clone(), Gates::Zero, 9);
    for i in [1, 2, 3] {
        problem.inputs[i].fill(0.0);
    }
    for g in [-0.04, -0.06, -0.1, -1.0] {
        problem.inputs[5].fill(g);
        let inputs: Vec<&[f32]> = problem.inputs.iter().map(Vec::as_slice).collect();
        for set in InstructionSet::available() {
            let op = FusedDelta { dims: dims.clone(), gated: true };
            let out = with_instruction_set(set, || op.forward(&inputs, false)).outputs;
            assert!(
                !out[1].iter().any(|x| x.is_subnormal()),
                "{set:?} gate {g}: denormal numbers in the state"
            );
        }
    }
}
