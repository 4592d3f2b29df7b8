//! Outer gradients of every input, of the initial weights and of the rest of the state.

use burn::tensor::DType;
use fastweight_ops::Path;

use crate::memories::{memories, single_limit};
use crate::problem::{Problem, Sizes, assert_same};

#[test]
fn they_equal_finite_differences_of_the_loop() {
    for (name, memory, parts) in memories(4) {
        let position = if name == "reading rate" { 4 } else { 6 };
        let limit = 10.0 * single_limit(&memory);
        let problem = Problem::new(memory, &Sizes::of(2, 5, 2, 5), parts, position, 9);
        let expected = problem.differences();
        let double = problem.tensors(DType::F64, Path::Composed, true, &[]);
        assert_same(&format!("{name}, f64"), &double.grads, &expected, 1e-6);
        let single = problem.tensors(DType::F32, Path::Fused, true, &[]);
        assert_same(&format!("{name}, fused"), &single.grads, &double.grads, limit);
    }
}
