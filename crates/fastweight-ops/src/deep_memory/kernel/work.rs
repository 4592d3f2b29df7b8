//! The scratch memory of a head: weights row after row, everything of a token in a lane.

use super::norm::NormGradients;
use super::plan::{Layer, pad};
use crate::kernel::tile::Matrix;
use crate::kernel::workspace::Carver;

/// What a head needs room for.
#[derive(Debug, Clone)]
pub(super) struct Needs {
    pub layers: Vec<Layer>,
    pub key: usize,
    pub value: usize,
    /// Lanes, whole registers, at least the tokens of a piece.
    pub width: usize,
    /// Weights of so many pieces at once.
    pub slots: usize,
    pub momentum: bool,
    pub proximal: bool,
    pub backward: bool,
}

/// A layer's part of the gradients at the chunk's start, of the reading, and of both backward.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerWork {
    pub layer: Layer,
    /// Input of the keys; its last row is one where there is a bias.
    pub h: Matrix,
    /// The activation's derivative at the layer's value, and its second; what comes back through the next weight.
    pub slope: Matrix,
    pub curve: Matrix,
    pub raw: Matrix,
    /// Error; what is written, the same unless a step is proximal; both with a token in each row.
    pub d: Matrix,
    pub written: Matrix,
    pub d_rows: Matrix,
    pub written_rows: Matrix,
    /// `1 + rate |h|^2` and `|h|^2` where the step is proximal.
    pub length: Matrix,
    pub square: Matrix,
    /// Input of the queries, times what they keep and carry; the derivative of the activation at the layer's value.
    pub g: Matrix,
    pub kept: Matrix,
    pub carried: Matrix,
    pub slope_q: Matrix,
    /// `h . g`, and the same times minus what the reader takes up: `[token, reader]`.
    pub scores: Matrix,
    pub taken: Matrix,
    /// Gradients of what is written or the error, of the input of the keys, of the layer's value for them.
    pub d_written: Matrix,
    pub d_h: Matrix,
    pub d_z: Matrix,
    /// Gradient of `raw` of the layer before, whose rows are this weight's.
    pub d_raw: Matrix,
    /// The inputs of the keys times what the weights and the momentum take up.
    pub weighed: [Matrix; 2],
    /// Gradient of the layer's value for queries.
    pub d_u: Matrix,
    /// Gradients of the layer's value for queries and for keys with a token in each row.
    pub d_u_rows: Matrix,
    pub d_z_rows: Matrix,
}

/// The weights and the momentum of every layer at one point.
#[derive(Debug, Clone)]
pub(super) struct Weights {
    pub w: Vec<Matrix>,
    pub p: Vec<Matrix>,
}

/// All of it; matrices are used by the backward pass alone where it says so.
#[derive(Debug, Clone)]
pub(super) struct Work {
    pub width: usize,
    pub layers: Vec<LayerWork>,
    pub slots: Vec<Weights>,
    /// Weights at the start of a chunk that is in several pieces.
    pub start: Vec<Matrix>,
    pub key_rows: Matrix,
    pub value_rows: Matrix,
    pub v: Matrix,
    /// A layer's value, or any other of the largest size.
    pub z: Matrix,
    pub hat: Matrix,
    pub inverse: Matrix,
    pub hat_q: Matrix,
    pub inverse_q: Matrix,
    pub gap: Matrix,
    pub error: Matrix,
    /// The output, or its gradient.
    pub out: Matrix,
    /// Backward: gradients of the weights and the momentum after a piece, and of the chunk's start.
    pub d_after: Weights,
    pub d_start: Vec<Matrix>,
    pub d_g: Matrix,
    pub d_q: Matrix,
    pub d_k: Matrix,
    pub d_v: Matrix,
    pub d_error: Matrix,
    pub d_hat: Matrix,
    pub d_inverse: Matrix,
    pub squares: [Matrix; 3],
    pub norm: NormGradients,
}

impl Work {
    /// Numbers that [`Self::carve`] takes.
    pub fn size(needs: &Needs) -> usize {
        let mut size = 0;
        Self::lay_out(needs, &mut |rows, columns, _| {
            size += (rows * columns).next_multiple_of(16) + 16;
            Matrix { start: std::ptr::null_mut(), stride: columns }
        });
        size
    }

    /// Parts of a workspace of [`Self::size`] numbers. Everything but the weights is zero, and the inputs of biases
    /// are one.
    pub fn carve(needs: &Needs, carver: &mut Carver) -> Self {
        let work = Self::lay_out(needs, &mut |rows, columns, clear| {
            let matrix = carver.matrix(rows, columns);
            if clear {
                // SAFETY: the carver just handed out so many numbers.
                unsafe { std::ptr::write_bytes(matrix.start, 0, rows * columns) };
            }
            matrix
        });
        work.layers.iter().for_each(|layer| layer.set_bias());
        work
    }

    fn lay_out(needs: &Needs, room: &mut impl FnMut(usize, usize, bool) -> Matrix) -> Self {
        let Needs { layers, key, value, width, slots, momentum, proximal, backward } = needs;
        let (key, value, width) = (pad(*key), pad(*value), *width);
        let none = Matrix { start: std::ptr::null_mut(), stride: width };
        let largest = layers.iter().map(|layer| layer.rows.max(layer.columns)).max().unwrap_or(0);
        let mut weights = |there: bool| -> Vec<Matrix> {
            let layers = layers.iter().filter(|_| there);
            layers.map(|layer| room(layer.rows, layer.stride(), false)).collect()
        };
        let mut both = |there: bool| Weights { w: weights(there), p: weights(there && *momentum) };
        let all_slots = (0..*slots).map(|_| both(true)).collect();
        let d_after = both(*backward);
        let (start, d_start) = (weights(true), weights(*backward));
        let mut room = |rows: usize, columns: usize| room(rows, columns, true);
        // A matrix of the backward pass.
        macro_rules! back {
            ($rows:expr, $columns:expr) => {
                if *backward { room($rows, $columns) } else { none }
            };
        }
        let mut work = Vec::new();
        for (i, layer) in layers.iter().enumerate() {
            let (rows, columns) = (layer.rows, layer.columns);
            let last = i + 1 == layers.len();
            let d = room(columns, width);
            let written_rows = room(width, columns);
            work.push(LayerWork {
                layer: *layer,
                h: room(rows, width),
                slope: if last { none } else { room(columns, width) },
                curve: if last { none } else { back!(columns, width) },
                raw: if last { none } else { room(columns, width) },
                d,
                written: if *proximal { room(columns, width) } else { d },
                d_rows: if *proximal { back!(width, columns) } else { written_rows },
                written_rows,
                length: room(1, width),
                square: room(1, width),
                g: room(rows, width),
                kept: room(rows, width),
                carried: room(rows, width),
                slope_q: if last { none } else { room(columns, width) },
                scores: room(width, width),
                taken: room(width, width),
                d_written: back!(columns, width),
                d_h: back!(rows, width),
                d_z: back!(columns, width),
                d_raw: back!(rows, width),
                weighed: [room(rows, width), room(rows, width)],
                d_u: back!(columns, width),
                d_u_rows: back!(width, columns),
                d_z_rows: back!(width, columns),
            });
        }
        Self {
            width,
            layers: work,
            slots: all_slots,
            start,
            key_rows: room(width, key),
            value_rows: room(width, value),
            v: room(value, width),
            z: room(largest, width),
            hat: room(value, width),
            inverse: room(1, width),
            hat_q: room(value, width),
            inverse_q: room(1, width),
            gap: room(value, width),
            error: room(value, width),
            out: room(value, width),
            d_after,
            d_start,
            d_g: back!(largest, width),
            d_q: back!(key, width),
            d_k: back!(key, width),
            d_v: back!(value, width),
            d_error: back!(value, width),
            d_hat: back!(value, width),
            d_inverse: back!(1, width),
            squares: [back!(width, width), back!(width, width), back!(width, width)],
            norm: NormGradients { weight: back!(value, 16), bias: back!(value, 16) },
        }
    }
}

impl LayerWork {
    /// Ones in the row of the bias.
    pub fn set_bias(&self) {
        if self.layer.from > self.layer.inputs {
            for matrix in [self.h, self.g] {
                // SAFETY: the row is one of the matrix's.
                unsafe {
                    std::slice::from_raw_parts_mut(matrix.at(self.layer.inputs, 0), matrix.stride).fill(1.0)
                };
            }
        }
    }
}
