//! DEA of RWKV-7b: attention over all tokens whose keys and values are made from a few cached numbers and the token's id.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use fastweight_ops::{Offsets, OpError};

use crate::init::placeholder;
use crate::token_shift::token_shift;
use crate::{KvState, LayerContext, LayerNorm, LowRankLinear, MemoryError, Shared, TokenTable, linear};

/// Scores stay below this.
const SCORE_CAP: f64 = 64.0;

/// Queries whose scores are held at once.
const BLOCK: usize = 128;

/// How much of the token before goes into each channel of the queries, keys and values.
#[derive(Module, Debug)]
pub struct DeaShift {
    /// `[query_dim]`.
    pub q: Param<Tensor<1>>,
    /// `[query_dim]`.
    pub k: Param<Tensor<1>>,
    /// `[width]`.
    pub v: Param<Tensor<1>>,
}

/// Sizes of [`Dea`].
#[derive(Debug, Clone, Copy)]
pub(super) struct DeaSizes {
    pub query: usize,
    pub rank: usize,
}

/// `q = x qq`, `k = (cache(x k1) k2) * k_emb[id]`, `v = tanh(cache(x v1) v2) * v_emb[id]`, each a lerp with the one of the
/// token before and then layer-normalised; causal softmax attention with scores `64 tanh(q k^T / (64 sqrt(query_dim)))`,
/// which is `64 tanh(q k^T / 1024)` at the 256 channels of RWKV-7b (RWKV-LM `RWKV-v7`, the v7b demo). `k_emb` and `v_emb`
/// are tables by token id with a linear map of the token's embedding added.
///
/// The cache holds the outputs of `k1` and `v1` and the id. Keys and values of a session's tokens are made anew in every call.
/// Scores are computed for a block of queries at a time, so that reading without gradients needs memory linear in the
/// tokens; with gradients every block is kept, and memory grows with their square.
#[derive(Module, Debug)]
pub struct Dea {
    /// `qq`, `width -> query_dim`.
    pub q: Linear,
    /// `k1` and `k2`, `width -> rank -> query_dim`.
    pub k: LowRankLinear,
    /// `v1` and `v2`, `width -> rank -> width`.
    pub v: LowRankLinear,
    /// `k_emb`, `[vocab, query_dim]`.
    pub k_table: TokenTable,
    /// `v_emb`, `[vocab, width]`.
    pub v_table: TokenTable,
    /// Mixes of a token and the one before.
    pub shift: DeaShift,
    /// Of the queries.
    pub q_norm: LayerNorm,
    /// Of the keys.
    pub k_norm: LayerNorm,
    /// Of the values.
    pub v_norm: LayerNorm,
}

impl DeaSizes {
    pub(super) fn build(self, ctx: &LayerContext, device: &Device) -> Dea {
        let (width, vocab) = (ctx.width, ctx.vocab);
        let mix = |channels| placeholder([channels], device);
        let norm = |channels| LayerNorm::new(channels, ctx.norm_eps, device);
        Dea {
            q: linear(width, self.query, device),
            k: LowRankLinear::new(width, self.rank, self.query, device),
            v: LowRankLinear::new(width, self.rank, width, device),
            k_table: TokenTable::new(vocab, self.query, Some(width), device),
            v_table: TokenTable::new(vocab, width, Some(width), device),
            shift: DeaShift { q: mix(self.query), k: mix(self.query), v: mix(width) },
            q_norm: norm(self.query),
            k_norm: norm(self.query),
            v_norm: norm(width),
        }
    }

    /// Trained parameters; `usize::MAX` when there are more.
    pub(super) fn parameter_count(self, ctx: &LayerContext) -> usize {
        let Self { query, rank } = self;
        let table = |channels| TokenTable::parameter_count(ctx.vocab, channels, Some(ctx.width));
        let maps = query * ctx.width + rank * (2 * ctx.width + query + ctx.width);
        let vectors = 2 * query + ctx.width + 2 * (2 * query + ctx.width);
        table(query).saturating_add(table(ctx.width)).saturating_add(maps + vectors)
    }

    /// Numbers that a session holds once.
    pub(super) fn fixed_elements(self) -> usize {
        self.query
    }

    /// Numbers that a session holds for each token.
    pub(super) fn entry_elements(self) -> usize {
        2 * self.rank + 1
    }
}

/// A sequence of the input: where it lies, and its row of the cache.
struct Sequence {
    /// First input row, number of input rows.
    rows: [usize; 2],
    /// First token, number of tokens.
    tokens: [usize; 2],
    /// First row of the cache.
    cached: usize,
    /// Tokens read before.
    before: usize,
}

impl Dea {
    /// Reads the block's own input `x [B, T, width]` of the tokens `ids [B, T]`; returns `[B, T, width]`, the cache and the
    /// last queries.
    pub(super) fn forward(
        &self,
        name: &'static str,
        x: Tensor<3>,
        (cache, last_query): (KvState, Option<Tensor<3>>),
        offsets: Option<&Offsets>,
        shared: &Shared,
    ) -> Result<(Tensor<3>, KvState, Tensor<3>), MemoryError> {
        let ids = shared.ids(name, &x, self.k_table.vocab())?;
        let embedded = shared.vectors_of(name, &x)?;
        let [batch, time, _] = x.dims();
        let (q, last_query) = lerp(self.q.forward(x.clone()), &self.shift.q, last_query, offsets)?;
        let q = self.q_norm.forward(q)?;

        let before = cache.lengths.clone();
        let entry = |t: Tensor<3>| t.unsqueeze_dim::<4>(2);
        let id = ids.float().reshape([batch, time, 1]);
        let key = entry(self.k.reduce.forward(x.clone()));
        let value = entry(Tensor::cat(vec![self.v.reduce.forward(x), id], 2));
        let cache = cache.append(key, value, offsets, None)?;

        let mut outputs = Vec::new();
        for sequence in sequences(batch, time, &before, offsets) {
            let [row, rows] = sequence.rows;
            let [start, count] = sequence.tokens;
            let part = |t: &Tensor<3>| t.clone().narrow(0, row, rows).narrow(1, start, count);
            let context = self.context(name, &cache, &sequence, part(&embedded), shared)?;
            outputs.push(attend(part(&q), context));
        }
        let dim = if offsets.is_some() { 1 } else { 0 };
        Ok((Tensor::cat(outputs, dim), cache, last_query))
    }

    /// Keys `[N, P, query_dim]` and values `[N, P, width]` of all tokens of a sequence.
    fn context(
        &self,
        name: &'static str,
        cache: &KvState,
        sequence: &Sequence,
        embedded: Tensor<3>,
        shared: &Shared,
    ) -> Result<[Tensor<3>; 2], MemoryError> {
        let Some((k, v)) = &cache.entries else {
            let found = vec![0];
            return Err(MemoryError::Input { layer: name, found, expected: "at least one token".into() });
        };
        let ([_, rows], [_, count]) = (sequence.rows, sequence.tokens);
        let all = sequence.before + count;
        let part =
            |t: &Tensor<4>| t.clone().narrow(0, sequence.cached, rows).narrow(1, 0, all).squeeze_dim::<3>(2);
        let (k, v) = (part(k), part(v));
        let rank = v.dims()[2] - 1;
        let ids: Tensor<2, Int> = v.clone().narrow(2, rank, 1).squeeze_dim::<2>(2).int();
        let v = v.narrow(2, 0, rank);
        let embedded = match sequence.before {
            0 => embedded,
            _ => shared.any_vector(name)?.of(ids.clone())?,
        };
        let k = self.k.expand.forward(k) * self.k_table.of(ids.clone(), &embedded);
        let v = self.v.expand.forward(v).tanh() * self.v_table.of(ids, &embedded);
        let k = self.k_norm.forward(lerp(k, &self.shift.k, None, None)?.0)?;
        let v = self.v_norm.forward(lerp(v, &self.shift.v, None, None)?.0)?;
        Ok([k, v])
    }
}

/// Sequences that can be computed together: all rows while they have read as much, else each for itself.
fn sequences(batch: usize, time: usize, before: &[usize], offsets: Option<&Offsets>) -> Vec<Sequence> {
    let Some(offsets) = offsets else {
        if before.windows(2).all(|pair| pair[0] == pair[1]) {
            let before = before.first().copied().unwrap_or(0);
            return vec![Sequence { rows: [0, batch], tokens: [0, time], cached: 0, before }];
        }
        let row = |(row, before): (usize, &usize)| Sequence {
            rows: [row, 1],
            tokens: [0, time],
            cached: row,
            before: *before,
        };
        return before.iter().enumerate().map(row).collect();
    };
    let documents = offsets.ranges().enumerate().filter(|(_, range)| !range.is_empty());
    documents
        .map(|(document, range)| Sequence {
            rows: [0, 1],
            tokens: [range.start, range.len()],
            cached: document,
            before: before[document],
        })
        .collect()
}

/// `x` mixed with the token before, and the last tokens.
fn lerp(
    x: Tensor<3>,
    mix: &Param<Tensor<1>>,
    last: Option<Tensor<3>>,
    offsets: Option<&Offsets>,
) -> Result<(Tensor<3>, Tensor<3>), OpError> {
    let (before, last) = token_shift(x.clone(), last, offsets)?;
    Ok((x.clone() + (before - x) * mix.val().unsqueeze(), last))
}

/// Causal attention of the last tokens, `q [N, T, query_dim]`, over all, block by block: `[N, T, width]`.
fn attend(q: Tensor<3>, [k, v]: [Tensor<3>; 2]) -> Tensor<3> {
    let [_, time, query] = q.dims();
    let before = k.dims()[1] - time;
    let scale = 1.0 / (SCORE_CAP * (query as f64).sqrt());
    let block = |start: usize| {
        let count = BLOCK.min(time - start);
        let seen = before + start + count;
        let keys = k.clone().narrow(1, 0, seen).swap_dims(1, 2);
        let scores = (q.clone().narrow(1, start, count).matmul(keys) * scale).tanh() * SCORE_CAP;
        let scores = match count {
            1 => scores,
            _ => scores.clone().mask_fill(future(count, seen, &q.device()).expand(scores.shape()), f32::MIN),
        };
        softmax(scores, 2).matmul(v.clone().narrow(1, 0, seen))
    };
    Tensor::cat((0..time).step_by(BLOCK).map(block).collect(), 1)
}

/// Which of `seen` tokens come after each of the last `count`, `[1, count, seen]`.
fn future(count: usize, seen: usize, device: &Device) -> Tensor<3, Bool> {
    let first = seen - count;
    let mask: Vec<bool> = (0..count).flat_map(|at| (0..seen).map(move |i| i > first + at)).collect();
    Tensor::from_data(TensorData::new(mask, [1, count, seen]), device)
}
