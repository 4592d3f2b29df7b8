//! How the work of a matrix-memory kernel is cut into parallel tasks.

use std::ops::Range;

use rayon::prelude::*;

use super::dims::Dims;
use super::gates::CHUNK;
use super::simd::InstructionSet;

/// Multiply-adds under which the threads are not worth waking.
const SERIAL_WORK: usize = 1 << 16;

/// Some value columns of one head of one sequence.
#[derive(Debug, Clone)]
pub struct Task {
    /// Position of the head's state among the states `[sequences, heads]`.
    pub state: usize,
    /// Head.
    pub head: usize,
    /// Position of the first token among all tokens `[batch, time]`.
    pub first_token: usize,
    /// Tokens of the sequence.
    pub tokens: usize,
    /// Position of the head's first chunk-start state among the saved ones.
    pub first_chunk: usize,
    /// Which part of the value columns.
    pub split: usize,
    /// The value columns.
    pub columns: Range<usize>,
}

/// All tasks of an operator call, in a fixed order.
#[derive(Debug)]
pub struct Plan {
    /// Instruction set of the kernels.
    pub set: InstructionSet,
    /// The tasks.
    pub tasks: Vec<Task>,
    /// Parts that the value columns are cut into.
    pub splits: usize,
    /// Chunk-start states over all sequences and heads.
    pub chunks: usize,
    parallel: bool,
}

impl Plan {
    /// One task for each head of each sequence; when that leaves threads idle, the value columns are cut
    /// too, since columns of the state never meet in the forward pass.
    ///
    /// Depends on the sizes, the instruction set and the number of threads only, so repeated calls give
    /// the same bits.
    pub fn new(dims: &Dims, set: InstructionSet) -> Self {
        let sequences = dims.sequences();
        let longest = sequences.iter().map(|(_, range)| range.len()).max().unwrap_or(0);
        let total: usize = sequences.iter().map(|(_, range)| range.len() * dims.heads).sum();
        let wanted = (longest * rayon::current_num_threads()).div_ceil(total.max(1));
        let registers = dims.value.div_ceil(set.lanes());
        let width = registers.div_ceil(wanted.clamp(1, registers.max(1))) * set.lanes();
        let splits = dims.value.div_ceil(width.max(1)).max(1);
        let mut tasks = Vec::with_capacity(sequences.len() * dims.heads * splits);
        let mut chunks = 0;
        for (sequence, (row, range)) in sequences.into_iter().enumerate() {
            for head in 0..dims.heads {
                for split in 0..splits {
                    tasks.push(Task {
                        state: sequence * dims.heads + head,
                        head,
                        first_token: row * dims.time + range.start,
                        tokens: range.len(),
                        first_chunk: chunks,
                        split,
                        columns: split * width..((split + 1) * width).min(dims.value),
                    });
                }
                chunks += range.len().div_ceil(CHUNK);
            }
        }
        let work = total * dims.key * dims.value;
        Self { set, tasks, splits, chunks, parallel: work >= SERIAL_WORK }
    }

    /// Runs every task, in parallel unless the work is tiny.
    pub fn run(&self, body: impl Fn(&Task) + Sync + Send) {
        if self.parallel && self.tasks.len() > 1 {
            self.tasks.par_iter().with_max_len(1).for_each(body);
        } else {
            self.tasks.iter().for_each(body);
        }
    }

    /// Adds up the parts that the splits left behind one another in `parts`, in their order.
    pub fn reduce(&self, mut parts: Vec<f32>) -> Vec<f32> {
        if self.splits > 1 {
            let len = parts.len() / self.splits;
            let (sum, rest) = parts.split_at_mut(len);
            for part in rest.chunks_exact(len.max(1)) {
                sum.par_chunks_mut(1 << 14).zip(part.par_chunks(1 << 14)).for_each(|(sum, part)| {
                    for (a, b) in sum.iter_mut().zip(part) {
                        *a += b;
                    }
                });
            }
            parts.truncate(len);
        }
        parts
    }
}
