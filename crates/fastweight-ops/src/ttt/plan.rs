//! How a call is cut: one task for each head of each sequence, its tokens in pieces of a mini-batch.

use rayon::prelude::*;

use crate::kernel::Dims;
use crate::kernel::simd::InstructionSet;

/// Tokens of a piece at most: a mini-batch of the default size, or a part of a larger one.
pub(super) const PIECE: usize = 16;

/// Multiply-adds under which the threads are not worth waking.
const SERIAL_WORK: usize = 1 << 16;

/// Consecutive tokens of one mini-batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// First token, counted from the start of the sequence.
    pub start: usize,
    /// How many, at most [`PIECE`].
    pub tokens: usize,
    /// The mini-batch starts here: nothing is gathered yet.
    pub fresh: bool,
    /// The mini-batch ends here: what was gathered goes into the weights.
    pub ends: bool,
    /// The piece of this sequence at whose start the mini-batch's weights were saved; none for those that
    /// the call started from.
    pub weights: Option<usize>,
}

/// Cuts a sequence that starts at `position` of a mini-batch.
fn pieces(tokens: usize, position: usize, mini_batch: usize) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::with_capacity(tokens / mini_batch.min(PIECE) + 2);
    let (mut start, mut position) = (0, position);
    while start < tokens {
        let count = PIECE.min(mini_batch - position).min(tokens - start);
        let fresh = position == 0;
        let weights = if fresh { Some(pieces.len()) } else { pieces.last().and_then(|last| last.weights) };
        position += count;
        let ends = position == mini_batch;
        pieces.push(Piece { start, tokens: count, fresh, ends, weights });
        start += count;
        position = if ends { 0 } else { position };
    }
    pieces
}

/// One head of one sequence.
#[derive(Debug)]
pub(super) struct Task<'a> {
    /// Position of its state among `[sequences, heads]`.
    pub state: usize,
    /// Head.
    pub head: usize,
    /// Position of the first token among all tokens `[batch, time]`.
    pub first_token: usize,
    /// Its tokens.
    pub pieces: &'a [Piece],
    /// Position of its first piece among the saved ones.
    pub first_piece: usize,
    /// Whether it starts at the start of a mini-batch.
    pub fresh: bool,
}

/// All tasks of a call, in a fixed order.
#[derive(Debug)]
pub(super) struct Plan {
    /// Instruction set of the kernels.
    pub set: InstructionSet,
    /// Pieces of all heads of all sequences.
    pub saved: usize,
    sequences: Vec<(usize, bool, Vec<Piece>)>,
    heads: usize,
    parallel: bool,
}

impl Plan {
    /// Plans a call whose sequences start at these positions.
    pub fn new(dims: &Dims, position: &[usize], mini_batch: usize) -> Self {
        let cut = |((row, tokens), &position): ((usize, std::ops::Range<usize>), &usize)| {
            let first = row * dims.time + tokens.start;
            (first, position == 0, pieces(tokens.len(), position, mini_batch))
        };
        let sequences: Vec<_> = dims.sequences().into_iter().zip(position).map(cut).collect();
        Self {
            set: InstructionSet::active(),
            saved: dims.heads * sequences.iter().map(|(_, _, pieces)| pieces.len()).sum::<usize>(),
            sequences,
            heads: dims.heads,
            parallel: dims.batch * dims.time * dims.heads * dims.key * dims.value >= SERIAL_WORK,
        }
    }

    /// Runs every task, in parallel unless the work is tiny.
    pub fn run(&self, body: impl Fn(&Task<'_>) + Sync + Send) {
        let (mut tasks, mut first_piece) = (Vec::new(), 0);
        for (n, (first_token, fresh, pieces)) in self.sequences.iter().enumerate() {
            for head in 0..self.heads {
                let (first_token, fresh) = (*first_token, *fresh);
                let state = n * self.heads + head;
                tasks.push(Task { state, head, first_token, pieces, first_piece, fresh });
                first_piece += pieces.len();
            }
        }
        if self.parallel && tasks.len() > 1 {
            tasks.par_iter().with_max_len(1).for_each(body);
        } else {
            tasks.iter().for_each(body);
        }
    }
}
