//! Random numbers and comparisons of the kernel tests.
#![allow(dead_code)]

use burn::tensor::{Device, Tensor, TensorData};

/// `count` numbers in (-1, 1), a pure function of the seed.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count + 8).map(|_| next()).skip(8).collect()
}

pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

pub fn tensor<const D: usize>(values: &[f32], shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), device)
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// `sqrt(mean (a - b)^2 / mean b^2)`; the error itself where the expected values are all zero.
pub fn relative_rms(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let error: f64 = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let size: f64 = expected.iter().map(|b| b * b).sum();
    if size == 0.0 { error.sqrt() } else { (error / size).sqrt() }
}

pub fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    let error = relative_rms(found, expected);
    assert!(error < tolerance, "{what}: relative RMS error {error:e}, at most {tolerance:e}");
}

/// The same numbers behind strides that are not those of a contiguous tensor.
pub fn strided<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let last = D - 1;
    let copy = tensor.swap_dims(last - 1, last);
    let shape = copy.dims();
    let zeros = Tensor::zeros(shape, &copy.device());
    (copy + zeros).swap_dims(last - 1, last)
}
