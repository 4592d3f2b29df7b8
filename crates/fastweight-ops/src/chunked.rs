//! The chunked form of the linear and the delta recurrence on tensor operations.
//!
//! Within a chunk everything is matrix products over all chunks at once; only the state goes from
//! chunk to chunk one after the other. The delta rule uses the WY representation (Yang et al. 2024,
//! arXiv 2406.06484, gated in 2412.06464): the corrected values `U` of a chunk solve a unit lower
//! triangular system whose right-hand side is linear in the state at the chunk start.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::Offsets;

/// Tokens of a chunk of the additive rule.
const CHUNK: usize = 64;
/// Tokens of a chunk of the delta rule: where keys are alike and beta is near 2, the rounding errors of
/// its solve grow with the chunk.
const DELTA_CHUNK: usize = 32;

/// What each token brings: `q, k [B,T,H,K]`, `v [B,T,H,V]`, `beta, gate [B,T,H]`.
#[derive(Clone)]
pub(crate) struct Tokens {
    pub(crate) q: Tensor<4>,
    pub(crate) k: Tensor<4>,
    pub(crate) v: Tensor<4>,
    /// Write strength of the delta rule; the additive rule when absent.
    pub(crate) beta: Option<Tensor<3>>,
    /// Log decay; no decay when absent.
    pub(crate) gate: Option<Tensor<3>>,
}

impl Tokens {
    fn narrow(&self, start: usize, length: usize) -> Self {
        let cut = |x: &Tensor<4>| x.clone().narrow(1, start, length);
        let cut_scalar = |x: &Tensor<3>| x.clone().narrow(1, start, length);
        Self {
            q: cut(&self.q),
            k: cut(&self.k),
            v: cut(&self.v),
            beta: self.beta.as_ref().map(cut_scalar),
            gate: self.gate.as_ref().map(cut_scalar),
        }
    }
}

/// Runs the recurrence over every document, each from its own initial state `[N,H,K,V]`.
///
/// Returns the output `[B,T,H,V]` and the final states `[N,H,K,V]`.
pub(crate) fn run(
    tokens: Tokens,
    initial: Tensor<4>,
    offsets: Option<&Offsets>,
    scale: f64,
) -> (Tensor<4>, Tensor<4>) {
    match offsets {
        None => document(tokens, initial, scale),
        Some(offsets) => each_document(offsets, initial, |range, state| {
            document(tokens.narrow(range.start, range.len()), state, scale)
        }),
    }
}

/// Runs `document` on the tokens `[1,T,H,*]` and the initial state of each document that has tokens, and puts the
/// outputs `[1,T,H,V]` and final states `[N,H,K,V]` together; without offsets, on everything at once.
pub(crate) fn documents<const I: usize>(
    tokens: [Tensor<4>; I],
    initial: Tensor<4>,
    offsets: Option<&Offsets>,
    document: impl Fn([Tensor<4>; I], Tensor<4>) -> (Tensor<4>, Tensor<4>),
) -> (Tensor<4>, Tensor<4>) {
    match offsets {
        None => document(tokens, initial),
        Some(offsets) => each_document(offsets, initial, |range, state| {
            document(tokens.clone().map(|x| x.narrow(1, range.start, range.len())), state)
        }),
    }
}

fn each_document(
    offsets: &Offsets,
    initial: Tensor<4>,
    document: impl Fn(Range<usize>, Tensor<4>) -> (Tensor<4>, Tensor<4>),
) -> (Tensor<4>, Tensor<4>) {
    let (mut outputs, mut states) = (Vec::new(), Vec::new());
    for (index, range) in offsets.ranges().enumerate() {
        let state = initial.clone().narrow(0, index, 1);
        if range.is_empty() {
            states.push(state);
            continue;
        }
        let (output, state) = document(range, state);
        outputs.push(output);
        states.push(state);
    }
    (Tensor::cat(outputs, 1), Tensor::cat(states, 0))
}

/// Decay factors inside the chunks; every exponent is a sum of log gates, so none is above one.
struct Decay {
    /// From after token `j` to token `i`, `[B,H,N,C,C]`, zero above the diagonal.
    between: Tensor<5>,
    /// From the chunk start to token `i`, `[B,H,N,C,1]`.
    from_start: Tensor<5>,
    /// From after token `j` to the chunk end, `[B,H,N,C,1]`.
    to_end: Tensor<5>,
    /// Over the whole chunk, `[B,H,N,1,1]`.
    whole: Tensor<5>,
}

impl Decay {
    /// `gate [B,H,N,C,1]`. The sums between two tokens are formed directly, not as differences of sums
    /// from the chunk start: nothing cancels after a strong decay, and a gate of `-inf` needs no care.
    fn new(gate: Tensor<5>) -> Self {
        let [b, h, n, c, _] = gate.dims();
        let between = gate.clone().expand([b, h, n, c, c]).tril(-1).cumsum(3).exp().tril(0);
        let from_start = gate.cumsum(3).exp();
        Self {
            to_end: between.clone().narrow(3, c - 1, 1).swap_dims(3, 4),
            whole: from_start.clone().narrow(3, c - 1, 1),
            between,
            from_start,
        }
    }
}

fn document(tokens: Tokens, initial: Tensor<4>, scale: f64) -> (Tensor<4>, Tensor<4>) {
    let time = tokens.q.dims()[1];
    let chunk = time.min(if tokens.beta.is_some() { DELTA_CHUNK } else { CHUNK });
    let q = chunks(tokens.q.mul_scalar(scale), chunk);
    let k = chunks(tokens.k, chunk);
    let v = chunks(tokens.v, chunk);
    let per_token = |x: Tensor<3>| chunks(x.unsqueeze_dim(3), chunk);
    let decay = tokens.gate.map(|gate| Decay::new(per_token(gate)));

    let weigh = |scores: Tensor<5>| match &decay {
        Some(decay) => scores * decay.between.clone(),
        None => scores.tril(0),
    };
    let keys = k.clone().swap_dims(3, 4);
    let scores = weigh(q.clone().matmul(keys.clone()));
    let (reads, ends) = match &decay {
        Some(decay) => (q * decay.from_start.clone(), k.clone() * decay.to_end.clone()),
        None => (q, k.clone()),
    };
    let (values, corrections) = match tokens.beta.map(per_token) {
        None => (v, None),
        Some(beta) => {
            let k = k * beta.clone();
            let solve = unit_lower_inverse(weigh(k.clone().matmul(keys)).tril(-1));
            let k = match &decay {
                Some(decay) => k * decay.from_start.clone(),
                None => k,
            };
            (solve.clone().matmul(v * beta), Some(solve.matmul(k)))
        }
    };

    let whole = decay.map(|decay| decay.whole);
    let chunks = Chunks { reads, scores, ends, values, corrections };
    chunks.scan(initial, time, |state, n| match &whole {
        Some(whole) => state * pick(whole, n),
        None => state,
    })
}

/// Chunk `n`, `[B,H,C,D]` of `[B,H,N,C,D]`.
pub(crate) fn pick(x: &Tensor<5>, n: usize) -> Tensor<4> {
    x.clone().narrow(2, n, 1).squeeze_dim(2)
}

/// What each of `N` chunks of `C` tokens reads from the state at its start and writes in `R` rows.
pub(crate) struct Chunks {
    /// Queries of that state, `[B,H,N,C,K]`.
    pub(crate) reads: Tensor<5>,
    /// How much of each written row a token sees, `[B,H,N,C,R]`.
    pub(crate) scores: Tensor<5>,
    /// The key each row has at the chunk end, `[B,H,N,R,K]`.
    pub(crate) ends: Tensor<5>,
    /// The rows, if the state at the chunk start is zero, `[B,H,N,R,V]`.
    pub(crate) values: Tensor<5>,
    /// What that state takes from each row for the key it holds, `[B,H,N,R,K]`; nothing when absent.
    pub(crate) corrections: Option<Tensor<5>>,
}

impl Chunks {
    /// Takes the state `[B,H,K,V]` from chunk to chunk; `carry` is what becomes of it over chunk `n` by itself.
    ///
    /// Returns the outputs `[B,time,H,V]` and the final state.
    pub(crate) fn scan(
        self,
        initial: Tensor<4>,
        time: usize,
        carry: impl Fn(Tensor<4>, usize) -> Tensor<4>,
    ) -> (Tensor<4>, Tensor<4>) {
        let mut state = initial;
        let mut outputs = Vec::new();
        for n in 0..self.reads.dims()[2] {
            let mut values = pick(&self.values, n);
            if let Some(corrections) = &self.corrections {
                values = values - pick(corrections, n).matmul(state.clone());
            }
            let seen = pick(&self.scores, n).matmul(values.clone());
            outputs.push(pick(&self.reads, n).matmul(state.clone()) + seen);
            state = carry(state, n) + pick(&self.ends, n).swap_dims(2, 3).matmul(values);
        }
        (Tensor::cat(outputs, 2).narrow(2, 0, time).swap_dims(1, 2), state)
    }
}

/// `[B,T,H,D]` to `[B,H,N,C,D]`, the last chunk filled with zeros: a token of zeros with a log gate of zero
/// writes nothing and decays nothing.
pub(crate) fn chunks(x: Tensor<4>, chunk: usize) -> Tensor<5> {
    filled_chunks(x, chunk, 0.0)
}

/// [`chunks`] with a filling of one's own: a factor of one decays nothing.
pub(crate) fn filled_chunks(x: Tensor<4>, chunk: usize, fill: f32) -> Tensor<5> {
    let [b, t, h, d] = x.dims();
    let count = t.div_ceil(chunk);
    let missing = count * chunk - t;
    let x = if missing == 0 {
        x
    } else {
        let filling = Tensor::full([b, missing, h, d], fill, (&x.device(), x.dtype()));
        Tensor::cat(vec![x, filling], 1)
    };
    x.swap_dims(1, 2).reshape([b, h, count, chunk, d])
}

/// `(I + a)^-1` of strictly lower triangular `a [B,H,N,C,C]`.
///
/// Inverses of diagonal blocks are joined pairwise, `[[A,0],[B,D]]^-1 = [[A',0],[-D'BA',D']]`, so the
/// error grows as in forward substitution; powers of `a` would overflow for similar keys.
pub(crate) fn unit_lower_inverse(a: Tensor<5>) -> Tensor<5> {
    let [b, h, n, c, _] = a.dims();
    let options = (&a.device(), a.dtype());
    let mut inverse = Tensor::<2>::eye(c, &a.device()).cast(a.dtype()).reshape([1, 1, 1, c, c]);
    let mut size = 1;
    while size < c {
        let below = |i: usize, j: usize| i / size % 2 == 1 && j / size == i / size - 1;
        let mask: Vec<f32> = (0..c * c).map(|at| f32::from(u8::from(below(at / c, at % c)))).collect();
        let mask = Tensor::<1>::from_data(mask.as_slice(), options).reshape([1, 1, 1, c, c]);
        let joined = a.clone() * mask;
        let joined = match size {
            1 => joined,
            _ => inverse.clone().matmul(joined).matmul(inverse.clone()),
        };
        inverse = inverse - joined;
        size *= 2;
    }
    inverse.expand([b, h, n, c, c])
}
