//! Gates of every output: what they have to do with gates a head.

use burn::tensor::DType;
use fastweight_ops::Path;
use fastweight_ops::deep_memory::DeepMemory;

use crate::problem::{ALL, Array, Parts, Problem, Sizes, assert_same};

const GATES: [&str; 3] = ["rate", "momentum", "decay"];

/// The same problem with a head's gate for each of its outputs.
fn spread(problem: &Problem, outputs: usize) -> Problem {
    let mut spread = problem.clone();
    for (_, array) in spread.inputs.iter_mut().filter(|(name, _)| GATES.contains(&name.as_str())) {
        array.shape.push(outputs);
        array.values = array.values.iter().flat_map(|&x| vec![x; outputs]).collect();
    }
    spread
}

/// A head's gradient of a gate is the sum of its outputs'.
fn gathered(grads: Vec<(String, Array)>, outputs: usize) -> Vec<(String, Array)> {
    let gathered = |(name, Array { mut shape, values }): (String, Array)| {
        if !GATES.contains(&name.as_str()) {
            return (name, Array { shape, values });
        }
        shape.pop();
        let values = values.chunks(outputs).map(|head| head.iter().sum()).collect();
        (name, Array { shape, values })
    };
    grads.into_iter().map(gathered).collect()
}

#[test]
fn a_heads_gates_spread_over_its_outputs_change_nothing() {
    for (depth, chunk, read_before_write) in [(1, 1, false), (2, 8, false), (2, 8, true), (4, 3, false)] {
        let memory = DeepMemory { depth, chunk, read_before_write, expansion: 2, ..DeepMemory::default() };
        let outputs = memory.output_count(6, 6);
        let heads = Problem::new(memory, &Sizes::of(2, 21, 2, 6), ALL, 5 * chunk, 81);
        let spread = spread(&heads, outputs);
        let label = format!("depth {depth}, chunk {chunk}, read first {read_before_write}");
        assert_same(&format!("{label}, definition"), &spread.definition(), &heads.definition(), 0.0);
        for (dtype, path, limits) in
            [(DType::F64, Path::Composed, [1e-10; 2]), (DType::F32, Path::Fused, [1e-5, 1e-4])]
        {
            let [expected, found] = [&heads, &spread].map(|p| p.tensors(dtype, path, true, &[]));
            assert_same(&format!("{label}, {dtype:?}"), &found.outputs, &expected.outputs, limits[0]);
            assert_same(
                &format!("{label}, {dtype:?}"),
                &gathered(found.grads, outputs),
                &expected.grads,
                limits[1],
            );
        }
    }
}

/// A column that neither writes, holds nor forgets stays as it was, whatever its neighbours do.
#[test]
fn a_closed_column_stays() {
    let memory = DeepMemory { expansion: 2, chunk: 4, ..DeepMemory::default() };
    let (outputs, [_, hidden]) = (memory.output_count(6, 6), memory.weight_shapes(6, 6)[0]);
    let parts = Parts { outputs: [true; 3], ..ALL };
    let mut problem = Problem::new(memory, &Sizes::of(1, 9, 2, 6), parts, 0, 91);
    // One of the first weight's columns and one of the second's.
    let closed = [3, hidden + 2];
    for (_, array) in problem.inputs.iter_mut().filter(|(name, _)| GATES.contains(&name.as_str())) {
        for head in array.values.chunks_mut(outputs) {
            closed.iter().for_each(|&j| head[j] = 0.0);
        }
    }
    let found = problem.tensors(DType::F32, Path::Fused, false, &[]);
    for (layer, columns, column) in [(0, hidden, 3), (1, 6, 2)] {
        let name = format!("current.{layer}");
        let (_, after) = found.outputs.iter().find(|(n, _)| *n == name).unwrap();
        let before = problem.get(&name).unwrap();
        for (at, (after, before)) in after.values.iter().zip(before).enumerate() {
            assert_eq!(after == before, at % columns == column, "{name} at {at}");
        }
    }
}
