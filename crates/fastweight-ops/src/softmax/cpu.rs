//! Fused softmax attention: blocks of queries meet blocks of keys, with a running maximum and sum.
//!
//! A register holds one number for each of its lanes' queries, so that maximum, sum and rescaling need no
//! work across lanes, and keys and values are read where they lie, at any head size. Memory is linear in
//! `T`: besides the output, the forward pass saves the log of each query's sum of exponentials.
//! Source: FlashAttention (Dao et al. 2022, 2205.14135), the running sum after Milakov and Gimelshein 2018
//! (1805.02867).

use rayon::prelude::*;

use super::Sizes;
use super::geometry::{KEYS, Place, QUERIES, QueryBlock, Segment, Sequence};
use super::tile::{Around, Factor, Rows, Store, product, transpose};
use super::{cpu_backward, cpu_token};
use crate::fused::{Forward, FusedOp};
use crate::kernel::InstructionSet;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::workspace::{Carver, SharedOut, with_workspace};

/// The fused operator: inputs `[q, k, v]` and `[k_cache, v_cache]` where a cache is held, output `[o]`.
#[derive(Debug)]
pub struct FusedSoftmax {
    /// Sizes of the call.
    pub sizes: Sizes,
}

/// Added to the score of a key that the query must not see; finite, so that differences stay numbers.
pub(super) const HIDDEN: f32 = f32::MIN / 2.0;

/// Queries up to which a sequence's head is computed query by query.
const FEW_QUERIES: usize = 4;

impl FusedOp for FusedSoftmax {
    fn name(&self) -> &'static str {
        "softmax_attention"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Sizes { batch, time, heads, value, .. } = self.sizes;
        vec![vec![batch, time, heads, value]]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let (o, log_sums) = forward(&self.sizes, inputs);
        let saved = if save { vec![o.clone(), log_sums] } else { vec![] };
        Forward { outputs: vec![o], saved }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let gradients = match (grads, saved) {
            ([Some(grad), ..], [o, log_sums]) => {
                cpu_backward::backward(&self.sizes, inputs, o, log_sums, grad)
            }
            _ => inputs.iter().map(|input| vec![0.0; input.len()]).collect(),
        };
        gradients.into_iter().zip(needs).map(|(gradient, needed)| needed.then_some(gradient)).collect()
    }
}

/// The output `[B, T, H, V]` and the log of each query's sum of exponentials `[B, T, H]`.
fn forward(sizes: &Sizes, inputs: &[&[f32]]) -> (Vec<f32>, Vec<f32>) {
    let queries = sizes.batch * sizes.time * sizes.heads;
    let (mut o, mut log_sums) = (vec![0.0; queries * sizes.value], vec![0.0; queries]);
    let targets = (SharedOut::new(&mut o), SharedOut::new(&mut log_sums));
    let set = InstructionSet::active();
    sizes.for_each_head(|sequence, group| {
        sizes.with_segments(inputs, sequence, group, |segments| {
            let run = |block| {
                let size = workspace(sizes, sequence, block);
                with_workspace(size, |carver| {
                    let q = inputs[0];
                    let task = ForwardTask { sizes, q, sequence, group, segments, block, targets, carver };
                    dispatch(set, task);
                });
            };
            if sequence.time * sizes.shared() <= FEW_QUERIES {
                return run(None);
            }
            let blocks = (0..QueryBlock::count(sizes, sequence)).into_par_iter().with_max_len(1);
            blocks.rev().for_each(|index| run(Some(QueryBlock::new(sizes, sequence, index))));
        });
    });
    (o, log_sums)
}

/// Numbers of scratch memory that a task needs.
fn workspace(sizes: &Sizes, sequence: &Sequence, block: Option<QueryBlock>) -> usize {
    let (key, value) = (sizes.key, sizes.value);
    match block {
        Some(_) => QUERIES * (key.max(value) + key + value + KEYS + 3) + 7 * 16,
        None => key + sequence.cached + sequence.time + 3 * 16,
    }
}

/// A block of queries of one key head, or all its queries one by one.
struct ForwardTask<'a> {
    sizes: &'a Sizes,
    q: &'a [f32],
    sequence: &'a Sequence,
    group: usize,
    segments: [Segment<'a>; 2],
    block: Option<QueryBlock>,
    targets: (SharedOut, SharedOut),
    carver: Carver,
}

impl Kernel for ForwardTask<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        let Self { sizes, q, sequence, group, segments, block, targets, mut carver } = self;
        // SAFETY: the caller vouches for the instruction set; tasks write their own queries' outputs.
        unsafe {
            match block {
                Some(block) => {
                    let place = Place::new(sizes, sequence, group, block);
                    block_forward::<L, WIDE>(&place, q, segments, targets, &mut carver);
                }
                None => cpu_token::forward::<L>(sizes, sequence, group, q, segments, targets, &mut carver),
            }
        }
    }
}

impl Place<'_> {
    /// Copies the block's rows of `width` numbers, each times `factor`, into rows `stride` apart; rows
    /// past the last query and numbers past the width become zero.
    ///
    /// # Safety
    /// `to` has room for [`QUERIES`] rows.
    #[inline(always)]
    pub(super) unsafe fn gather(&self, from: &[f32], width: usize, factor: f32, to: *mut f32, stride: usize) {
        for query in 0..QUERIES {
            // SAFETY: the caller vouches for the room.
            let row = unsafe { std::slice::from_raw_parts_mut(to.add(query * stride), stride) };
            if query < self.block.count {
                let at = self.index[query] * width;
                row.iter_mut().zip(&from[at..at + width]).for_each(|(to, from)| *to = from * factor);
                row[width..].fill(0.0);
            } else {
                row.fill(0.0);
            }
        }
    }

    /// Copies rows back, each times its query's factor.
    ///
    /// # Safety
    /// `from` has a row for each query; nobody else writes these queries' rows of `to`.
    #[inline(always)]
    pub(super) unsafe fn scatter(
        &self,
        from: *const f32,
        stride: usize,
        factors: &[f32],
        to: SharedOut,
        width: usize,
    ) {
        for (query, factor) in factors.iter().enumerate().take(self.block.count) {
            // SAFETY: vouched for by the caller.
            let (row, to) = unsafe {
                let to = std::slice::from_raw_parts_mut(to.at(self.index[query] * width), width);
                (std::slice::from_raw_parts(from.add(query * stride), width), to)
            };
            to.iter_mut().zip(row).for_each(|(to, from)| *to = from * factor);
        }
    }
}

/// Which keys of a block are hidden from which lanes.
pub(super) struct Mask<'a, L> {
    place: &'a Place<'a>,
    /// Whether anything is hidden.
    active: bool,
    /// Position of the block's first key, counted from the first query's.
    first_key: f32,
    window: f32,
    hidden: L,
}

impl<'a, L: Lanes> Mask<'a, L> {
    /// For `count` keys from a position on.
    ///
    /// # Safety
    /// The instruction set of `L` is there.
    #[inline(always)]
    pub(super) unsafe fn new(place: &'a Place<'a>, position: usize, count: usize) -> Self {
        // SAFETY: vouched for by the caller.
        let hidden = unsafe { L::splat(HIDDEN) };
        let first_key = position as f32 - place.block.first_position as f32;
        let active = place.block.hides(place.sizes, position, count);
        Self { place, active, first_key, window: place.sizes.window as f32, hidden }
    }

    /// The scores with hidden ones out of reach; `key` counts from the block's first key.
    #[inline(always)]
    pub(super) fn apply(&self, key: usize, lane: usize, scores: L) -> L {
        if !self.active {
            return scores;
        }
        // SAFETY: lanes are below QUERIES.
        let positions = unsafe { L::load(self.place.positions.as_ptr().add(lane)) };
        let ahead = scores.same(self.first_key + key as f32).sub(positions);
        let half = scores.same(0.5);
        let future = self.hidden.zero_where_below(ahead, half);
        let recent = self.hidden.zero_where_below(ahead.add(scores.same(self.window)), half);
        scores.add(future).add(self.hidden.sub(recent))
    }
}

/// Products added to rescaled sums.
struct Rescale {
    to: *mut f32,
    factors: *const f32,
}

impl<L: Lanes> Around<L> for Rescale {
    #[inline(always)]
    unsafe fn start(&self, row: usize, column: usize) -> L {
        // SAFETY: the target has the rows and columns of the product, the factors its columns.
        unsafe { L::load(self.to.add(row * QUERIES + column)).mul(L::load(self.factors.add(column))) }
    }
    #[inline(always)]
    unsafe fn finish(&self, row: usize, column: usize, sum: L) {
        // SAFETY: as above.
        unsafe { sum.store(self.to.add(row * QUERIES + column)) }
    }
}

/// One block of queries against all keys that it sees.
///
/// # Safety
/// The instruction set of `L` is there; nobody else writes the block's outputs.
#[inline(always)]
unsafe fn block_forward<L: Lanes, const WIDE: usize>(
    place: &Place<'_>,
    q: &[f32],
    segments: [Segment<'_>; 2],
    (o, log_sums): (SharedOut, SharedOut),
    carver: &mut Carver,
) {
    let sizes = place.sizes;
    let (key, value) = (sizes.key, sizes.value);
    let mut part = |rows: usize, columns: usize| carver.matrix(rows, columns).start;
    let (rows, q_t, o_t) = (part(QUERIES, key.max(value)), part(key, QUERIES), part(value, QUERIES));
    let (scores, maxima, sums, factors) =
        (part(KEYS, QUERIES), part(1, QUERIES), part(1, QUERIES), part(1, QUERIES));
    // SAFETY: every part has the size listed above; keys and values lie inside their segments.
    unsafe {
        place.gather(q, key, sizes.scale, rows, key);
        transpose::<L>((QUERIES, key), rows, key, q_t, QUERIES);
        std::slice::from_raw_parts_mut(o_t, value * QUERIES).fill(0.0);
        std::slice::from_raw_parts_mut(maxima, QUERIES).fill(HIDDEN);
        std::slice::from_raw_parts_mut(sums, QUERIES).fill(0.0);
        for segment in segments {
            for (first, count) in place.block.key_blocks(sizes, segment) {
                let position = segment.position + first;
                let lanes = place.block.lanes(sizes, position, count, L::COUNT);
                let (lane, columns) = (lanes.start, lanes.len());
                let (at, row) = segment.keys_from(first);
                let a = Factor { at, row, term: 1 };
                let b = Rows { at: q_t.add(lane), stride: QUERIES };
                let store = Store { to: scores.add(lane), stride: QUERIES };
                product::<L, WIDE>((count, columns, key), a, b, &store);
                let mask = Mask::<L>::new(place, position, count);
                for lane in lanes.step_by(L::COUNT) {
                    let running = [maxima, sums, factors].map(|p| p.add(lane));
                    exponentials(&mask, lane, count, scores.add(lane), running);
                }
                let (at, term) = segment.values_from(first);
                let a = Factor { at, row: 1, term };
                let b = Rows { at: scores.add(lane), stride: QUERIES };
                let rescale = Rescale { to: o_t.add(lane), factors: factors.add(lane) };
                product::<L, WIDE>((value, columns, count), a, b, &rescale);
            }
        }
        transpose::<L>((value, QUERIES), o_t, QUERIES, rows, value);
        let (sums, maxima) =
            (std::slice::from_raw_parts(sums, QUERIES), std::slice::from_raw_parts(maxima, QUERIES));
        let mut inverse = [0.0; QUERIES];
        inverse.iter_mut().zip(sums).for_each(|(inverse, sum)| *inverse = 1.0 / sum);
        place.scatter(rows, value, &inverse, o, value);
        for query in 0..place.block.count {
            *log_sums.at(place.index[query]) = maxima[query] + sums[query].ln();
        }
    }
}

/// Turns a block of scores into exponentials below the running maximum, and updates the running sums.
///
/// # Safety
/// `scores` has `count` rows [`QUERIES`] apart; the running values have a register each.
#[inline(always)]
unsafe fn exponentials<L: Lanes>(
    mask: &Mask<'_, L>,
    lane: usize,
    count: usize,
    scores: *mut f32,
    [maximum, sum, factor]: [*mut f32; 3],
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let old = L::load(maximum);
        let mut largest = old;
        for key in 0..count {
            let at = scores.add(key * QUERIES);
            let score = mask.apply(key, lane, L::load(at));
            if mask.active {
                score.store(at);
            }
            largest = largest.max(score);
        }
        let rescale = old.sub(largest).exp();
        let mut total = L::load(sum).mul(rescale);
        for key in 0..count {
            let at = scores.add(key * QUERIES);
            let weight = L::load(at).sub(largest).exp();
            weight.store(at);
            total = total.add(weight);
        }
        largest.store(maximum);
        rescale.store(factor);
        total.store(sum);
    }
}
