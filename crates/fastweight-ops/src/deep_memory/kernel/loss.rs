//! The inner loss's gradient at what the memory returns, and the gradient of that; tokens in lanes.

use crate::deep_memory::InnerLoss;
use crate::kernel::tile::Matrix;

/// Numbers of `rows` features and of `tokens` tokens in lanes.
struct Columns<'a> {
    numbers: &'a mut [f32],
    width: usize,
}

impl Columns<'_> {
    /// # Safety
    /// The matrix has so many rows, and nothing else refers to them.
    unsafe fn of(matrix: Matrix, rows: usize) -> Self {
        let width = matrix.stride;
        // SAFETY: vouched for by the caller.
        let numbers = unsafe { std::slice::from_raw_parts_mut(matrix.start, rows * width) };
        Self { numbers, width }
    }

    fn dot(&self, other: &Self, token: usize) -> f32 {
        let ends = (token..self.numbers.len()).step_by(self.width);
        ends.map(|at| self.numbers[at] * other.numbers[at]).sum()
    }
}

/// Inputs and outputs: `gap = M(k) - v` and the error that the loss makes of it, `[rows, tokens]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Errors<'a> {
    pub loss: InnerLoss,
    pub gap: Matrix,
    pub error: Matrix,
    pub rows: usize,
    pub tokens: usize,
    /// Thresholds of the Huber loss, 1 when absent.
    pub threshold: Option<&'a [f32]>,
}

impl Errors<'_> {
    fn threshold(&self, token: usize) -> f32 {
        self.threshold.map_or(1.0, |threshold| threshold[token])
    }

    /// The error of a gap, for losses other than [`InnerLoss::Squared`] and [`InnerLoss::DotProduct`].
    pub fn forward(&self) {
        // SAFETY: two matrices of the workspace.
        let (gap, error) = unsafe { (Columns::of(self.gap, self.rows), Columns::of(self.error, self.rows)) };
        error.numbers.copy_from_slice(gap.numbers);
        match self.loss {
            InnerLoss::Squared | InnerLoss::DotProduct => {}
            InnerLoss::Huber => {
                for token in 0..self.tokens {
                    let (threshold, square) = (self.threshold(token), gap.dot(&gap, token));
                    if square > threshold * threshold {
                        let shrink = threshold / square.sqrt();
                        error.numbers[token..].iter_mut().step_by(gap.width).for_each(|x| *x *= shrink);
                    }
                }
            }
            InnerLoss::Power { p, smooth } => {
                error.numbers.iter_mut().for_each(|x| *x = power(*x, p as f32, smooth).0);
            }
        }
    }

    /// From the gradient of the error in `d` to that of the gap, in its place; adds to those of the thresholds.
    pub fn backward(&self, d: Matrix, d_threshold: &mut [f32]) {
        // SAFETY: two matrices of the workspace.
        let (gap, d) = unsafe { (Columns::of(self.gap, self.rows), Columns::of(d, self.rows)) };
        match self.loss {
            InnerLoss::Squared => {}
            InnerLoss::DotProduct => d.numbers.fill(0.0),
            InnerLoss::Huber => {
                for (token, d_threshold) in d_threshold.iter_mut().enumerate().take(self.tokens) {
                    let (threshold, square) = (self.threshold(token), gap.dot(&gap, token));
                    if square > threshold * threshold {
                        let norm = square.sqrt();
                        let along = gap.dot(&d, token);
                        *d_threshold += along / norm;
                        for at in (token..d.numbers.len()).step_by(d.width) {
                            let across = d.numbers[at] - gap.numbers[at] * along / square;
                            d.numbers[at] = across * threshold / norm;
                        }
                    }
                }
            }
            InnerLoss::Power { p, smooth } => {
                for (d, gap) in d.numbers.iter_mut().zip(gap.numbers) {
                    *d *= power(*gap, p as f32, smooth).1;
                }
            }
        }
    }
}

/// The derivative of `|x|^p` or its smooth form, and the derivative of that.
fn power(x: f32, p: f32, smooth: bool) -> (f32, f32) {
    if smooth {
        let square = x * x + 1e-6;
        let (size, t) = (p * square.powf((p - 1.0) / 2.0), (10.0 * x).tanh());
        return (t * size, size * (10.0 * (1.0 - t * t) + t * (p - 1.0) * x / square));
    }
    let size = x.abs();
    if p == 2.0 {
        (2.0 * x, 2.0)
    } else if p == 3.0 {
        (3.0 * x * size, 6.0 * size)
    } else if size <= f32::MIN_POSITIVE {
        (0.0, 0.0)
    } else {
        let slope = p * size.powf(p - 1.0);
        (slope * x.signum(), slope * (p - 1.0) / size)
    }
}
