//! Causal softmax attention: `o_t = sum_{i <= t} softmax_i(scale q_t . k_i) v_i`.
//!
//! Optional sliding window, grouped query heads, a cache of earlier keys and values, packed documents.
//! Source: Vaswani et al. 2017 (1706.03762); grouped heads: Ainslie et al. 2023 (2305.13245).

mod append;
mod cache;
pub mod composed;
pub mod cpu;
mod cpu_backward;
mod cpu_token;
mod geometry;
pub mod reference;
mod tile;

use std::sync::Arc;

use burn::tensor::Tensor;

pub use append::reserved;
pub use cache::KvCache;

use crate::check::Arguments;
use crate::fused::apply;
use crate::{Offsets, OpError, Path};

const OPERATOR: &str = "softmax_attention";

/// Options of [`softmax_attention`].
#[derive(Debug, Clone, Default)]
pub struct SoftmaxOptions {
    /// Factor on the scores, `1 / sqrt(K)` when absent.
    pub scale: Option<f32>,
    /// With a window of `w` tokens, the token at position `p` sees `p - w < i <= p`; all earlier ones when
    /// absent. Positions count through the cache: a row's cache length plus the index in its document.
    pub window: Option<usize>,
    /// Documents packed in the one row of the batch; none sees another.
    pub offsets: Option<Offsets>,
    /// Which implementation runs.
    pub path: Path,
}

/// Sizes of one call: `q [batch, time, heads, key]`, `k, v [batch, time, groups, key or value]`.
#[derive(Debug, Clone)]
pub struct Sizes {
    /// Rows of the batch.
    pub batch: usize,
    /// Tokens in a row.
    pub time: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads head `h / (heads / groups)`.
    pub groups: usize,
    /// Key size of a head.
    pub key: usize,
    /// Value size of a head.
    pub value: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Tokens that a token sees, itself included.
    pub window: usize,
    /// Documents packed in the one row, if any.
    pub offsets: Option<Offsets>,
    /// Cache entries held per sequence (0 without a cache), and how many of them are valid.
    pub cache: (usize, Vec<usize>),
}

/// Softmax attention over the cache and the tokens so far.
///
/// `q [B, T, H, K]`, `k [B, T, G, K]`, `v [B, T, G, V]` with `H` a multiple of `G`; query head `h` reads key
/// head `h / (H / G)`. The cache holds what came before token 0 of each row (of each document, with
/// offsets). Returns `o [B, T, H, V]`. [`KvCache::append`] extends the cache.
///
/// # Errors
/// Shapes, offsets, cache lengths or a window of 0 that do not fit, each named.
pub fn softmax_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    cache: Option<KvCache>,
    options: &SoftmaxOptions,
) -> Result<Tensor<4>, OpError> {
    let sizes = check(&q, &k, &v, cache.as_ref(), options)?;
    if !options.path.is_fused(OPERATOR, &q)? {
        return Ok(composed::softmax_attention(q, k, v, cache, &sizes));
    }
    let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch()];
    if let Some(KvCache { k, v, .. }) = cache.filter(|_| sizes.cache.0 > 0) {
        inputs.extend([k.into_dispatch(), v.into_dispatch()]);
    }
    let [o, ..] = apply(Arc::new(cpu::FusedSoftmax { sizes }), inputs);
    Ok(Tensor::from_dispatch(o))
}

fn check(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    cache: Option<&KvCache>,
    options: &SoftmaxOptions,
) -> Result<Sizes, OpError> {
    let [batch, time, heads, key] = q.dims();
    let [.., groups, _] = k.dims();
    let value = v.dims()[3];
    let arguments = Arguments::new(OPERATOR, q);
    if batch == 0 || time == 0 || heads == 0 || key == 0 {
        return Err(shape_error("q", &q.dims(), "at least one row, token, head and dimension".into()));
    }
    arguments.tensor("k", k, [batch, time, groups, key])?;
    arguments.tensor("v", v, [batch, time, groups, value])?;
    if value == 0 {
        return Err(shape_error("v", &v.dims(), "at least one dimension".into()));
    }
    if groups == 0 || !heads.is_multiple_of(groups) {
        return Err(shape_error("q", &q.dims(), format!("a head count that is a multiple of k's {groups}")));
    }
    if options.window == Some(0) {
        return Err(value_error("window", "0", "at least 1 (a token sees itself)"));
    }
    arguments.offsets(options.offsets.as_ref(), batch, time)?;
    let states = options.offsets.as_ref().map_or(batch, Offsets::documents);
    let cache = match cache {
        None => (0, vec![0; states]),
        Some(cache) => {
            let held = cache.k.dims()[1];
            arguments.tensor("cache.k", &cache.k, [states, held, groups, key])?;
            arguments.tensor("cache.v", &cache.v, [states, held, groups, value])?;
            cache.check_lengths()?;
            (held, cache.valid())
        }
    };
    Ok(Sizes {
        batch,
        time,
        heads,
        groups,
        key,
        value,
        scale: arguments.scale(options.scale, key)?,
        window: options.window.unwrap_or(usize::MAX),
        offsets: options.offsets.clone(),
        cache,
    })
}

fn shape_error(argument: &'static str, found: &[usize], expected: String) -> OpError {
    OpError::Shape { operator: OPERATOR, argument, found: found.to_vec(), expected }
}

fn value_error(argument: &'static str, found: impl ToString, expected: impl ToString) -> OpError {
    OpError::Value { operator: OPERATOR, argument, found: found.to_string(), expected: expected.to_string() }
}
