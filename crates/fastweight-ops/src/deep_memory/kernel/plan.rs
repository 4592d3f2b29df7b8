//! How a call is cut: a task for each head of each sequence, its tokens in pieces of a chunk, pieces in groups.
//!
//! Heads of sequences never meet, so threads share them out; a call with fewer of them than threads leaves
//! threads idle.

use std::ops::Range;

use rayon::prelude::*;

use crate::deep_memory::DeepMemory;
use crate::kernel::Dims;

/// Tokens of a piece at most: a chunk, or a part of a longer one.
const PIECE: usize = 64;

/// Pieces of a group: the forward pass keeps the weights of its first only, the backward pass makes the others again.
pub(super) const GROUP: usize = 4;

/// Multiply-adds under which the threads are not worth waking.
const SERIAL_WORK: usize = 1 << 16;

/// Numbers that columns are padded to, a register of every instruction set and a tile's rows.
const PAD: usize = 16;

/// Consecutive tokens of one chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// First token, counted from the start of the sequence.
    pub start: usize,
    /// How many, at most [`PIECE`].
    pub tokens: usize,
    /// The chunk starts here.
    pub fresh: bool,
    /// The chunk ends here.
    pub ends: bool,
}

impl Piece {
    /// Whether it is a whole chunk, whose gradients are taken at the weights that it changes.
    pub fn whole(&self) -> bool {
        self.fresh && self.ends
    }
}

/// Cuts a sequence that starts at `phase` of a chunk.
fn pieces(tokens: usize, phase: usize, chunk: usize) -> Vec<Piece> {
    let (mut pieces, mut start, mut phase) = (Vec::new(), 0, phase);
    while start < tokens {
        let count = PIECE.min(chunk - phase).min(tokens - start);
        let ends = phase + count == chunk;
        pieces.push(Piece { start, tokens: count, fresh: phase == 0, ends });
        start += count;
        phase = if ends { 0 } else { phase + count };
    }
    pieces
}

/// Groups of pieces: each begins with the sequence or with a chunk, and chunks are never divided.
fn groups(pieces: &[Piece]) -> Vec<Range<usize>> {
    let (mut groups, mut first) = (Vec::new(), 0);
    for at in 1..=pieces.len() {
        let boundary = pieces.get(at).is_none_or(|piece| piece.fresh);
        if boundary && (at - first >= GROUP || at == pieces.len() || !pieces[first].fresh) {
            groups.push(first..at);
            first = at;
        }
    }
    groups
}

/// Tokens of a whole group of chunks of this length.
pub(super) fn group_tokens(chunk: usize) -> usize {
    chunk * GROUP.div_ceil(chunk.div_ceil(PIECE))
}

/// One head of one sequence.
#[derive(Debug, Clone)]
pub(super) struct Task {
    /// Position of its state among `[sequences, heads]`.
    pub state: usize,
    /// Head.
    pub head: usize,
    /// Position of the first token among all tokens `[batch, time]`.
    pub first_token: usize,
    /// Which of [`Plan::cuts`] has its pieces.
    pub cut: usize,
    /// Position of the weights at its second group among the saved ones.
    pub first_saved: usize,
}

/// The pieces of a sequence, and the groups of them.
#[derive(Debug)]
pub(super) struct Cut {
    pub pieces: Vec<Piece>,
    pub groups: Vec<Range<usize>>,
}

/// All tasks of a call, in a fixed order.
#[derive(Debug)]
pub(super) struct Plan {
    pub tasks: Vec<Task>,
    pub cuts: Vec<Cut>,
    /// Weights that are saved over all tasks.
    pub saved: usize,
    /// Tokens of the longest piece.
    pub tokens: usize,
    /// Pieces of the longest group.
    pub longest: usize,
    parallel: bool,
}

impl Plan {
    /// Plans a call whose sequences start at these positions.
    pub fn new(dims: &Dims, memory: &DeepMemory, positions: &[usize]) -> Self {
        let (mut tasks, mut cuts, mut saved) = (Vec::new(), Vec::new(), 0);
        for (n, ((row, range), position)) in dims.sequences().into_iter().zip(positions).enumerate() {
            let pieces = pieces(range.len(), position % memory.chunk, memory.chunk);
            let groups = groups(&pieces);
            for head in 0..dims.heads {
                let first_token = row * dims.time + range.start;
                tasks.push(Task {
                    state: n * dims.heads + head,
                    head,
                    first_token,
                    cut: n,
                    first_saved: saved,
                });
                saved += groups.len().saturating_sub(1);
            }
            cuts.push(Cut { pieces, groups });
        }
        let work = dims.batch * dims.time * dims.heads * memory.weight_count(dims.key, dims.value);
        Self {
            tokens: cuts.iter().flat_map(|cut| &cut.pieces).map(|piece| piece.tokens).max().unwrap_or(1),
            longest: cuts.iter().flat_map(|cut| &cut.groups).map(Range::len).max().unwrap_or(1),
            tasks,
            cuts,
            saved,
            parallel: work >= SERIAL_WORK,
        }
    }

    /// Runs every task, in parallel unless the work is tiny; results in the order of the tasks.
    pub fn run<R: Send>(&self, body: impl Fn(&Task) -> R + Sync + Send) -> Vec<R> {
        if self.parallel && self.tasks.len() > 1 {
            self.tasks.par_iter().with_max_len(1).map(body).collect()
        } else {
            self.tasks.iter().map(body).collect()
        }
    }
}

/// Sizes of a layer's weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer {
    /// Rows, the bias among them.
    pub from: usize,
    /// Rows without the bias.
    pub inputs: usize,
    /// Columns.
    pub to: usize,
    /// Rows and columns in a workspace.
    pub rows: usize,
    pub columns: usize,
    /// Where it begins among the numbers of a head.
    pub offset: usize,
}

impl Layer {
    /// Numbers from a row to the next in a workspace: an odd number of cache lines, so that rows spread over the
    /// first-level cache.
    pub fn stride(&self) -> usize {
        ((self.columns / PAD) | 1) * PAD
    }
}

/// The layers of a network.
pub(super) fn layers(memory: &DeepMemory, key: usize, value: usize) -> Vec<Layer> {
    let mut offset = 0;
    let layer = |[from, to]: [usize; 2]| {
        let layer = Layer {
            from,
            inputs: from - usize::from(memory.bias),
            to,
            rows: pad(from),
            columns: pad(to),
            offset,
        };
        offset += from * to;
        layer
    };
    memory.weight_shapes(key, value).into_iter().map(layer).collect()
}

/// Room for `count` rows or columns.
pub(super) fn pad(count: usize) -> usize {
    count.next_multiple_of(PAD)
}
