//! The fused matrix-memory kernels against the float64 loops.

mod kernels_common;

use fastweight_ops::Offsets;
use fastweight_ops::kernel::{InstructionSet, with_instruction_set};
use kernels_common::{Gates, Operator, Problem, Random, dims};

fn check_all(sizes: &[(usize, usize, usize, usize, usize)], gates: &[Gates], seed: u64) {
    for set in InstructionSet::available() {
        with_instruction_set(set, || {
            for operator in Operator::ALL {
                for (i, &(batch, time, heads, key, value)) in sizes.iter().enumerate() {
                    for &gates in gates {
                        let dims = dims(batch, time, heads, key, value);
                        Problem::new(operator, dims, gates, seed + i as u64).check();
                    }
                }
            }
        });
    }
}

#[test]
fn lengths_around_a_chunk() {
    let sizes = [1, 2, 5, 31, 32, 33, 63, 64, 97].map(|time| (2, time, 3, 16, 8));
    check_all(&sizes, &[Gates::None, Gates::Weak], 1);
}

#[test]
fn any_key_and_value_size() {
    let sizes =
        [(20, 12), (60, 60), (64, 64), (128, 64), (64, 128), (12, 20), (1, 1), (3, 5), (17, 33), (8, 80)]
            .map(|(key, value)| (1, 70, 2, key, value));
    check_all(&sizes, &[Gates::None, Gates::Weak], 2);
}

#[test]
fn every_kind_of_gate() {
    check_all(&[(2, 100, 2, 16, 24), (1, 256, 1, 8, 8)], &Gates::ALL, 3);
}

#[test]
fn packed_documents_with_empty_ones() {
    for set in InstructionSet::available() {
        with_instruction_set(set, || {
            for operator in Operator::ALL {
                for offsets in [vec![0, 1, 97, 160], vec![0, 0, 40, 40, 75, 160, 160], vec![0, 160]] {
                    for gates in [Gates::None, Gates::Weak, Gates::Resets] {
                        let mut dims = dims(1, 160, 2, 20, 12);
                        dims.offsets = Some(Offsets::new(&offsets, 160).unwrap());
                        Problem::new(operator, dims, gates, 4).check();
                    }
                }
            }
        });
    }
}

#[test]
fn random_problems() {
    let r = &mut Random(5);
    for seed in 0..120 {
        let operator = Operator::ALL[r.below(4)];
        let gates = Gates::ALL[r.below(7)];
        let mut dims =
            dims(1 + r.below(3), 1 + r.below(130), 1 + r.below(3), 2 + r.below(40), 1 + r.below(70));
        if r.below(3) == 0 {
            let mut offsets = vec![0, dims.time];
            offsets.extend((0..r.below(5)).map(|_| r.below(dims.time + 1)));
            offsets.sort_unstable();
            dims.batch = 1;
            dims.offsets = Some(Offsets::new(&offsets, dims.time).unwrap());
        }
        let sets = InstructionSet::available();
        with_instruction_set(sets[r.below(sets.len())], || Problem::new(operator, dims, gates, seed).check());
    }
}

#[test]
fn heads_shared_between_threads() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(7).build().unwrap();
    pool.install(|| {
        for set in InstructionSet::available() {
            with_instruction_set(set, || {
                for operator in Operator::ALL {
                    for gates in [Gates::None, Gates::Mixed] {
                        Problem::new(operator, dims(1, 70, 1, 24, 100), gates, 6).check();
                    }
                }
            });
        }
    });
}
