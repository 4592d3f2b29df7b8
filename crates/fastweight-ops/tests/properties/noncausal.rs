//! Linear attention without a direction, and the explicit form of the normalised one.

use burn::tensor::{DType, Device, Tensor, TensorData};
use fastweight_ops::kernel::Dims;
use fastweight_ops::linear::{self, linear_attention_noncausal};
use fastweight_ops::{Offsets, SequenceOptions, normalised_linear};
use proptest::prelude::*;

use crate::agreement::sizes;
use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Form, Operator};
use crate::{cases, compute};

proptest! {
    #![proptest_config(cases(20))]

    #[test]
    fn noncausal_attention_equals_its_loop(sizes in sizes(60), seed in any::<u64>()) {
        let problem = problem(Operator::Linear, &sizes, Gates::Absent, seed);
        let Sizes { batch, time, heads, key, value, .. } = sizes;
        let offsets = sizes.offsets.as_deref().map(|o| Offsets::new(o, time).unwrap());
        let dims = Dims { batch, time, heads, key, value, scale: 0.5, offsets: offsets.clone() };
        let [q, k, v] = ["q", "k", "v"].map(|name| problem.inputs[name].values.as_slice());
        let gate = linear::reference::Gate::None;
        let inputs = linear::reference::Inputs { dims: &dims, scale: 0.5, q, k, v, gate, initial: None };
        let up = &problem.up["o"].values;
        let expected = linear::reference::forward_noncausal(&inputs);
        let expected_grads = linear::reference::backward_noncausal(&inputs, up);

        for (dtype, limit) in [(DType::F32, 1e-5), (DType::F64, 1e-12)] {
            let device = Device::flex().autodiff();
            let tensor = |values: &[f64], width: usize| {
                let data = TensorData::new(values.to_vec(), [batch, time, heads, width]);
                Tensor::<4>::from_data(data.convert_dtype(dtype), (&device, dtype))
            };
            let leaves = [tensor(q, key), tensor(k, key), tensor(v, value)].map(Tensor::require_grad);
            let [q, k, v] = leaves.clone();
            let options = SequenceOptions { scale: Some(0.5), offsets: offsets.clone(), ..Default::default() };
            let o = linear_attention_noncausal(q, k, v, &options).unwrap();
            crate::close(&o.to_data().iter::<f64>().collect::<Vec<_>>(), &expected, limit);
            let grads = (o * tensor(up, value)).sum().backward();
            for (leaf, expected) in leaves.iter().zip(&expected_grads) {
                let grad = leaf.grad(&grads).expect("a gradient").into_data();
                crate::close(&grad.iter::<f64>().collect::<Vec<_>>(), expected, limit);
            }
        }
    }

    #[test]
    fn explicit_normalised_attention_equals_the_recurrence(sizes in sizes(60), seed in any::<u64>()) {
        let mut problem = problem(Operator::NormalisedLinear, &sizes, Gates::Absent, seed);
        problem.inputs.retain(|name, _| !matches!(name.as_str(), "S" | "z"));
        let Sizes { batch, time, heads, key, value, .. } = sizes;
        let offsets = sizes.offsets.as_deref().map(|o| Offsets::new(o, time).unwrap());
        let dims = Dims { batch, time, heads, key, value, scale: 1.0, offsets };
        let [q, k, v] = ["q", "k", "v"].map(|name| problem.inputs[name].values.as_slice());
        let inputs = normalised_linear::reference::Inputs { dims: &dims, q, k, v, gate: None, initial: None };
        let explicit = normalised_linear::reference::forward_explicit(&inputs);
        let recurrent = compute(&problem.with_states(), Form::Reference);
        crate::close(&explicit, &recurrent.outputs["o"].values, 1e-12);
    }
}
