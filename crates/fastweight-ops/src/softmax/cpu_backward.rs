//! Backward pass of the fused softmax attention.
//!
//! Exponentials are computed again from the saved log sums, block by block. A task goes through blocks of
//! queries in order and adds to the key and value gradients of its head; where there are few heads, the
//! blocks are dealt to a fixed number of tasks, whose sums are added in a fixed order.

use rayon::prelude::*;

use super::Sizes;
use super::cpu::{HIDDEN, Mask};
use super::cpu_token::dot;
use super::geometry::{KEYS, Place, QUERIES, QueryBlock, Segment, Sequence};
use super::tile::{Accumulate, Around, Factor, Rows, product, transpose};
use crate::kernel::InstructionSet;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::workspace::{Carver, SharedOut, with_workspace};

/// Tasks that the pass is split into at least, where there are enough blocks; the same for any number of
/// threads, so that sums are too.
const TASKS: usize = 16;

/// What the pass reads.
struct Pass<'a> {
    sizes: &'a Sizes,
    inputs: &'a [&'a [f32]],
    o: &'a [f32],
    log_sums: &'a [f32],
    grad: &'a [f32],
}

/// Key and value gradients of one sequence and key head, over all positions, rows of whole registers.
struct Partial {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// Widths of the rows of a [`Partial`].
fn padded(sizes: &Sizes) -> (usize, usize) {
    (sizes.key.next_multiple_of(16), sizes.value.next_multiple_of(16))
}

/// Gradients of all inputs, in their order.
pub(super) fn backward(
    sizes: &Sizes,
    inputs: &[&[f32]],
    o: &[f32],
    log_sums: &[f32],
    grad: &[f32],
) -> Vec<Vec<f32>> {
    let mut gradients: Vec<Vec<f32>> = inputs.iter().map(|input| vec![0.0; input.len()]).collect();
    let targets: Vec<SharedOut> = gradients.iter_mut().map(|gradient| SharedOut::new(gradient)).collect();
    let pass = Pass { sizes, inputs, o, log_sums, grad };
    let set = InstructionSet::active();
    let split = TASKS.div_ceil(sizes.key_heads().len().max(1));
    sizes.for_each_head(|sequence, group| {
        let blocks = QueryBlock::count(sizes, sequence);
        let step = split.min(blocks);
        let partials: Vec<Partial> = sizes.with_segments(inputs, sequence, group, |segments| {
            let run = |first| {
                let blocks = (first..blocks).step_by(step);
                with_workspace(workspace(sizes), |carver| {
                    let (pass, dq) = (&pass, targets[0]);
                    dispatch(set, BackwardTask { pass, sequence, group, segments, blocks, dq, carver })
                })
            };
            (0..step).into_par_iter().with_max_len(1).map(run).collect()
        });
        write_sums(sizes, sequence, group, &partials, &targets);
    });
    gradients
}

/// Adds the partial sums in order and writes them where the keys and values lie.
fn write_sums(sizes: &Sizes, sequence: &Sequence, group: usize, partials: &[Partial], targets: &[SharedOut]) {
    let write = |position: usize, token: usize, (keys, values): (SharedOut, SharedOut)| {
        let row = token * sizes.groups + group;
        let (key_width, value_width) = padded(sizes);
        // SAFETY: a row belongs to this sequence and key head alone.
        let (keys, values) = unsafe {
            let keys = std::slice::from_raw_parts_mut(keys.at(row * sizes.key), sizes.key);
            (keys, std::slice::from_raw_parts_mut(values.at(row * sizes.value), sizes.value))
        };
        for partial in partials {
            let sum =
                |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            sum(keys, &partial.keys[position * key_width..]);
            sum(values, &partial.values[position * value_width..]);
        }
    };
    if let [_, _, _, keys, values] = targets {
        for at in 0..sequence.cached {
            write(at, sequence.index * sizes.cache.0 + at, (*keys, *values));
        }
    }
    for at in 0..sequence.time {
        write(sequence.cached + at, sequence.start + at, (targets[1], targets[2]));
    }
}

/// Numbers of scratch memory that a task needs.
fn workspace(sizes: &Sizes) -> usize {
    let (key_width, value_width) = padded(sizes);
    QUERIES * (key_width + value_width + 2 * sizes.key + sizes.value + 2 * KEYS + 2)
        + KEYS * sizes.key
        + 10 * 16
}

struct BackwardTask<'a, I> {
    pass: &'a Pass<'a>,
    sequence: &'a Sequence,
    group: usize,
    segments: [Segment<'a>; 2],
    blocks: I,
    dq: SharedOut,
    carver: Carver,
}

impl<I: Iterator<Item = usize>> Kernel for BackwardTask<'_, I> {
    type Output = Partial;

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) -> Partial {
        let Self { pass, sequence, group, segments, blocks, dq, mut carver } = self;
        let sizes = pass.sizes;
        let positions = sequence.cached + sequence.time;
        let (key_width, value_width) = padded(sizes);
        let mut partial =
            Partial { keys: vec![0.0; positions * key_width], values: vec![0.0; positions * value_width] };
        let scratch = Scratch::new(sizes, &mut carver);
        for index in blocks {
            let place = Place::new(sizes, sequence, group, QueryBlock::new(sizes, sequence, index));
            // SAFETY: the caller vouches for the instruction set; a block's queries belong to this task.
            unsafe { block_backward::<L, WIDE>(pass, &place, segments, &mut partial, dq, &scratch) };
        }
        partial
    }
}

/// Scores become exponentials over their query's sum.
struct Exponentials<'a, L> {
    mask: &'a Mask<'a, L>,
    /// First lane of the product.
    lane: usize,
    to: *mut f32,
    log_sums: *const f32,
}

impl<L: Lanes> Around<L> for Exponentials<'_, L> {
    #[inline(always)]
    unsafe fn start(&self, _row: usize, column: usize) -> L {
        // SAFETY: there is a log sum for every lane.
        unsafe { L::load(self.log_sums.add(column)) }
    }
    #[inline(always)]
    unsafe fn finish(&self, row: usize, column: usize, sum: L) {
        // SAFETY: the target has the rows and columns of the product.
        unsafe {
            self.mask.apply(row, self.lane + column, sum).exp().store(self.to.add(row * QUERIES + column))
        }
    }
}

/// Gradients of the weights become those of the scores.
struct ScoreGradients {
    weights: *const f32,
    to: *mut f32,
    /// For each lane, minus the product of the output and its gradient.
    corrections: *const f32,
}

impl<L: Lanes> Around<L> for ScoreGradients {
    #[inline(always)]
    unsafe fn start(&self, _row: usize, column: usize) -> L {
        // SAFETY: there is a correction for every lane.
        unsafe { L::load(self.corrections.add(column)) }
    }
    #[inline(always)]
    unsafe fn finish(&self, row: usize, column: usize, sum: L) {
        let at = row * QUERIES + column;
        // SAFETY: weights and target have the rows and columns of the product.
        unsafe { sum.mul(L::load(self.weights.add(at))).store(self.to.add(at)) }
    }
}

/// Scratch memory of a block, [`QUERIES`] lanes or rows each.
struct Scratch {
    q: *mut f32,
    d_o: *mut f32,
    q_t: *mut f32,
    do_t: *mut f32,
    dq_t: *mut f32,
    weights: *mut f32,
    scores: *mut f32,
    log_sums: *mut f32,
    corrections: *mut f32,
}

impl Scratch {
    fn new(sizes: &Sizes, carver: &mut Carver) -> Self {
        let (key_width, value_width) = padded(sizes);
        let mut part = |rows: usize| carver.matrix(rows, QUERIES).start;
        Self {
            q: part(key_width),
            d_o: part(value_width),
            q_t: part(sizes.key),
            do_t: part(sizes.value),
            dq_t: part(sizes.key),
            weights: part(KEYS),
            scores: part(KEYS),
            log_sums: part(1),
            corrections: part(1),
        }
    }
}

/// # Safety
/// The instruction set of `L` is there; nobody else writes the block's query gradients.
#[inline(always)]
unsafe fn block_backward<L: Lanes, const WIDE: usize>(
    pass: &Pass<'_>,
    place: &Place<'_>,
    segments: [Segment<'_>; 2],
    partial: &mut Partial,
    dq: SharedOut,
    scratch: &Scratch,
) {
    let sizes = place.sizes;
    let (key, value) = (sizes.key, sizes.value);
    let (key_width, value_width) = padded(sizes);
    let Scratch { q, d_o, q_t, do_t, dq_t, weights, scores, log_sums, corrections } = *scratch;
    // SAFETY: every part has the size it was carved with; keys and values lie inside their segments, and
    // the partial sums have a row for every position.
    unsafe {
        place.gather(pass.inputs[0], key, sizes.scale, q, key_width);
        place.gather(pass.grad, value, 1.0, d_o, value_width);
        transpose::<L>((QUERIES, key), q, key_width, q_t, QUERIES);
        transpose::<L>((QUERIES, value), d_o, value_width, do_t, QUERIES);
        std::slice::from_raw_parts_mut(dq_t, key * QUERIES).fill(0.0);
        for query in 0..QUERIES {
            // Without a query, exponentials below any score: zero.
            let (mut log_sum, mut correction) = (HIDDEN, 0.0);
            if query < place.block.count {
                let index = place.index[query];
                let rows = index * value..(index + 1) * value;
                let product = dot::<L>(pass.o[rows.clone()].as_ptr(), pass.grad[rows].as_ptr(), value);
                (log_sum, correction) = (-pass.log_sums[index], -product);
            }
            *log_sums.add(query) = log_sum;
            *corrections.add(query) = correction;
        }
        for segment in segments {
            for (first, count) in place.block.key_blocks(sizes, segment) {
                let position = segment.position + first;
                let lanes = place.block.lanes(sizes, position, count, L::COUNT);
                let (lane, columns) = (lanes.start, lanes.len());
                let [weights, scores] = [weights, scores].map(|part| part.add(lane));
                let strided = |part: *mut f32| Rows { at: part.add(lane), stride: QUERIES };

                let (keys, key_stride) = segment.keys_from(first);
                let a = Factor { at: keys, row: key_stride, term: 1 };
                let mask = Mask::<L>::new(place, position, count);
                let around = Exponentials { mask: &mask, lane, to: weights, log_sums: log_sums.add(lane) };
                product::<L, WIDE>((count, columns, key), a, strided(q_t), &around);

                let (at, row) = segment.values_from(first);
                let a = Factor { at, row, term: 1 };
                let around = ScoreGradients { weights, to: scores, corrections: corrections.add(lane) };
                product::<L, WIDE>((count, columns, value), a, strided(do_t), &around);

                let a = Factor { at: weights, row: QUERIES, term: 1 };
                let b = Rows { at: d_o.add(lane * value_width), stride: value_width };
                let to = partial.values.as_mut_ptr().add(position * value_width);
                let around = Accumulate { to, stride: value_width };
                product::<L, WIDE>((count, value.next_multiple_of(L::COUNT), columns), a, b, &around);

                let a = Factor { at: scores, row: QUERIES, term: 1 };
                let b = Rows { at: q.add(lane * key_width), stride: key_width };
                let to = partial.keys.as_mut_ptr().add(position * key_width);
                let around = Accumulate { to, stride: key_width };
                product::<L, WIDE>((count, key.next_multiple_of(L::COUNT), columns), a, b, &around);

                let a = Factor { at: keys, row: 1, term: key_stride };
                let b = Rows { at: scores, stride: QUERIES };
                let around = Accumulate { to: dq_t.add(lane), stride: QUERIES };
                product::<L, WIDE>((key, columns, count), a, b, &around);
            }
        }
        transpose::<L>((key, QUERIES), dq_t, QUERIES, q, key_width);
        place.scatter(q, key_width, &[sizes.scale; QUERIES], dq, key);
    }
}
