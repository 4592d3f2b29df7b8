//! How much each token of a block finds of what the tokens before it wrote.
//!
//! With `G_s` the gradient of pair s times its rate, the memory after token t of a block is
//! `D_t = keep_t D - sum_s mix[t,s] G_s + carry_t P`, and the momentum `P_t = hold_t P - sum_s gather[t,s] G_s`, where D
//! and P are those before the block. Each factor is a sum of products of decays and momenta as they are. Products are
//! split at the middle of a segment, not at the block's start: nothing is divided by a decay and no logarithm is taken,
//! so that a decay of zero (a reset) is exact.

use burn::tensor::Tensor;

use super::rows::{Axis, Decay};

/// The factors of one weight in a block of C tokens and S pairs; `c` channels, one where all numbers share a decay.
#[derive(Debug, Clone)]
pub(super) struct Mixing {
    pub axis: Axis,
    /// `[B, H, C, c]`; ones when absent.
    pub keep: Option<Tensor<4>>,
    /// `[B, H, C, c]`; without momentum absent.
    pub carry: Option<Tensor<4>>,
    /// `[B, H c, C, S]`, a channel's matrix after the other.
    pub mix: Tensor<4>,
    /// `[B, H, C, 1]`; without momentum absent.
    pub hold: Option<Tensor<4>>,
    /// `[B, H, C, S]`; absent where it is the identity.
    pub gather: Option<Tensor<4>>,
    /// What is left of token s's own share at token t, `[B, H c, C, C]`.
    pub retained: Tensor<4>,
}

impl Mixing {
    /// `momentum [B, H, C, 1]`; pairs of `window - 1` tokens come before the block's.
    pub(super) fn new(
        [batch, heads, tokens]: [usize; 3],
        decay: Option<&Decay>,
        momentum: Option<&Tensor<4>>,
        window: usize,
        like: &Tensor<4>,
    ) -> Self {
        let options = (&like.device(), like.dtype());
        let (axis, keep, retained) = match decay {
            Some(Decay { axis, factors }) => {
                let (keep, retained) = products(factors.clone());
                (*axis, Some(keep), retained)
            }
            None => (Axis::Head, None, Tensor::ones([batch, heads, tokens, tokens], options).tril(0)),
        };
        let channels = retained.dims()[1] / heads;
        let band = (window > 1).then(|| {
            let columns = tokens + window - 1;
            let inside = |at: usize| (at / columns..at / columns + window).contains(&(at % columns));
            let band: Vec<f32> = (0..tokens * columns).map(|at| f32::from(u8::from(inside(at)))).collect();
            let band = Tensor::<1>::from_data(band.as_slice(), options).reshape([1, 1, tokens, columns]);
            band.expand([batch, heads, tokens, columns])
        });
        let Some(momentum) = momentum else {
            let (mix, gather) = match band {
                Some(band) => (retained.clone().matmul(spread(band.clone(), channels)), Some(band)),
                None => (retained.clone(), None),
            };
            return Self { axis, keep, carry: None, mix, hold: None, gather, retained };
        };
        let (hold, held) = products(momentum.clone());
        let gather = match band {
            Some(band) => held.matmul(band),
            None => held,
        };
        let carry = retained.clone().matmul(spread(hold.clone(), channels));
        let carry = carry.reshape([batch, heads, channels, tokens]).swap_dims(2, 3);
        let mix = retained.clone().matmul(spread(gather.clone(), channels));
        Self { axis, keep, carry: Some(carry), mix, hold: Some(hold), gather: Some(gather), retained }
    }

    /// The factors of a reader before each token's write: those of the token before.
    pub(super) fn before(&self) -> Self {
        Self {
            axis: self.axis,
            keep: self.keep.clone().map(|keep| one_later(keep, 1.0)),
            carry: self.carry.clone().map(|carry| one_later(carry, 0.0)),
            mix: one_later(self.mix.clone(), 0.0),
            hold: self.hold.clone(),
            gather: self.gather.clone(),
            retained: one_later(self.retained.clone(), 0.0),
        }
    }
}

/// Row t becomes row t + 1 and the first is filled, `[.., C, d]`.
fn one_later(x: Tensor<4>, fill: f64) -> Tensor<4> {
    let tokens = x.dims()[2];
    let first = x.clone().narrow(2, 0, 1).full_like(fill);
    if tokens == 1 { first } else { Tensor::cat(vec![first, x.narrow(2, 0, tokens - 1)], 2) }
}

/// `[B, H, n, d]` once for every channel, `[B, H c, n, d]`.
pub(super) fn spread(x: Tensor<4>, channels: usize) -> Tensor<4> {
    if channels == 1 {
        return x;
    }
    let [batch, heads, n, d] = x.dims();
    let x = x.unsqueeze_dim::<5>(2).expand([batch, heads, channels, n, d]);
    x.reshape([batch, heads * channels, n, d])
}

/// A row of blocks `[R, s, s]`, two by two, with what stands below their diagonal: `[R / 2, 2 s, 2 s]`.
fn join(blocks: [Tensor<3>; 2], below: Tensor<3>) -> Tensor<3> {
    let [first, second] = blocks;
    let top = Tensor::cat(vec![first.clone(), first.zeros_like()], 2);
    Tensor::cat(vec![top, Tensor::cat(vec![below, second], 2)], 1)
}

/// The first and the second of every two of `[R, ..]`.
fn halves<const D: usize>(x: Tensor<D>) -> [Tensor<D>; 2] {
    let shape = x.dims();
    let size: usize = shape[1..].iter().product();
    let x = x.reshape([shape[0] / 2, 2, size]);
    let mut half = shape;
    half[0] /= 2;
    [0, 1].map(|at| x.clone().narrow(1, at, 1).reshape(half))
}

/// Products of `x [B, H, C, c]` over tokens: from the start up to t, `[B, H, C, c]`, and over those after s up to t for
/// `s <= t`, `[B, H c, C, C]`, zero above.
fn products(x: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let [batch, heads, tokens, channels] = x.dims();
    let (rows, padded) = (batch * heads * channels, tokens.next_power_of_two());
    let flat = x.swap_dims(2, 3).reshape([rows, tokens]);
    let flat = match padded - tokens {
        0 => flat,
        more => {
            let ones = Tensor::ones([rows, more], (&flat.device(), flat.dtype()));
            Tensor::cat(vec![flat, ones], 1)
        }
    };
    let mut from_start = flat.reshape([rows * padded, 1]);
    let mut to_end = from_start.ones_like();
    let mut between = to_end.clone().reshape([rows * padded, 1, 1]);
    let mut size = 1;
    while size < padded {
        let [first, second] = halves(from_start);
        let [to_middle, last] = halves(to_end);
        let across = second.clone().unsqueeze_dim::<3>(2) * to_middle.clone().unsqueeze_dim::<3>(1);
        between = join(halves(between), across);
        let over_first = first.clone().narrow(1, size - 1, 1);
        let over_second = second.clone().narrow(1, size - 1, 1);
        from_start = Tensor::cat(vec![first, second * over_first], 1);
        to_end = Tensor::cat(vec![to_middle * over_second, last], 1);
        size *= 2;
    }
    let from_start = from_start.narrow(1, 0, tokens).reshape([batch, heads, channels, tokens]);
    let between = between.narrow(1, 0, tokens).narrow(2, 0, tokens);
    (from_start.swap_dims(2, 3), between.reshape([batch, heads * channels, tokens, tokens]))
}

/// `(I + L)^-1` for `L [B, H, C, C]` that is zero on and above its diagonal, block by block.
pub(super) fn inverse(l: Tensor<4>) -> Tensor<4> {
    let [batch, heads, tokens, _] = l.dims();
    let (rows, padded) = (batch * heads, tokens.next_power_of_two());
    let options = (&l.device(), l.dtype());
    let mut flat = l.reshape([rows, tokens, tokens]);
    if padded > tokens {
        let more = padded - tokens;
        flat = Tensor::cat(vec![flat, Tensor::zeros([rows, tokens, more], options)], 2);
        flat = Tensor::cat(vec![flat, Tensor::zeros([rows, more, padded], options)], 1);
    }
    let mut inverse = Tensor::<3>::ones([rows * padded, 1, 1], options);
    let mut size = 1;
    while size < padded {
        // The blocks of L below the diagonal blocks, pair by pair.
        let pairs = padded / (2 * size);
        let below: Vec<Tensor<3>> = (0..pairs)
            .map(|pair| flat.clone().narrow(1, (2 * pair + 1) * size, size).narrow(2, 2 * pair * size, size))
            .collect();
        let below = Tensor::stack::<4>(below, 1).reshape([rows * pairs, size, size]);
        let [first, second] = halves(inverse);
        let below = second.clone().matmul(below).matmul(first.clone()).neg();
        inverse = join([first, second], below);
        size *= 2;
    }
    inverse.narrow(1, 0, tokens).narrow(2, 0, tokens).reshape([batch, heads, tokens, tokens])
}
