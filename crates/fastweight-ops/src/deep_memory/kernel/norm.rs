//! The LayerNorm over the features of tokens in lanes, its gradient, and the gradient of that.

use super::lanes::pass;
use crate::kernel::simd::{InstructionSet, Kernel, Lanes, dispatch};
use crate::kernel::tile::Matrix;

/// Gradients of the LayerNorm's weight and bias: a row for each feature, lanes still to be added up.
#[derive(Debug, Clone, Copy)]
pub(super) struct NormGradients {
    pub weight: Matrix,
    pub bias: Matrix,
}

/// Adds a register to the sums of a feature.
///
/// # Safety
/// The row is inside the matrix.
#[inline(always)]
unsafe fn gather<L: Lanes>(sums: Matrix, row: usize, register: L) {
    // SAFETY: vouched for by the caller; a row has room for the widest register.
    unsafe {
        let to = sums.at(row, 0);
        register.add(L::load(to)).store(to);
    }
}

/// One over the square root of `x / size + eps` of every lane.
#[inline(always)]
unsafe fn inverse_root<L: Lanes>(x: L, size: usize, eps: f32) -> L {
    let mut lanes = [0.0_f32; 16];
    // SAFETY: no register has more than 16 lanes.
    unsafe {
        x.store(lanes.as_mut_ptr());
        for lane in &mut lanes[..L::COUNT] {
            *lane = 1.0 / (*lane / size as f32 + eps).sqrt();
        }
        L::load(lanes.as_ptr())
    }
}

pass! {
    /// `(x - mean) / deviation` to `hat`, one over the deviation to `inverse`.
    Normalise { x: Matrix, hat: Matrix, inverse: *mut f32, rows: usize, eps: f32 }
    x, L => {
        let width = x.x.stride;
        let share = L::splat(1.0 / x.rows as f32);
        let mut lane = 0;
        while lane < width {
            let (mut sum, mut square) = (L::splat(0.0), L::splat(0.0));
            for row in 0..x.rows {
                sum = sum.add(L::load(x.x.at(row, lane)));
            }
            let mean = sum.mul(share);
            for row in 0..x.rows {
                let centred = L::load(x.x.at(row, lane)).sub(mean);
                square = centred.mul_add(centred, square);
            }
            let inverse = inverse_root(square, x.rows, x.eps);
            inverse.store(x.inverse.add(lane));
            for row in 0..x.rows {
                L::load(x.x.at(row, lane)).sub(mean).mul(inverse).store(x.hat.at(row, lane));
            }
            lane += L::COUNT;
        }
    }
}

/// What [`NormBack`] adds for the gradient through the gradient.
#[derive(Debug, Clone, Copy)]
pub(super) struct Second {
    /// Gradient of `hat`.
    pub hat: Matrix,
    /// Gradient of `inverse`, a lane for each token.
    pub inverse: *const f32,
}

pass! {
    /// The gradient of the LayerNorm's input from that of its output `d`:
    /// `inverse (c - mean(c) - hat mean(c hat))` with `c = weight d`, to `to`, which may be `d`.
    NormBack {
        d: Matrix,
        hat: Matrix,
        inverse: *const f32,
        weight: *const f32,
        second: Option<Second>,
        gradients: Option<NormGradients>,
        to: Matrix,
        rows: usize,
    }
    x, L => {
        let width = x.d.stride;
        let share = L::splat(1.0 / x.rows as f32);
        let mut lane = 0;
        while lane < width {
            let (mut sum, mut along) = (L::splat(0.0), L::splat(0.0));
            for row in 0..x.rows {
                let (d, hat) = (L::load(x.d.at(row, lane)), L::load(x.hat.at(row, lane)));
                let mut c = d.mul(L::splat(*x.weight.add(row)));
                if let Some(second) = x.second {
                    c = c.add(L::load(second.hat.at(row, lane)));
                }
                if let Some(gradients) = x.gradients {
                    gather(gradients.weight, row, d.mul(hat));
                    gather(gradients.bias, row, d);
                }
                sum = sum.add(c);
                along = c.mul_add(hat, along);
                c.store(x.to.at(row, lane));
            }
            let (mean, along) = (sum.mul(share), along.mul(share));
            let inverse = L::load(x.inverse.add(lane));
            // d inverse / d x = -inverse^2 hat / size
            let through = match x.second {
                Some(second) => L::load(second.inverse.add(lane)).mul(inverse).mul(share),
                None => L::splat(0.0),
            };
            let slope = along.add(through);
            for row in 0..x.rows {
                let hat = L::load(x.hat.at(row, lane));
                let to = x.to.at(row, lane);
                L::load(to).sub(mean).sub(hat.mul(slope)).mul(inverse).store(to);
            }
            lane += L::COUNT;
        }
    }
}

pass! {
    /// The gradient through [`NormBack`] of `error`: `d` is that of what it returned. Gives that of the error, in
    /// `d_error`, and those of `hat` and `inverse`.
    NormBackBack {
        d: Matrix,
        error: Matrix,
        hat: Matrix,
        inverse: *const f32,
        weight: *const f32,
        d_error: Matrix,
        d_hat: Matrix,
        d_inverse: *mut f32,
        gradients: NormGradients,
        rows: usize,
    }
    x, L => {
        let width = x.d.stride;
        let share = L::splat(1.0 / x.rows as f32);
        let mut lane = 0;
        while lane < width {
            let zero = L::splat(0.0);
            let (mut sum, mut d_along, mut c_along) = (zero, zero, zero);
            for row in 0..x.rows {
                let (d, hat) = (L::load(x.d.at(row, lane)), L::load(x.hat.at(row, lane)));
                let c = L::load(x.error.at(row, lane)).mul(L::splat(*x.weight.add(row)));
                sum = sum.add(d);
                d_along = d.mul_add(hat, d_along);
                c_along = c.mul_add(hat, c_along);
            }
            let (mean, d_along, c_along) = (sum.mul(share), d_along.mul(share), c_along.mul(share));
            let inverse = L::load(x.inverse.add(lane));
            let minus = zero.sub(inverse);
            let mut d_inverse = zero;
            for row in 0..x.rows {
                let (d, hat) = (L::load(x.d.at(row, lane)), L::load(x.hat.at(row, lane)));
                let weight = L::splat(*x.weight.add(row));
                let error = L::load(x.error.at(row, lane));
                let c = error.mul(weight);
                // The projection is symmetric.
                let back = d.sub(mean).sub(hat.mul(d_along));
                d_inverse = back.mul_add(c, d_inverse);
                let d_c = back.mul(inverse);
                gather(x.gradients.weight, row, d_c.mul(error));
                d.mul_add(c_along, c.mul(d_along)).mul(minus).store(x.d_hat.at(row, lane));
                d_c.mul(weight).store(x.d_error.at(row, lane));
            }
            d_inverse.store(x.d_inverse.add(lane));
            lane += L::COUNT;
        }
    }
}

pass! {
    /// The lanes of every feature added up, `count` of them.
    Reduce { sums: Matrix, to: *mut f32, count: usize }
    x, L => {
        for row in 0..x.count {
            *x.to.add(row) = L::load(x.sums.at(row, 0)).sum();
        }
    }
}
