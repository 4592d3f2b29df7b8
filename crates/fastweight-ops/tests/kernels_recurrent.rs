//! The fused token-recurrent kernels against the float64 loops, for every instruction set.

mod support;

use fastweight_ops::kernel::{InstructionSet, with_instruction_set};
use support::asserts::assert_same;
use support::random::{Gates, Sizes, problem};
use support::{Form, Operator, Outcome, Problem, run};

const RECURRENT: [Operator; 6] = [
    Operator::Gla,
    Operator::Kda,
    Operator::Dplr,
    Operator::MomentumDelta,
    Operator::Titans,
    Operator::TitansChannels,
];

fn compute(problem: &Problem, form: Form) -> Outcome {
    run(problem, form).unwrap_or_else(|error| panic!("{}: {error}", form.name()))
}

/// One walk over the sequence with its gradients, and token by token.
fn check(sizes: &Sizes, gates: Gates, seed: u64) {
    for operator in RECURRENT {
        let problem = problem(operator, sizes, gates, seed);
        let expected = compute(&problem, Form::Reference);
        for set in InstructionSet::available() {
            for form in [Form::Fused, Form::Steps] {
                let found = with_instruction_set(set, || compute(&problem, form));
                let label = format!("{operator:?} {gates:?} {sizes:?} {set:?} {}", form.name());
                assert_same(&label, &found, &expected, false);
            }
        }
    }
}

#[test]
fn lengths_around_a_chunk() {
    for time in [1, 2, 5, 31, 32, 33, 63, 64, 97] {
        check(&Sizes::of(2, time, 3, 16, 8), Gates::Weak, time as u64);
    }
}

#[test]
fn any_key_and_value_size() {
    let sizes =
        [(20, 12), (60, 60), (64, 64), (128, 64), (64, 128), (12, 20), (1, 1), (3, 5), (17, 99), (8, 80)];
    for (key, value) in sizes {
        check(&Sizes::of(1, 70, 2, key, value), Gates::Strong, 2);
    }
}

#[test]
fn every_kind_of_gate() {
    for gates in [Gates::Absent, Gates::Weak, Gates::Strong, Gates::Mixed, Gates::Twenty] {
        for sizes in [Sizes::of(2, 100, 2, 16, 24), Sizes::of(1, 256, 1, 8, 8)] {
            check(&sizes, gates, 3);
        }
    }
}

#[test]
fn packed_documents_with_empty_ones() {
    for offsets in [vec![0, 1, 97, 160], vec![0, 0, 40, 40, 75, 160, 160], vec![0, 160]] {
        let sizes = Sizes { offsets: Some(offsets), ..Sizes::of(1, 160, 2, 20, 12) };
        for gates in [Gates::Weak, Gates::Mixed] {
            check(&sizes, gates, 4);
        }
    }
}

#[test]
fn heads_shared_between_threads() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(7).build().unwrap();
    pool.install(|| {
        for gates in [Gates::Weak, Gates::Mixed] {
            check(&Sizes::of(1, 70, 1, 24, 100), gates, 6);
            check(&Sizes::of(3, 5, 2, 16, 16), gates, 7);
        }
    });
}
