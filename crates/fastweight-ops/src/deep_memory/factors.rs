//! How much of what a token's state keeps: the factors of the dual form.
//!
//! With `G_s` the gradient of token s at the chunk's start, the weights after token t are
//! `W_t = keep_t W + carry_t P - sum_s mix[t,s] G_s`, and the momentum `P_t = hold_t P - sum_s gather[t,s] G_s`,
//! where W and P are those before the chunk's first token. Each factor is a sum of products of decays, momenta and
//! rates as they are: there are no quotients and no logarithms, so that a decay of 1 (a reset) is exact.

use burn::tensor::Tensor;

use super::chunked::split;
use super::output_factors::OutputMix;
use super::{DeepMemory, RateOf};

/// Factors of `R` chunks of `C` tokens, a chunk a row; `S` is C, or with a window C and the tokens before it, and
/// then the rates of the S tokens are still to be multiplied in. `G` is 1, or the outputs of a layer that have gates of their own.
#[derive(Debug, Clone)]
pub(super) struct Factors {
    /// Those of the weights after every token.
    pub(super) rows: Rows,
    /// Those that a reader uses, when they are not `rows`.
    pub(super) before: Option<Rows>,
    /// Last row of `hold`, `[R,1,G]`; one when absent.
    pub(super) hold: Option<Tensor<3>>,
    /// Last row of `gather`, `[R,S,G]`, where there is momentum.
    pub(super) gather: Option<Tensor<3>>,
    /// All of `hold` and of `gather`, `[R,C,1]` and `[R,C,S]`, and what each token's share keeps, `[R,C,C]`: for a step
    /// that is not linear in the momentum.
    pub(super) tokenwise: Option<Tokenwise>,
}

/// A row for every token.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    /// `[R,C,G]`; ones when absent.
    pub(super) keep: Option<Tensor<3>>,
    /// `[R,C,G]`; there is no momentum when absent.
    pub(super) carry: Option<Tensor<3>>,
    pub(super) mix: Mix,
}

/// What each token's weights hold of the gradients before it.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)]
pub(super) enum Mix {
    /// `[R,C,S]`, the same for every output.
    Heads(Tensor<3>),
    /// A factor for every output.
    Outputs(OutputMix),
}

impl Mix {
    /// `sum_s mix[t,s] scores[t,s] errors_s` for the scores `[M,C,S]` and errors `[M,S,out]` of a layer.
    pub(super) fn apply(&self, scores: Tensor<3>, errors: &Tensor<3>) -> Tensor<3> {
        match self {
            Self::Heads(mix) => (scores * mix.clone()).matmul(errors.clone()),
            Self::Outputs(mix) => mix.apply(scores, errors),
        }
    }

    /// The last row, `[R,S,G]`.
    pub(super) fn end(&self) -> Tensor<3> {
        match self {
            Self::Heads(mix) => mix.clone().narrow(1, mix.dims()[1] - 1, 1).swap_dims(1, 2),
            Self::Outputs(mix) => mix.end.clone(),
        }
    }

    /// Multiplies the rates `[R,S,1]` of a window's tokens in.
    fn weighed(self, rate: &Tensor<3>) -> Self {
        match self {
            Self::Heads(mix) => Self::Heads(mix * rate.clone().swap_dims(1, 2)),
            outputs => outputs,
        }
    }

    fn cut(self, count: usize) -> Vec<Self> {
        match self {
            Self::Heads(mix) => cut(mix, count).into_iter().map(Self::Heads).collect(),
            Self::Outputs(mix) => mix.cut(count).into_iter().map(Self::Outputs).collect(),
        }
    }
}

/// Chunks `[M,*,*]` of `[count * M,*,*]`.
pub(super) fn cut(x: Tensor<3>, count: usize) -> Vec<Tensor<3>> {
    let [rows, a, b] = x.dims();
    split(x.reshape([count, rows / count, a, b]))
}

/// [`cut`], one part after the other, of what may be absent.
pub(super) fn parts(x: Option<Tensor<3>>, count: usize) -> impl FnMut() -> Option<Tensor<3>> {
    let mut parts = x.map(|x| cut(x, count).into_iter());
    move || parts.as_mut()?.next()
}

impl Rows {
    fn cut(self, count: usize) -> Vec<Self> {
        let (mut keep, mut carry) = (parts(self.keep, count), parts(self.carry, count));
        self.mix.cut(count).into_iter().map(|mix| Self { keep: keep(), carry: carry(), mix }).collect()
    }

    /// The rows that a reader uses who reads before it writes: those of the token before, with the weights as they
    /// are for the first.
    pub(super) fn before(&self) -> Self {
        let shift = |x: &Tensor<3>, first: f64| {
            let [rows, tokens, columns] = x.dims();
            let top = Tensor::full([rows, 1, columns], first, (&x.device(), x.dtype()));
            if tokens == 1 {
                return top;
            }
            Tensor::cat(vec![top, x.clone().narrow(1, 0, tokens - 1)], 1)
        };
        Self {
            keep: self.keep.as_ref().map(|keep| shift(keep, 1.0)),
            carry: self.carry.as_ref().map(|carry| shift(carry, 0.0)),
            mix: match &self.mix {
                Mix::Heads(mix) => Mix::Heads(shift(mix, 0.0)),
                Mix::Outputs(mix) => Mix::Outputs(mix.before()),
            },
        }
    }
}

/// The factors of every token's own momentum.
#[derive(Debug, Clone)]
pub(super) struct Tokenwise {
    pub(super) hold: Option<Tensor<3>>,
    pub(super) gather: Tensor<3>,
    pub(super) retained: Tensor<3>,
}

impl Tokenwise {
    fn cut(self, count: usize) -> Vec<Self> {
        let mut hold = parts(self.hold, count);
        let both = cut(self.gather, count).into_iter().zip(cut(self.retained, count));
        both.map(|(gather, retained)| Self { hold: hold(), gather, retained }).collect()
    }
}

/// `[R,C]` each: the plain numbers of the tokens.
#[derive(Debug, Clone)]
pub(super) struct Scalars {
    pub(super) rate: Tensor<2>,
    pub(super) momentum: Option<Tensor<2>>,
    pub(super) decay: Option<Tensor<2>>,
}

impl Factors {
    pub(super) fn new(scalars: Scalars, memory: &DeepMemory) -> Self {
        let window = memory.window;
        let Scalars { rate, momentum, decay } = scalars;
        let [rows, tokens] = rate.dims();
        let ones = || Tensor::<3>::ones([rows, tokens, tokens], (&rate.device(), rate.dtype())).tril(0);
        if memory.rate == RateOf::Reading {
            let column = rate.clone().unsqueeze_dim::<3>(2);
            let gather = Tensor::ones([rows, tokens, 1], (&rate.device(), rate.dtype()));
            let mix = Mix::Heads(ones() * column.clone());
            let rows = Rows { keep: None, carry: Some(column), mix };
            return Self { rows, before: None, hold: None, gather: Some(gather), tokenwise: None };
        }
        let written = |x: Tensor<3>| match window {
            1 => x * rate.clone().unsqueeze_dim::<3>(1),
            _ => x.matmul(band(tokens, window, &rate)),
        };
        let from_start = |products: &Tensor<3>, first: &Tensor<2>| {
            products.clone().narrow(2, 0, 1) * first.clone().narrow(1, 0, 1).unsqueeze_dim::<3>(2)
        };
        let retained = decay.map(|decay| {
            let kept = decay.neg() + 1.0;
            let products = products(&kept);
            (from_start(&products, &kept), products)
        });
        let (keep, retained) = match retained {
            Some((keep, products)) => (Some(keep), products),
            None => (None, ones()),
        };
        let Some(momentum) = momentum else {
            let tokenwise = memory.newton_schulz.then(|| {
                let own = Tensor::<2>::eye(tokens, &rate.device()).cast(rate.dtype()).unsqueeze_dim::<3>(0);
                let gather = written(own.expand([rows, tokens, tokens]));
                Tokenwise { hold: None, gather, retained: retained.clone() }
            });
            let rows = Rows { keep, carry: None, mix: Mix::Heads(written(retained)) };
            return Self { rows, before: None, hold: None, gather: None, tokenwise };
        };
        let held = products(&momentum);
        let hold = from_start(&held, &momentum);
        let tokenwise = memory.newton_schulz.then(|| Tokenwise {
            hold: Some(hold.clone()),
            gather: written(held.clone()),
            retained: retained.clone(),
        });
        let carry = Some(retained.clone().matmul(hold.clone()));
        let mix = Mix::Heads(written(retained.matmul(held.clone())));
        Self {
            rows: Rows { keep, carry, mix },
            before: None,
            hold: Some(hold.narrow(1, tokens - 1, 1)),
            gather: Some(written(held.narrow(1, tokens - 1, 1)).swap_dims(1, 2)),
            tokenwise,
        }
    }

    /// The rows that a reader uses.
    pub(super) fn reader(&self) -> &Rows {
        self.before.as_ref().unwrap_or(&self.rows)
    }

    /// Multiplies the rates `[R,S,1]` of a window's tokens in.
    pub(super) fn weighed(self, rate: &Tensor<3>) -> Self {
        let rows = |rows: Rows| Rows { mix: rows.mix.weighed(rate), ..rows };
        let tokenwise = |x: Tokenwise| Tokenwise { gather: x.gather * rate.clone().swap_dims(1, 2), ..x };
        Self {
            rows: rows(self.rows),
            before: self.before.map(rows),
            hold: self.hold,
            gather: self.gather.map(|gather| gather * rate.clone()),
            tokenwise: self.tokenwise.map(tokenwise),
        }
    }

    /// Chunks of M rows each.
    pub(super) fn cut(self, count: usize) -> Vec<Self> {
        let mut before = self.before.map(|rows| rows.cut(count).into_iter());
        let (mut hold, mut gather) = (parts(self.hold, count), parts(self.gather, count));
        let mut tokenwise = self.tokenwise.map(|x| x.cut(count).into_iter());
        let chunk = |rows| Self {
            rows,
            before: before.as_mut().and_then(Iterator::next),
            hold: hold(),
            gather: gather(),
            tokenwise: tokenwise.as_mut().and_then(Iterator::next),
        };
        self.rows.cut(count).into_iter().map(chunk).collect()
    }
}

/// `[1,C,C+window-1]`: which tokens each token's momentum takes up, those before the chunk first.
fn band(tokens: usize, window: usize, like: &Tensor<2>) -> Tensor<3> {
    let columns = tokens + window - 1;
    let inside = |at: usize| (at / columns..at / columns + window).contains(&(at % columns));
    let band: Vec<f32> = (0..tokens * columns).map(|at| f32::from(u8::from(inside(at)))).collect();
    let options = (&like.device(), like.dtype());
    Tensor::<1>::from_data(band.as_slice(), options).reshape([1, tokens, columns])
}

/// `[R,C,C]`: entry (t, j) is `prod_{j < r <= t} x_r` for `j <= t`, zero above.
///
/// `(I - S)^-1 = (I + S)(I + S^2)(I + S^4)...` for the subdiagonal S of x: every entry of a power is one product.
fn products(x: &Tensor<2>) -> Tensor<3> {
    let [_, tokens] = x.dims();
    let options = (&x.device(), x.dtype());
    let mask: Vec<f32> =
        (0..tokens * tokens).map(|at| f32::from(u8::from(at / tokens == at % tokens + 1))).collect();
    let mask = Tensor::<1>::from_data(mask.as_slice(), options).reshape([1, tokens, tokens]);
    let identity = Tensor::<2>::eye(tokens, &x.device()).cast(x.dtype()).unsqueeze_dim::<3>(0);
    let mut power = x.clone().unsqueeze_dim::<3>(2) * mask;
    let mut sum = power.clone() + identity;
    let mut length = 2;
    while length < tokens {
        power = power.clone().matmul(power);
        sum = sum.clone() + sum.matmul(power.clone());
        length *= 2;
    }
    sum
}
