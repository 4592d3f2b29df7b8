//! Decays between the tokens of a chunk where every channel has its own.
//!
//! The decay from token `j` to token `i` is the product of the factors of the tokens after `j` up to `i`. It
//! cannot be split at the chunk start, since that would divide by a decay that may be zero. It is split at the
//! middle of the smallest of the segments of 2, 4, 8, ... tokens that holds both: from `j` to the middle, and from
//! the middle to `i`. Both are products of factors, so nothing overflows and a factor of zero is exact. All pairs
//! cost `log2 C` products of tensors as large as the keys, not one tensor for every pair.

use burn::tensor::Tensor;

/// Tokens of a chunk, at most.
const CHUNK: usize = 32;

/// Tokens of a chunk of a sequence: a power of two.
pub(crate) fn chunk(time: usize) -> usize {
    CHUNK.min(time.next_power_of_two())
}

/// Decay factors inside chunks of `C` tokens, a power of two; `K` may be 1, one decay for all channels.
pub(crate) struct Decay {
    levels: Vec<Level>,
    /// From the chunk start to after token `i`, `[B,H,N,C,K]`.
    pub(crate) from_start: Tensor<5>,
    /// From after token `j` to the chunk end, `[B,H,N,C,K]`.
    pub(crate) to_end: Tensor<5>,
}

/// Pairs of neighbouring segments of `s` tokens, `P` pairs in all.
struct Level {
    /// From after token `j` of the first segment to its end, `[P,s,K]`.
    to_middle: Tensor<3>,
    /// From the start of the second segment to after its token `i`, `[P,s,K]`.
    from_middle: Tensor<3>,
}

/// The first and the second segments of each pair, `[P,s,D]` each.
fn halves(x: Tensor<3>, size: usize) -> [Tensor<3>; 2] {
    let [rows, tokens, width] = x.dims();
    let x = x.reshape([rows * tokens / (2 * size), 2, size, width]);
    [0, 1].map(|half| x.clone().narrow(1, half, 1).squeeze_dim(1))
}

impl Decay {
    /// `factors [B,H,N,C,K]`, what each token multiplies the state with.
    pub(crate) fn new(factors: Tensor<5>) -> Self {
        let shape = factors.dims();
        let [b, h, n, c, k] = shape;
        let mut from_start = factors.reshape([b * h * n * c, 1, k]);
        let mut to_end = from_start.ones_like();
        let mut levels = Vec::new();
        let mut size = 1;
        while size < c {
            let [first, second] = halves(from_start, size);
            let [to_middle, last] = halves(to_end, size);
            let over_first = first.clone().narrow(1, size - 1, 1);
            let over_second = second.clone().narrow(1, size - 1, 1);
            from_start = Tensor::cat(vec![first, second.clone() * over_first], 1);
            to_end = Tensor::cat(vec![to_middle.clone() * over_second, last], 1);
            levels.push(Level { to_middle, from_middle: second });
            size *= 2;
        }
        Self { levels, from_start: from_start.reshape(shape), to_end: to_end.reshape(shape) }
    }

    /// Over the whole chunk, `[B,H,N,1,K]`.
    pub(crate) fn whole(&self) -> Tensor<5> {
        let last = self.from_start.dims()[3] - 1;
        self.from_start.clone().narrow(3, last, 1)
    }

    /// From the chunk start to before token `i`, `[B,H,N,C,K]`.
    pub(crate) fn before(&self) -> Tensor<5> {
        one_later(self.from_start.clone(), 1.0)
    }

    /// `sum_c x_ic d_ijc y_jc` with the decay `d` from after token `j` to after token `i`, zero above the diagonal.
    ///
    /// `x, y [B,H,N,C,D]`, where `D` is `K`, or `K` is 1. Returns `[B,H,N,C,C]`.
    pub(crate) fn scores(&self, x: Tensor<5>, y: Tensor<5>) -> Tensor<5> {
        let [b, h, n, c, d] = x.dims();
        let mut blocks = (x.clone() * y.clone()).sum_dim(4).reshape([b * h * n * c, 1, 1]);
        let [x, y] = [x, y].map(|x| x.reshape([b * h * n, c, d]));
        let mut size = 1;
        for Level { to_middle, from_middle } in &self.levels {
            let [_, x] = halves(x.clone(), size);
            let [y, _] = halves(y.clone(), size);
            let across = (x * from_middle.clone()).matmul((y * to_middle.clone()).swap_dims(1, 2));
            let [first, second] = halves(blocks, size);
            let top = Tensor::cat(vec![first.clone(), first.zeros_like()], 2);
            blocks = Tensor::cat(vec![top, Tensor::cat(vec![across, second], 2)], 1);
            size *= 2;
        }
        blocks.reshape([b, h, n, c, c])
    }

    /// The same for `x` one token later: `sum_c x_ic d_(i-1)jc y_jc`, zero on and above the diagonal.
    pub(crate) fn scores_before(&self, x: Tensor<5>, y: Tensor<5>) -> Tensor<5> {
        one_later(self.scores(one_earlier(x), y), 0.0)
    }

    /// The decays themselves, `[B,H,N,C,C]`, where all channels have one.
    pub(crate) fn between(&self) -> Tensor<5> {
        self.scores(self.from_start.ones_like(), self.from_start.ones_like())
    }
}

/// Row `i` of a chunk becomes row `i + 1`; row 0 is filled. `[B,H,N,C,D]`.
pub(crate) fn one_later(x: Tensor<5>, fill: f64) -> Tensor<5> {
    let c = x.dims()[3];
    let first = x.clone().narrow(3, 0, 1).full_like(fill);
    if c == 1 { first } else { Tensor::cat(vec![first, x.narrow(3, 0, c - 1)], 3) }
}

/// Row `i + 1` of a chunk becomes row `i`; the last row is zero. `[B,H,N,C,D]`.
fn one_earlier(x: Tensor<5>) -> Tensor<5> {
    let c = x.dims()[3];
    let last = x.clone().narrow(3, 0, 1).zeros_like();
    if c == 1 { last } else { Tensor::cat(vec![x.narrow(3, 1, c - 1), last], 3) }
}
