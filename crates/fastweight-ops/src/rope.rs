//! Rotary position embedding, rotate-half form.
//!
//! Channel pairs `(i, i + K/2)` turn by the angle `position * base^(-2i/K)`.
//! Source: Su et al. 2021 (2104.09864).

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use rayon::prelude::*;

use crate::fused::{Forward, FusedOp, apply};
use crate::{Offsets, OpError, Path};

const OPERATOR: &str = "rope";

/// Positions of the tokens of a batch.
#[derive(Debug, Clone)]
pub struct Positions {
    starts: Vec<usize>,
    offsets: Option<Offsets>,
}

impl Positions {
    /// Row `b` starts at position `starts[b]`.
    pub fn rows(starts: Vec<usize>) -> Self {
        Self { starts, offsets: None }
    }

    /// Every one of `batch` rows starts at position `start`.
    pub fn uniform(batch: usize, start: usize) -> Self {
        Self::rows(vec![start; batch])
    }

    /// Document `d` of the one packed row starts at position `starts[d]`.
    ///
    /// # Errors
    /// Another number of starts than of documents.
    pub fn packed(offsets: Offsets, starts: Vec<usize>) -> Result<Self, OpError> {
        if starts.len() == offsets.documents() {
            return Ok(Self { starts, offsets: Some(offsets) });
        }
        Err(OpError::Value {
            operator: OPERATOR,
            argument: "starts",
            found: format!("{} starts", starts.len()),
            expected: format!("one for each of {} documents", offsets.documents()),
        })
    }

    fn check(&self, batch: usize, time: usize) -> Result<(), OpError> {
        let (expected_batch, expected_time) = match &self.offsets {
            Some(offsets) => (1, offsets.time()),
            None => (self.starts.len(), time),
        };
        if (batch, time) == (expected_batch, expected_time) {
            return Ok(());
        }
        Err(OpError::Value {
            operator: OPERATOR,
            argument: "positions",
            found: format!("positions of {expected_batch} rows x {expected_time} tokens"),
            expected: format!("those of the tensor's {batch} rows x {time} tokens"),
        })
    }

    /// `(start position, tokens)` of each run of consecutive positions, row after row; one row alone when
    /// all rows are equal.
    fn runs(&self, time: usize) -> Vec<(usize, usize)> {
        match &self.offsets {
            Some(offsets) => {
                self.starts.iter().zip(offsets.ranges()).map(|(&p, range)| (p, range.len())).collect()
            }
            None if self.starts.windows(2).all(|pair| pair[0] == pair[1]) => {
                self.starts.iter().take(1).map(|&p| (p, time)).collect()
            }
            None => self.starts.iter().map(|&p| (p, time)).collect(),
        }
    }
}

/// Cosines and sines, `[rows, time, K/2]` each, `rows` 1 when all rows share their positions.
#[derive(Debug)]
struct Table {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Positions whose angle is taken as `block + rest`, so that a table costs few sines.
const BLOCK: usize = 64;

impl Table {
    /// An entry depends on its position alone, however the sequence is cut.
    fn new(positions: &Positions, time: usize, half: usize, base: f32) -> Self {
        let frequencies: Vec<f64> =
            (0..half).map(|i| f64::from(base).powf(-(i as f64) / half as f64)).collect();
        let turns = |position: usize| -> Vec<(f64, f64)> {
            frequencies.iter().map(|f| (position as f64 * f).sin_cos()).collect()
        };
        let runs = positions.runs(time);
        let total: usize = runs.iter().map(|run| run.1).sum();
        let (mut cos, mut sin) = (Vec::with_capacity(total * half), Vec::with_capacity(total * half));
        let mut rests: Vec<Option<Vec<(f64, f64)>>> = vec![None; BLOCK];
        let mut block = (usize::MAX, Vec::new());
        for (start, tokens) in runs {
            for position in start..start + tokens {
                if block.0 != position / BLOCK {
                    block = (position / BLOCK, turns(position / BLOCK * BLOCK));
                }
                let rest = rests[position % BLOCK].get_or_insert_with(|| turns(position % BLOCK));
                for ((block_sin, block_cos), (rest_sin, rest_cos)) in block.1.iter().zip(rest.iter()) {
                    cos.push((block_cos * rest_cos - block_sin * rest_sin) as f32);
                    sin.push((block_sin * rest_cos + block_cos * rest_sin) as f32);
                }
            }
        }
        Self { cos, sin }
    }
}

/// Rotates `x [B, T, H, K]` by its tokens' positions; `base` is usually 10,000.
///
/// # Errors
/// An odd `K`, or positions of another number of rows or tokens.
pub fn rotate(x: Tensor<4>, positions: &Positions, base: f32) -> Result<Tensor<4>, OpError> {
    rotate_on(x, positions, base, Path::Auto)
}

/// [`rotate`] on a chosen path.
///
/// # Errors
/// Those of [`rotate`], and a path that does not exist for the tensor.
pub fn rotate_on(x: Tensor<4>, positions: &Positions, base: f32, path: Path) -> Result<Tensor<4>, OpError> {
    let shape @ [batch, time, _, key] = x.dims();
    if !key.is_multiple_of(2) {
        let expected = "an even last dimension".into();
        return Err(OpError::Shape { operator: OPERATOR, argument: "x", found: shape.to_vec(), expected });
    }
    positions.check(batch, time)?;
    let fused = path.is_fused(OPERATOR, &x)?;
    if x.shape().num_elements() == 0 {
        return Ok(x);
    }
    let table = Table::new(positions, time, key / 2, base);
    if fused {
        let [y, ..] = apply(Arc::new(FusedRope { shape, table }), vec![x.into_dispatch()]);
        Ok(Tensor::from_dispatch(y))
    } else {
        Ok(composed(x, table))
    }
}

fn composed(x: Tensor<4>, table: Table) -> Tensor<4> {
    let [_, time, _, key] = x.dims();
    let half = key / 2;
    let rows = table.cos.len() / (time * half);
    let device = x.device();
    let load = |values| {
        Tensor::<4>::from_data(TensorData::new(values, [rows, time, 1, half]), &device).cast(x.dtype())
    };
    let (cos, sin) = (load(table.cos), load(table.sin));
    let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
    let turned = first.clone() * cos.clone() - second.clone() * sin.clone();
    Tensor::cat(vec![turned, second * cos + first * sin], 3)
}

#[derive(Debug)]
struct FusedRope {
    shape: [usize; 4],
    table: Table,
}

impl FusedRope {
    /// Turns by the angles times `direction`, 1 or -1.
    fn turn(&self, x: &[f32], direction: f32) -> Vec<f32> {
        let [_, time, heads, key] = self.shape;
        let half = key / 2;
        let angles = self.table.cos.len() / half;
        let mut y = vec![0.0; x.len()];
        let tokens = (1_usize << 14).div_ceil(heads * key);
        let piece = |(index, (x, y)): (usize, (&[f32], &mut [f32]))| {
            for (token, (x, y)) in x.chunks(heads * key).zip(y.chunks_mut(heads * key)).enumerate() {
                let entry = (index * tokens + token) % angles * half;
                let (cos, sin) = (&self.table.cos[entry..entry + half], &self.table.sin[entry..entry + half]);
                for (x, y) in x.chunks(key).zip(y.chunks_mut(key)) {
                    let ((a, b), (c, d)) = (x.split_at(half), y.split_at_mut(half));
                    for i in 0..half {
                        let sin = sin[i] * direction;
                        c[i] = a[i] * cos[i] - b[i] * sin;
                        d[i] = b[i] * cos[i] + a[i] * sin;
                    }
                }
            }
        };
        debug_assert!(angles == time || angles * heads * key == x.len());
        x.par_chunks(tokens * heads * key)
            .zip(y.par_chunks_mut(tokens * heads * key))
            .enumerate()
            .for_each(piece);
        y
    }
}

impl FusedOp for FusedRope {
    fn name(&self) -> &'static str {
        OPERATOR
    }
    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![self.shape.to_vec()]
    }
    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        Forward { outputs: vec![self.turn(inputs[0], 1.0)], saved: vec![] }
    }
    fn backward(
        &self,
        _inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        vec![grads[0].filter(|_| needs[0]).map(|grad| self.turn(grad, -1.0))]
    }
}
