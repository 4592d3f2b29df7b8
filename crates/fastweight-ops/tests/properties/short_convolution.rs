//! The short convolution against its loop, carried state included.

use burn::tensor::{DType, Device, Tensor, TensorData};
use fastweight_ops::short_conv::{ConvSizes, reference, short_convolution};
use fastweight_ops::{Offsets, Path};
use proptest::prelude::*;

use crate::agreement::sizes;
use crate::cases;
use crate::support::random::Random;

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn short_convolution_equals_its_loop(
        sizes in sizes(40), width in 1..6_usize, silu in any::<bool>(), biased in any::<bool>(), seed in any::<u64>()
    ) {
        let (batch, time, channels) = (sizes.batch, sizes.time, sizes.heads * sizes.key);
        let offsets = sizes.offsets.as_deref().map(|o| Offsets::new(o, time).unwrap());
        let states = sizes.sequences();
        let mut random = Random::new(seed);
        let mut normals = |shape: &[usize]| random.normals(shape).values;
        let x = normals(&[batch, time, channels]);
        let weight = normals(&[channels, width]);
        let bias = biased.then(|| normals(&[channels]));
        let initial = normals(&[states, width - 1, channels]);
        let (up_y, up_state) = (normals(&[batch, time, channels]), normals(&[states, width - 1, channels]));

        let conv = ConvSizes { batch, time, channels, width, silu, offsets: offsets.clone() };
        let inputs = reference::Inputs {
            sizes: &conv, x: &x, weight: &weight, bias: bias.as_deref(), initial: Some(&initial),
        };
        let expected = reference::forward(&inputs);
        let grads = reference::backward(&inputs, &up_y, &up_state);

        let forms = [(Path::Fused, DType::F32), (Path::Composed, DType::F32), (Path::Composed, DType::F64)];
        for (path, dtype) in forms {
            let limit = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
            let device = Device::flex().autodiff();
            let options = (&device, dtype);
            let data = |values: &[f64], shape: &[usize]| {
                TensorData::new(values.to_vec(), shape.to_vec()).convert_dtype(dtype)
            };
            let x_leaf = Tensor::<3>::from_data(data(&x, &[batch, time, channels]), options).require_grad();
            let w_leaf = Tensor::<2>::from_data(data(&weight, &[channels, width]), options).require_grad();
            let b_leaf = bias.as_ref().map(|b| Tensor::<1>::from_data(data(b, &[channels]), options).require_grad());
            let carried = [states, width - 1, channels];
            let s_leaf = (width > 1).then(|| Tensor::<3>::from_data(data(&initial, &carried), options).require_grad());
            let (y, state) = short_convolution(
                x_leaf.clone(), w_leaf.clone(), b_leaf.clone(), s_leaf.clone(), silu, offsets.as_ref(), path,
            ).unwrap();
            let numbers = |data: TensorData| data.iter::<f64>().collect::<Vec<_>>();
            crate::close(&numbers(y.to_data()), &expected.y, limit);
            let up = Tensor::<3>::from_data(data(&up_y, &[batch, time, channels]), options);
            let mut loss = (y * up).sum();
            if width > 1 {
                crate::close(&numbers(state.to_data()), &expected.state, limit);
                loss = loss + (state * Tensor::<3>::from_data(data(&up_state, &carried), options)).sum();
            }
            let found = loss.backward();
            crate::close(&numbers(x_leaf.grad(&found).expect("x").into_data()), &grads.x, limit);
            crate::close(&numbers(w_leaf.grad(&found).expect("weight").into_data()), &grads.weight, limit);
            if let Some(leaf) = b_leaf {
                crate::close(&numbers(leaf.grad(&found).expect("bias").into_data()), &grads.bias, limit);
            }
            if let Some(leaf) = s_leaf {
                crate::close(&numbers(leaf.grad(&found).expect("state").into_data()), &grads.initial, limit);
            }
        }
    }
}
