//! The tensor form equals the plain loop: chunk 1 the token loop, larger chunks the loop that takes gradients at
//! chunk starts.

use burn::tensor::DType;
use fastweight_ops::Path;

use crate::memories::{memories, single_limit};
use crate::problem::{Problem, Sizes, assert_same};

#[test]
fn outputs_and_states_equal_the_loop() {
    for chunk in [1, 3, 16] {
        for (name, memory, parts) in memories(chunk) {
            for (time, position) in [(1, 0), (2, 0), (16, 0), (37, 0), (20, 5), (7, 17), (4, 15)] {
                let problem = Problem::new(memory.clone(), &Sizes::of(2, time, 2, 8), parts, position, 5);
                if problem.memory.rate == fastweight_ops::deep_memory::RateOf::Reading
                    && position % chunk != 0
                {
                    continue;
                }
                // A Newton-Schulz step is as long as the weights: differences grow from token to token.
                if problem.memory.newton_schulz && time > chunk.max(7) {
                    continue;
                }
                let expected = problem.definition();
                let label = format!("{name}, chunk {chunk}, {time} tokens from {position}");
                let double = problem.tensors(DType::F64, Path::Composed, false, &[]);
                assert_same(&format!("{label}, f64"), &double.outputs, &expected, 1e-10);
                // Rounding errors grow with every point where gradients are taken.
                if time <= chunk.max(7) {
                    let single = problem.tensors(DType::F32, Path::Fused, false, &[]);
                    assert_same(
                        &format!("{label}, fused"),
                        &single.outputs,
                        &expected,
                        single_limit(&problem.memory),
                    );
                }
            }
        }
    }
}
