//! The LayerNorm and the gradient through it, fused, each with its own backward pass.

use crate::fused::{Forward, FusedOp};

/// Rows of `[M,S,V]` minus their mean, over their deviation. Input `[x]`, outputs `[hat, inverse [M,S,1]]`.
#[derive(Debug)]
pub(super) struct FusedNormalise {
    pub(super) shape: [usize; 3],
    pub(super) eps: f32,
}

/// `(d - mean(d) - hat mean(d hat)) inverse`. Inputs `[d, hat, inverse]`, one output of the shape of `d`.
#[derive(Debug)]
pub(super) struct FusedNormaliseBack {
    pub(super) shape: [usize; 3],
}

/// Sums are kept in so many parts, which the compiler turns into registers.
const PARTS: usize = 16;

/// `sum_i term(i)` for `i` below `count`, always in the same order.
pub(super) fn sum(term: impl Fn(usize) -> f32, count: usize) -> f32 {
    let mut parts = [0.0; PARTS];
    let whole = count - count % PARTS;
    for at in (0..whole).step_by(PARTS) {
        parts.iter_mut().enumerate().for_each(|(i, part)| *part += term(at + i));
    }
    parts.iter().sum::<f32>() + (whole..count).map(term).sum::<f32>()
}

fn mean(a: &[f32]) -> f32 {
    sum(|i| a[i], a.len()) / a.len() as f32
}

fn mean_product(a: &[f32], b: &[f32]) -> f32 {
    let b = &b[..a.len()];
    sum(|i| a[i] * b[i], a.len()) / a.len() as f32
}

/// `d - mean(d) - hat mean(d hat)`, and both means.
fn project(d: &[f32], hat: &[f32], out: &mut [f32]) -> (f32, f32) {
    let (mean, along) = (mean(d), mean_product(d, hat));
    out.iter_mut().zip(d).zip(hat).for_each(|((out, d), hat)| *out = d - mean - hat * along);
    (mean, along)
}

fn multiply(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

fn inverse_shape(shape: [usize; 3]) -> Vec<usize> {
    vec![shape[0], shape[1], 1]
}

impl FusedNormalise {
    fn rows(&self, x: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let size = self.shape[2];
        let (mut hat, mut inverse) = (vec![0.0; x.len()], vec![0.0; x.len() / size]);
        for ((x, hat), inverse) in x.chunks_exact(size).zip(hat.chunks_exact_mut(size)).zip(&mut inverse) {
            let mean = mean(x);
            hat.iter_mut().zip(x).for_each(|(hat, x)| *hat = x - mean);
            *inverse = 1.0 / (mean_product(hat, hat) + self.eps).sqrt();
            multiply(hat, *inverse);
        }
        (hat, inverse)
    }
}

impl FusedOp for FusedNormalise {
    fn name(&self) -> &'static str {
        "deep_memory_normalise"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![self.shape.to_vec(), inverse_shape(self.shape)]
    }

    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let (hat, inverse) = self.rows(inputs[0]);
        Forward { outputs: vec![hat, inverse], saved: vec![] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        if !needs[0] {
            return vec![None];
        }
        let size = self.shape[2];
        let (hat, inverse) = self.rows(inputs[0]);
        let mut d_x = vec![0.0; hat.len()];
        for (row, d_x) in d_x.chunks_exact_mut(size).enumerate() {
            let range = row * size..(row + 1) * size;
            let (hat, inverse) = (&hat[range.clone()], inverse[row]);
            if let Some(grad) = grads[0] {
                project(&grad[range], hat, d_x);
                multiply(d_x, inverse);
            }
            // d inverse / d x = -inverse^2 hat / size
            if let Some(grad) = grads[1] {
                let factor = -grad[row] * inverse * inverse / size as f32;
                d_x.iter_mut().zip(hat).for_each(|(d_x, hat)| *d_x += factor * hat);
            }
        }
        vec![Some(d_x)]
    }
}

impl FusedOp for FusedNormaliseBack {
    fn name(&self) -> &'static str {
        "deep_memory_normalise_back"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![self.shape.to_vec()]
    }

    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let size = self.shape[2];
        let mut u = vec![0.0; inputs[0].len()];
        for (row, u) in u.chunks_exact_mut(size).enumerate() {
            let range = row * size..(row + 1) * size;
            project(&inputs[0][range.clone()], &inputs[1][range], u);
            multiply(u, inputs[2][row]);
        }
        Forward { outputs: vec![u], saved: vec![] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let Some(grad) = grads[0] else { return vec![None; needs.len()] };
        let size = self.shape[2];
        let (mut d_d, mut d_hat) = (vec![0.0; grad.len()], vec![0.0; grad.len()]);
        let mut d_inverse = vec![0.0; grad.len() / size];
        for row in 0..d_inverse.len() {
            let range = row * size..(row + 1) * size;
            let [d, hat, grad] = [inputs[0], inputs[1], grad].map(|x| &x[range.clone()]);
            let inverse = inputs[2][row];
            let (d_d, d_hat) = (&mut d_d[range.clone()], &mut d_hat[range]);
            // The projection is symmetric: it leads the gradient back as it led d forward.
            let (_, grad_along) = project(grad, hat, d_d);
            d_inverse[row] = sum(|i| d_d[i] * d[i], size);
            multiply(d_d, inverse);
            let along = mean_product(d, hat);
            for ((d_hat, d), grad) in d_hat.iter_mut().zip(d).zip(grad) {
                *d_hat = -inverse * (grad * along + d * grad_along);
            }
        }
        let all = [d_d, d_hat, d_inverse];
        all.into_iter().zip(needs).map(|(d, &needed)| needed.then_some(d)).collect()
    }
}
