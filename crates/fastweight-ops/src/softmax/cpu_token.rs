//! Softmax attention of single queries, the form of decoding: keys and values are read once per query.

use super::Sizes;
use super::geometry::{Segment, Sequence};
use crate::kernel::simd::Lanes;
use crate::kernel::workspace::{Carver, SharedOut};

/// All queries of a sequence and key head, one by one.
///
/// # Safety
/// The instruction set of `L` is there; nobody else writes the queries' outputs.
#[inline(always)]
pub(super) unsafe fn forward<L: Lanes>(
    sizes: &Sizes,
    sequence: &Sequence,
    group: usize,
    q: &[f32],
    segments: [Segment<'_>; 2],
    (o, log_sums): (SharedOut, SharedOut),
    carver: &mut Carver,
) {
    let (key, value, shared) = (sizes.key, sizes.value, sizes.shared());
    let query = carver.matrix(1, key).start;
    let scores = carver.matrix(1, sequence.cached + sequence.time + L::COUNT).start;
    for at in 0..sequence.time * shared {
        let (time, head) = (at / shared, group * shared + at % shared);
        let index = (sequence.start + time) * sizes.heads + head;
        let end = sequence.cached + time + 1;
        let seen = segments.map(|segment| {
            let inside = |position: usize| position.saturating_sub(segment.position).min(segment.count);
            inside(end.saturating_sub(sizes.window))..inside(end)
        });
        // SAFETY: keys and values lie inside their segments, scores have room for every position.
        unsafe {
            let scaled = std::slice::from_raw_parts_mut(query, key);
            scaled.iter_mut().zip(&q[index * key..]).for_each(|(scaled, q)| *scaled = q * sizes.scale);
            let mut count = 0;
            for (segment, seen) in segments.iter().zip(seen.clone()) {
                for at in seen {
                    *scores.add(count) = dot::<L>(query, segment.keys_from(at).0, key);
                    count += 1;
                }
            }
            let log_sum = exponentials::<L>(scores, count);
            let output = o.at(index * value);
            weighted_sum::<L>(sizes, scores, segments.iter().zip(seen), output, log_sum.1);
            *log_sums.at(index) = log_sum.0;
        }
    }
}

/// Inner product.
///
/// # Safety
/// The instruction set of `L` is there, and so are `count` numbers each.
#[inline(always)]
pub(super) unsafe fn dot<L: Lanes>(a: *const f32, b: *const f32, count: usize) -> f32 {
    // SAFETY: the caller vouches for `count` numbers.
    unsafe {
        let (mut even, mut odd) = (L::splat(0.0), L::splat(0.0));
        let mut at = 0;
        while at + 2 * L::COUNT <= count {
            even = L::load(a.add(at)).mul_add(L::load(b.add(at)), even);
            let next = at + L::COUNT;
            odd = L::load(a.add(next)).mul_add(L::load(b.add(next)), odd);
            at += 2 * L::COUNT;
        }
        if at + L::COUNT <= count {
            even = L::load(a.add(at)).mul_add(L::load(b.add(at)), even);
            at += L::COUNT;
        }
        if at < count {
            let rest = count - at;
            odd = L::load_partial(a.add(at), rest).mul_add(L::load_partial(b.add(at), rest), odd);
        }
        even.add(odd).sum()
    }
}

/// Scores become exponentials below their maximum; returns the log of their sum, and the sum below it.
#[inline(always)]
unsafe fn exponentials<L: Lanes>(scores: *mut f32, count: usize) -> (f32, f32) {
    // SAFETY: the caller vouches for `count` scores and a register of room behind them.
    unsafe {
        for at in count..count.next_multiple_of(L::COUNT) {
            *scores.add(at) = super::cpu::HIDDEN;
        }
        let mut largest = L::splat(super::cpu::HIDDEN);
        for at in (0..count).step_by(L::COUNT) {
            largest = largest.max(L::load(scores.add(at)));
        }
        let maximum = L::splat(largest.largest());
        let mut total = L::splat(0.0);
        for at in (0..count).step_by(L::COUNT) {
            let weight = L::load(scores.add(at)).sub(maximum).exp();
            weight.store(scores.add(at));
            total = total.add(weight);
        }
        let total = total.sum();
        (largest.largest() + total.ln(), total)
    }
}

/// The values weighted by the exponentials over their sum.
#[inline(always)]
unsafe fn weighted_sum<'a, L: Lanes>(
    sizes: &Sizes,
    weights: *const f32,
    seen: impl Iterator<Item = (&'a Segment<'a>, std::ops::Range<usize>)> + Clone,
    output: *mut f32,
    total: f32,
) {
    let value = sizes.value;
    let mut column = 0;
    // SAFETY: columns stay below the value size; the caller vouches for the weights and the output.
    unsafe {
        let scale = L::splat(1.0 / total);
        while column < value {
            let full = (value - column) / L::COUNT;
            let width = if full >= 4 { 4 } else { full.min(1) };
            let mut sums = [L::splat(0.0); 4];
            let mut weight = weights;
            for (segment, seen) in seen.clone() {
                if seen.is_empty() {
                    continue;
                }
                let (first, stride) = segment.values_from(seen.start);
                let mut row = first.add(column);
                for _ in seen {
                    let factor = L::splat(*weight);
                    match width {
                        4 => {
                            for (n, sum) in sums.iter_mut().enumerate() {
                                *sum = L::load(row.add(n * L::COUNT)).mul_add(factor, *sum);
                            }
                        }
                        1 => sums[0] = L::load(row).mul_add(factor, sums[0]),
                        _ => sums[0] = L::load_partial(row, value - column).mul_add(factor, sums[0]),
                    }
                    weight = weight.add(1);
                    row = row.wrapping_add(stride);
                }
            }
            if width == 0 {
                sums[0].mul(scale).store_partial(output.add(column), value - column);
                column = value;
            }
            for sum in sums.iter().take(width) {
                sum.mul(scale).store(output.add(column));
                column += L::COUNT;
            }
        }
    }
}
