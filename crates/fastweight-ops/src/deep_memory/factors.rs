//! How much of what a token's state keeps: the scalar factors of the dual form.
//!
//! With `G_s` the gradient of token s at the chunk's start, the weights after token t are
//! `W_t = keep_t W + carry_t P - sum_s mix[t,s] G_s`, and the momentum `P_t = hold_t P - sum_s gather[t,s] G_s`,
//! where W and P are those before the chunk's first token. Each factor is a sum of products of decays, momenta and
//! rates as they are: there are no quotients and no logarithms, so that a decay of 1 (a reset) is exact.

use burn::tensor::Tensor;

use super::{DeepMemory, RateOf};

/// Factors of `n` chunks of `C` tokens, a chunk a row; `S` is C, or with a window C and the tokens before it, and
/// then the rates of the S tokens are still to be multiplied in.
#[derive(Debug, Clone)]
pub(super) struct Factors {
    /// `[R,C,1]`; ones when absent.
    pub(super) keep: Option<Tensor<3>>,
    /// `[R,C,1]`; there is no momentum when absent.
    pub(super) carry: Option<Tensor<3>>,
    /// `[R,C,S]`.
    pub(super) mix: Tensor<3>,
    /// Last row of `hold`, `[R,1,1]`; one when absent.
    pub(super) hold: Option<Tensor<3>>,
    /// Last row of `gather`, `[R,S,1]`, where there is momentum.
    pub(super) gather: Option<Tensor<3>>,
    /// All of `hold` and of `gather`, `[R,C,1]` and `[R,C,S]`, and what each token's share keeps, `[R,C,C]`: for a step
    /// that is not linear in the momentum.
    pub(super) tokenwise: Option<Tokenwise>,
}

/// The factors of every token's own momentum.
#[derive(Debug, Clone)]
pub(super) struct Tokenwise {
    pub(super) hold: Option<Tensor<3>>,
    pub(super) gather: Tensor<3>,
    pub(super) retained: Tensor<3>,
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
            return Self {
                keep: None,
                mix: ones() * column.clone(),
                carry: Some(column),
                hold: None,
                gather: Some(gather),
                tokenwise: None,
            };
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
            return Self { keep, carry: None, mix: written(retained), hold: None, gather: None, tokenwise };
        };
        let held = products(&momentum);
        let hold = from_start(&held, &momentum);
        let tokenwise = memory.newton_schulz.then(|| Tokenwise {
            hold: Some(hold.clone()),
            gather: written(held.clone()),
            retained: retained.clone(),
        });
        Self {
            keep,
            carry: Some(retained.clone().matmul(hold.clone())),
            mix: written(retained.matmul(held.clone())),
            hold: Some(hold.narrow(1, tokens - 1, 1)),
            gather: Some(written(held.narrow(1, tokens - 1, 1)).swap_dims(1, 2)),
            tokenwise,
        }
    }

    /// The rows that a reader uses who reads before it writes: those of the token before, with the weights as they
    /// are for the first.
    pub(super) fn before(&self) -> (Option<Tensor<3>>, Option<Tensor<3>>, Tensor<3>) {
        let shift = |x: &Tensor<3>, first: f64| {
            let [rows, tokens, columns] = x.dims();
            let top = Tensor::full([rows, 1, columns], first, (&x.device(), x.dtype()));
            if tokens == 1 {
                return top;
            }
            Tensor::cat(vec![top, x.clone().narrow(1, 0, tokens - 1)], 1)
        };
        (
            self.keep.as_ref().map(|keep| shift(keep, 1.0)),
            self.carry.as_ref().map(|carry| shift(carry, 0.0)),
            shift(&self.mix, 0.0),
        )
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
