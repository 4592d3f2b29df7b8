//! The fused matrix-memory kernels against the float64 loops.

mod kernels_common;

use fastweight_ops::Offsets;
use fastweight_ops::kernel::{InstructionSet, with_instruction_set};
use kernels_common::{Gates, Operator, Problem, Random, bits, dims};

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
    let sizes = [(20, 12), (60, 60), (64, 64), (128, 64), (64, 128), (12, 20), (1, 1), (3, 5), (17, 33), (8, 80)]
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
