//! The differentiable registration of fused kernels, on a small bilinear operator.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use fastweight_ops::fused::{Forward, FusedOp, apply, step_in_place};

/// `o = x * y` elementwise, `s = sum x * y`.
#[derive(Debug)]
struct ProductAndSum;

impl FusedOp for ProductAndSum {
    fn name(&self) -> &'static str {
        "product_and_sum"
    }
    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![vec![2, 2], vec![1]]
    }
    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let o: Vec<f32> = inputs[0].iter().zip(inputs[1]).map(|(x, y)| x * y).collect();
        let s = o.iter().sum();
        Forward { outputs: vec![o, vec![s]], saved: vec![] }
    }
    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let total = |i: usize| grads[0].map_or(0.0, |g| g[i]) + grads[1].map_or(0.0, |g| g[0]);
        let other = |slot: usize| (0..4).map(|i| total(i) * inputs[1 - slot][i]).collect();
        (0..2).map(|slot| needs[slot].then(|| other(slot))).collect()
    }
}

fn run(x: &Tensor<2>, y: &Tensor<2>) -> (Tensor<2>, Tensor<1>) {
    let [o, s, _] =
        apply(Arc::new(ProductAndSum), vec![x.clone().into_dispatch(), y.clone().into_dispatch()]);
    (Tensor::from_dispatch(o), Tensor::from_dispatch(s))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

#[test]
fn gradients_reach_inputs_through_each_output_and_through_both() {
    let device = Device::flex().autodiff();
    for (use_o, use_s) in [(true, false), (false, true), (true, true)] {
        let x = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], &device).require_grad();
        let y = Tensor::<2>::from_data([[5.0, 6.0], [7.0, 8.0]], &device).require_grad();
        let (o, s) = run(&x, &y);
        assert_eq!(values(o.clone()), [5.0, 12.0, 21.0, 32.0]);
        assert_eq!(values(s.clone()), [70.0]);
        // A transposed gradient arrives as a view; the registration must hand over plain rows.
        let weights = Tensor::<2>::from_data([[1.0, 10.0], [100.0, 1000.0]], &device);
        let mut loss = Tensor::<1>::zeros([1], &device);
        if use_o {
            loss = loss + (o.transpose() * weights).sum();
        }
        if use_s {
            loss = loss + s * 0.5;
        }
        let grads = loss.backward();
        let expected: Vec<f32> = [1.0, 100.0, 10.0, 1000.0]
            .iter()
            .zip([5.0, 6.0, 7.0, 8.0])
            .map(|(w, y)| (if use_o { *w } else { 0.0 } + if use_s { 0.5 } else { 0.0 }) * y)
            .collect();
        assert_eq!(values(x.grad(&grads).unwrap()), expected);
        assert!(y.grad(&grads).is_some());
    }
}

#[test]
fn constants_and_untracked_inputs_run_without_a_tape() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let x = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], &device);
        let (o, s) = run(&x, &x.clone());
        assert_eq!(values(o), [1.0, 4.0, 9.0, 16.0]);
        assert_eq!(values(s), [30.0]);
    }
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], &device).require_grad();
    let y = Tensor::<2>::ones([2, 2], &Device::flex());
    let (o, _) = run(&x, &y);
    assert_eq!(values(x.grad(&o.sum().backward()).unwrap()), [1.0; 4]);
}

#[test]
fn a_step_leaves_shared_states_alone() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let state = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], &device);
        let kept = state.clone();
        let input = Tensor::<1>::from_data([10.0], &device);
        let (o, next) = step_in_place(state, vec![input.into_dispatch()], &[1], |s, inputs, o| {
            s[0] += inputs[0][0];
            o[0] = s[0];
        });
        assert_eq!(values(Tensor::<1>::from_dispatch(o)), [11.0]);
        assert_eq!(values(next), [11.0, 2.0, 3.0, 4.0]);
        assert_eq!(values(kept), [1.0, 2.0, 3.0, 4.0]);
    }
}
