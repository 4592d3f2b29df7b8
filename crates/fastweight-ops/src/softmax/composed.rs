//! Softmax attention as tensor operations, on any device; memory grows with `T` squared.

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Tensor, TensorData};

use super::{KvCache, Sizes};

/// Softmax attention of checked arguments.
pub fn softmax_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    cache: Option<KvCache>,
    sizes: &Sizes,
) -> Tensor<4> {
    let cache = cache.filter(|cache| cache.k.dims()[1] > 0);
    let Some(offsets) = &sizes.offsets else {
        return rows(q, k, v, cache, &sizes.cache.1, sizes);
    };
    let documents = offsets.ranges().enumerate().filter(|(_, range)| !range.is_empty());
    let outputs = documents.map(|(document, range)| {
        let part = |t: &Tensor<4>| t.clone().narrow(1, range.start, range.len());
        let cache = cache.as_ref().map(|cache| KvCache {
            k: cache.k.clone().narrow(0, document, 1),
            v: cache.v.clone().narrow(0, document, 1),
            lengths: None,
        });
        rows(part(&q), part(&k), part(&v), cache, &sizes.cache.1[document..document + 1], sizes)
    });
    Tensor::cat(outputs.collect(), 1)
}

fn rows(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    cache: Option<KvCache>,
    valid: &[usize],
    sizes: &Sizes,
) -> Tensor<4> {
    let [batch, time, heads, key] = q.dims();
    let Sizes { groups, value, scale, .. } = *sizes;
    let shared = heads / groups;
    let held = cache.as_ref().map_or(0, |cache| cache.k.dims()[1]);
    let (k, v) = match cache {
        Some(cache) => (Tensor::cat(vec![cache.k, k], 1), Tensor::cat(vec![cache.v, v], 1)),
        None => (k, v),
    };
    let hidden = hidden(time, held, valid, sizes.window, &q.device());
    let q = q.reshape([batch, time, groups, shared, key]).permute([0, 2, 3, 1, 4]);
    let q = q.reshape([batch, groups, shared * time, key]);
    let scores = q.matmul(k.permute([0, 2, 3, 1])) * scale;
    let scores = scores.reshape([batch, groups, shared, time, held + time]);
    let hidden = hidden.expand([batch, groups, shared, time, held + time]);
    let weights = softmax(scores.mask_fill(hidden, f32::MIN), 4);
    let o = weights.reshape([batch, groups, shared * time, held + time]).matmul(v.permute([0, 2, 1, 3]));
    o.reshape([batch, groups, shared, time, value])
        .permute([0, 3, 1, 2, 4])
        .reshape([batch, time, heads, value])
}

/// Which of the `held + time` keys each query must not see, `[rows or 1, 1, 1, time, held + time]`.
fn hidden(time: usize, held: usize, valid: &[usize], window: usize, device: &Device) -> Tensor<5, Bool> {
    let uniform = valid.windows(2).all(|pair| pair[0] == pair[1]);
    let valid = if uniform { &valid[..1] } else { valid };
    let mut mask = Vec::with_capacity(valid.len() * time * (held + time));
    for &length in valid {
        for query in 0..time {
            let at = length + query;
            let visible = |position: usize| position <= at && at - position < window;
            mask.extend((0..held).map(|i| i >= length || !visible(i)));
            mask.extend((0..time).map(|i| !visible(length + i)));
        }
    }
    Tensor::from_data(TensorData::new(mask, [valid.len(), 1, 1, time, held + time]), device)
}
