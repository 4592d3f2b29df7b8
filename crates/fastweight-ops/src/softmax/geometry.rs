//! Which keys a block of queries meets, and where they lie in memory.

use std::ops::Range;

use rayon::prelude::*;

use super::Sizes;

/// Queries of a block: its lanes. A block runs over `(time, query head of the group)`, heads fastest.
pub(super) const QUERIES: usize = 64;
/// Keys of a block.
pub(super) const KEYS: usize = 32;
/// Multiply-adds under which the threads are not worth waking.
const SERIAL_WORK: usize = 1 << 16;
/// Queries of a head from which copying its keys and values together pays.
const MANY_QUERIES: usize = 4 * QUERIES;

/// One sequence: a row, or a document of the packed row, with its cache row.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Index of the cache row.
    pub index: usize,
    /// First token, counted through all rows.
    pub start: usize,
    /// Tokens.
    pub time: usize,
    /// Valid cache entries.
    pub cached: usize,
}

/// Consecutive positions whose keys and values lie at fixed strides.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment<'a> {
    /// Position of the first key.
    pub position: usize,
    /// Keys.
    pub count: usize,
    /// Rows of numbers from the first key's on, and from one to the next.
    pub keys: (&'a [f32], usize),
    /// The same of the values.
    pub values: (&'a [f32], usize),
}

impl Segment<'_> {
    /// The same positions where their rows were copied to.
    fn at<'a>(&self, (keys, values): &'a (Vec<f32>, Vec<f32>), sizes: &Sizes) -> Segment<'a> {
        let Self { position, count, .. } = *self;
        Segment { position, count, keys: (keys, sizes.key), values: (values, sizes.value) }
    }

    /// A key and the stride to the next one.
    pub(super) fn keys_from(&self, key: usize) -> (*const f32, usize) {
        (self.keys.0[key * self.keys.1..].as_ptr(), self.keys.1)
    }

    /// A value and the stride to the next one.
    pub(super) fn values_from(&self, key: usize) -> (*const f32, usize) {
        (self.values.0[key * self.values.1..].as_ptr(), self.values.1)
    }
}

impl Sizes {
    /// All sequences, in the order of the cache rows.
    pub(super) fn sequences(&self) -> Vec<Sequence> {
        let ranges: Vec<Range<usize>> = match &self.offsets {
            Some(offsets) => offsets.ranges().collect(),
            None => (0..self.batch).map(|row| row * self.time..(row + 1) * self.time).collect(),
        };
        let cached = &self.cache.1;
        let sequence = |(index, range): (usize, Range<usize>)| Sequence {
            index,
            start: range.start,
            time: range.len(),
            cached: cached[index],
        };
        ranges.into_iter().enumerate().map(sequence).collect()
    }

    /// Every sequence with every key head.
    pub(super) fn key_heads(&self) -> Vec<(Sequence, usize)> {
        let of = |sequence: Sequence| (0..self.groups).map(move |group| (sequence.clone(), group));
        self.sequences().into_iter().flat_map(of).collect()
    }

    /// Runs `body` on every sequence and key head, in parallel unless the work is tiny.
    pub(super) fn for_each_head(&self, body: impl Fn(&Sequence, usize) + Sync + Send) {
        let heads = self.key_heads();
        let pairs: usize =
            heads.iter().map(|(s, _)| s.time * self.shared() * self.window.min(s.cached + s.time)).sum();
        if pairs * (self.key + self.value) < SERIAL_WORK {
            heads.iter().for_each(|(sequence, group)| body(sequence, *group));
        } else {
            heads.par_iter().with_max_len(1).for_each(|(sequence, group)| body(sequence, *group));
        }
    }

    /// Query heads that share a key head.
    pub(super) fn shared(&self) -> usize {
        self.heads / self.groups
    }

    /// Cached, then new keys and values of one sequence and key head; `inputs` as the operator takes them.
    fn segments<'a>(&self, inputs: &[&'a [f32]], sequence: &Sequence, group: usize) -> [Segment<'a>; 2] {
        let rows = |all: &'a [f32], token: usize, size: usize| {
            (all.get((token * self.groups + group) * size..).unwrap_or(&[]), self.groups * size)
        };
        let cut = |keys, values, token, position, count| {
            let (keys, values) = (rows(keys, token, self.key), rows(values, token, self.value));
            Segment { position, count, keys, values }
        };
        let new = cut(inputs[1], inputs[2], sequence.start, sequence.cached, sequence.time);
        match inputs {
            [_, _, _, keys, values] => {
                [cut(keys, values, sequence.index * self.cache.0, 0, sequence.cached), new]
            }
            _ => [Segment { position: 0, count: 0, ..new }, new],
        }
    }

    /// Hands the segments of a key head to `body`.
    ///
    /// With many queries the keys and values of the head are first copied together: where heads lie side by
    /// side, rows of one head are often a power of two apart and share few lines of the cache.
    pub(super) fn with_segments<R>(
        &self,
        inputs: &[&[f32]],
        sequence: &Sequence,
        group: usize,
        body: impl FnOnce([Segment<'_>; 2]) -> R,
    ) -> R {
        let segments = self.segments(inputs, sequence, group);
        if self.groups == 1 || sequence.time * self.shared() < MANY_QUERIES {
            return body(segments);
        }
        let copy = |(all, stride): (&[f32], usize), count: usize, size: usize| {
            let mut rows = Vec::with_capacity(count * size);
            (0..count).for_each(|row| rows.extend_from_slice(&all[row * stride..][..size]));
            rows
        };
        let copies = segments.map(|s| (copy(s.keys, s.count, self.key), copy(s.values, s.count, self.value)));
        let [cached, new] = segments;
        let [cached_rows, new_rows] = &copies;
        body([cached.at(cached_rows, self), new.at(new_rows, self)])
    }
}

/// A block of queries of one sequence and key head.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueryBlock {
    /// First query, counted over `(time, query head of the group)`.
    pub first: usize,
    /// Queries, at most [`QUERIES`].
    pub count: usize,
    /// Position of the first query.
    pub first_position: usize,
    /// Position of the last query.
    pub last_position: usize,
}

impl QueryBlock {
    /// Blocks of a sequence.
    pub(super) fn count(sizes: &Sizes, sequence: &Sequence) -> usize {
        (sequence.time * sizes.shared()).div_ceil(QUERIES)
    }

    /// The block of that index.
    pub(super) fn new(sizes: &Sizes, sequence: &Sequence, index: usize) -> Self {
        let (shared, first) = (sizes.shared(), index * QUERIES);
        let count = QUERIES.min(sequence.time * shared - first);
        let position = |query: usize| sequence.cached + query / shared;
        Self { first, count, first_position: position(first), last_position: position(first + count - 1) }
    }

    /// Blocks of a segment's keys that some query sees, as `(first key in the segment, keys)`.
    pub(super) fn key_blocks(
        self,
        sizes: &Sizes,
        segment: Segment<'_>,
    ) -> impl Iterator<Item = (usize, usize)> + use<> {
        let oldest = (self.first_position + 1).saturating_sub(sizes.window);
        let first = oldest.saturating_sub(segment.position).min(segment.count);
        let end = (self.last_position + 1).saturating_sub(segment.position).min(segment.count);
        (first..end).step_by(KEYS).map(move |key| (key, KEYS.min(end - key)))
    }

    /// Lanes, in whole registers of `lanes`, whose queries see some of `count` keys from a position on.
    pub(super) fn lanes(&self, sizes: &Sizes, position: usize, count: usize, lanes: usize) -> Range<usize> {
        let shared = sizes.shared();
        let lane =
            |at: usize| (at.saturating_sub(self.first_position) * shared).saturating_sub(self.first % shared);
        let end = lane((position + count - 1).saturating_add(sizes.window).min(self.last_position + 1));
        lane(position) / lanes * lanes..end.min(self.count).next_multiple_of(lanes)
    }

    /// Whether some query of the block must not see some of `count` keys from a position on.
    pub(super) fn hides(&self, sizes: &Sizes, position: usize, count: usize) -> bool {
        position + count > self.first_position + 1
            || self.last_position - position.min(self.last_position) >= sizes.window
    }
}

/// Where the queries of a block lie.
pub(super) struct Place<'a> {
    pub sizes: &'a Sizes,
    pub block: QueryBlock,
    /// Index over `(token, head)` of the whole batch, of each query.
    pub index: [usize; QUERIES],
    /// Position of each lane's query, counted from the first one's; the last query's in lanes past it.
    pub positions: [f32; QUERIES],
}

impl<'a> Place<'a> {
    /// Finds them.
    pub(super) fn new(sizes: &'a Sizes, sequence: &Sequence, group: usize, block: QueryBlock) -> Self {
        let shared = sizes.shared();
        let (mut time, mut head) = (block.first / shared, block.first % shared);
        let (mut index, mut positions) = ([0; QUERIES], [0.0; QUERIES]);
        for lane in 0..QUERIES {
            if lane < block.count {
                index[lane] = (sequence.start + time) * sizes.heads + group * shared + head;
                positions[lane] = (sequence.cached + time - block.first_position) as f32;
                head += 1;
                if head == shared {
                    (time, head) = (time + 1, 0);
                }
            } else {
                positions[lane] = positions[lane - 1];
            }
        }
        Self { sizes, block, index, positions }
    }
}
