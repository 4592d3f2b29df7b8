//! One-token steps in place against the float64 loops, token after token.

mod kernels_common;

use fastweight_ops::kernel::{InstructionSet, with_instruction_set};
use fastweight_ops::{delta, linear, normalised_linear};
use kernels_common::{Gates, Operator, Problem, dims, rms, rms_error};

/// The numbers of token `t` for all rows, from `[batch, time, ..]`.
fn token(x: &[f32], batch: usize, time: usize, t: usize) -> Vec<f32> {
    let size = x.len() / (batch * time);
    (0..batch).flat_map(|row| x[(row * time + t) * size..][..size].to_vec()).collect()
}

/// Outputs `[batch, time, ..]` and final states of a problem, one step after the other.
fn run_steps(problem: &Problem) -> Vec<Vec<f32>> {
    let d = &problem.dims;
    let mut one = d.clone();
    one.time = 1;
    let x = &problem.inputs;
    let states = if problem.operator == Operator::Delta { 4 } else { 3 };
    let mut state = x[states].clone();
    let mut z = if problem.operator == Operator::Normalised { x[4].clone() } else { Vec::new() };
    let row = d.heads * d.value;
    let mut o = vec![0.0; d.batch * d.time * row];
    let mut out = vec![0.0; d.batch * row];
    for t in 0..d.time {
        let at = |i: usize| token(&x[i], d.batch, d.time, t);
        let (q, k, v) = (at(0), at(1), at(2));
        let gate = match problem.operator {
            _ if problem.gates == Gates::None => None,
            Operator::LinearPerHead => Some(x[4].repeat(d.batch)),
            Operator::Linear => Some(at(4)),
            _ => Some(at(5)),
        };
        let gate = gate.as_deref();
        match problem.operator {
            Operator::Delta => delta::cpu::step(&one, &mut state, &q, &k, &v, &at(3), gate, &mut out),
            Operator::Normalised => {
                normalised_linear::cpu::step(&one, &mut state, &mut z, &q, &k, &v, gate, &mut out);
            }
            _ => linear::cpu::step(&one, &mut state, &q, &k, &v, gate, &mut out),
        }
        for b in 0..d.batch {
            o[(b * d.time + t) * row..][..row].copy_from_slice(&out[b * row..][..row]);
        }
    }
    let mut outputs = vec![o, state];
    if problem.operator == Operator::Normalised {
        outputs.push(z);
    }
    outputs
}

#[test]
fn steps_follow_the_loop() {
    for set in InstructionSet::available() {
        with_instruction_set(set, || {
            for operator in Operator::ALL {
                for (key, value) in [(8, 8), (20, 12), (64, 64), (17, 99), (3, 1)] {
                    for gates in Gates::ALL {
                        let problem = Problem::new(operator, dims(2, 70, 3, key, value), gates, 1);
                        let (expected, _) = problem.reference();
                        for (i, (found, expected)) in run_steps(&problem).iter().zip(&expected).enumerate() {
                            let error = rms_error(found, expected) / rms(expected).max(1e-30);
                            assert!(
                                error < 1e-5,
                                "{set:?} {operator:?} {key}x{value} {gates:?} output {i}: {error:.2e}"
                            );
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn a_large_batch_is_shared_between_threads() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
    for operator in Operator::ALL {
        let problem = Problem::new(operator, dims(9, 3, 4, 64, 48), Gates::Weak, 2);
        let shared = pool.install(|| run_steps(&problem));
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(shared, one.install(|| run_steps(&problem)), "{operator:?}: heads never meet");
        let (expected, _) = problem.reference();
        assert!(rms_error(&shared[0], &expected[0]) / rms(&expected[0]) < 1e-5, "{operator:?}");
    }
}

#[test]
fn an_idle_state_decays_to_zero() {
    let mut d = dims(1, 1, 1, 8, 20);
    d.scale = 1.0;
    for set in InstructionSet::available() {
        with_instruction_set(set, || {
            let mut state = vec![1.0; 8 * 20];
            let (q, zero, mut out) = (vec![1.0; 8], vec![0.0; 20], vec![0.0; 20]);
            for _ in 0..2000 {
                delta::cpu::step(&d, &mut state, &q, &zero[..8], &zero, &[0.0], Some(&[-0.1]), &mut out);
                assert!(!state.iter().any(|x| x.is_subnormal()), "{set:?}: denormal numbers");
            }
            assert!(state.iter().all(|x| *x == 0.0), "{set:?}: still {}", state[0]);
        });
    }
}
