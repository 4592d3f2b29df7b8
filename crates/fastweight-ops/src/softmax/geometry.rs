//! Which keys a block of queries meets, and where they lie in memory.

use std::ops::Range;

use super::Sizes;

/// Queries of a block: its lanes. A block runs over `(time, query head of the group)`, heads fastest.
pub(super) const QUERIES: usize = 64;
/// Keys of a block.
pub(super) const KEYS: usize = 32;

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
    /// Keys from the first one's on, `key_stride` apart.
    pub keys: &'a [f32],
    /// Values from the first one's on, `value_stride` apart.
    pub values: &'a [f32],
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

    /// Query heads that share a key head.
    pub(super) fn shared(&self) -> usize {
        self.heads / self.groups
    }

    /// From a key to the next one of the same head.
    pub(super) fn key_stride(&self) -> usize {
        self.groups * self.key
    }

    /// From a value to the next one of the same head.
    pub(super) fn value_stride(&self) -> usize {
        self.groups * self.value
    }

    /// Cached, then new keys and values of one sequence and key head; `inputs` as the operator takes them.
    pub(super) fn segments<'a>(
        &self,
        inputs: &[&'a [f32]],
        sequence: &Sequence,
        group: usize,
    ) -> [Segment<'a>; 2] {
        let cut = |keys: &'a [f32], values: &'a [f32], token: usize, position: usize, count: usize| Segment {
            position,
            count,
            keys: keys.get((token * self.groups + group) * self.key..).unwrap_or(&[]),
            values: values.get((token * self.groups + group) * self.value..).unwrap_or(&[]),
        };
        let cached = match inputs {
            [_, _, _, keys, values] => cut(keys, values, sequence.index * self.cache.0, 0, sequence.cached),
            _ => Segment { position: 0, count: 0, keys: &[], values: &[] },
        };
        [cached, cut(inputs[1], inputs[2], sequence.start, sequence.cached, sequence.time)]
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
