//! TTT-Linear: a linear model with a normalised output that learns while it reads.
//!
//! The inner model `f(x) = x + LN(W^T x + c)` learns to map each key to its value by gradient descent on
//! `1/2 |LN(W^T k + c) - (v - k)|^2`, a mini-batch at a time (Sun et al. 2024, arXiv 2407.04620). With `W, c` at
//! the mini-batch's start and `u_s` the loss's gradient with respect to `W^T k_s + c`, a token reads
//! `z_t = scale W^T q_t + c - eta_t sum_{s<=t} (scale q_t.k_s + 1) u_s` and `o_t = z_t + LN(z_t)`; after the last
//! token of the mini-batch `W <- W - eta_last sum_s k_s u_s^T`, `c <- c - eta_last sum_s u_s`. LN has a scale and
//! a shift for each head and `eps = 1e-6`.
//!
//! The fused kernel keeps what [`cpu`] says for the backward pass, linear in the tokens.

mod backward;
mod composed;
pub mod cpu;
mod cpu_step;
mod forward;
mod plan;
mod products;
mod products_backward;
pub mod reference;
mod rows;
mod state;
mod step;

use std::sync::Arc;

use burn::tensor::Tensor;

pub use state::TttState;
pub use step::ttt_linear_step;

use crate::check::{Arguments, default_scale};
use crate::fused::apply;
use crate::kernel::Dims;
use crate::{Offsets, OpError, Path, SequenceOptions};

const NAME: &str = "ttt_linear";

/// Added to the variance in LN.
const EPSILON: f64 = 1e-6;

/// Options of TTT-Linear.
#[derive(Debug, Clone)]
pub struct TttOptions {
    /// Tokens of a mini-batch, 16 by default.
    pub mini_batch: usize,
    /// Factor on the query, `1 / sqrt(K)` when absent.
    pub scale: Option<f32>,
    /// Documents packed in the one row of the batch.
    pub offsets: Option<Offsets>,
    /// Which implementation runs.
    pub path: Path,
}

impl Default for TttOptions {
    fn default() -> Self {
        Self { mini_batch: 16, scale: None, offsets: None, path: Path::Auto }
    }
}

impl From<SequenceOptions> for TttOptions {
    fn from(options: SequenceOptions) -> Self {
        let SequenceOptions { scale, offsets, path } = options;
        Self { scale, offsets, path, ..Self::default() }
    }
}

/// TTT-Linear over a sequence.
///
/// `q, k, v [B,T,H,K]` (values as wide as keys), learning rates `eta [B,T,H]`, scale and shift of the
/// normalisation `ln_w, ln_b [H,K]`, `initial` for each of `N` sequences (inner models of zeros when absent).
/// `N` is the batch, or the number of documents when [`TttOptions::offsets`] pack them into one row. Sequences
/// may be at different positions of their mini-batches.
/// Returns the output `[B,T,H,K]` and the final states, whose last mini-batch may be in progress
/// ([`TttState::flush`] applies it); both carry gradients to every input and to the initial states.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
#[allow(clippy::too_many_arguments, reason = "what the paper's layer computes, one by one")]
pub fn ttt_linear(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    eta: Tensor<3>,
    ln_w: Tensor<2>,
    ln_b: Tensor<2>,
    initial: Option<TttState>,
    options: &TttOptions,
) -> Result<(Tensor<4>, TttState), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let offsets = options.offsets.as_ref();
    let dims = arguments.sequence(&q, &k, &v, options.scale, offsets)?;
    let (states, heads, key) = (dims.states(), dims.heads, dims.key);
    arguments.tensor("eta", &eta, [dims.batch, dims.time, heads])?;
    check_norm(&arguments, &dims, &v, &ln_w, &ln_b)?;
    let initial = initial.unwrap_or_else(|| TttState::zeros(states, heads, key, (&q.device(), q.dtype())));
    initial.check(&arguments, [states, heads, key], options.mini_batch)?;
    let fused = options.path.is_fused(NAME, &q)?;
    if dims.time == 0 {
        return Ok((v, initial));
    }
    let rate = last_rates(&eta, &initial.rate, offsets);
    let scale = options.scale.map_or_else(|| default_scale(key), f64::from);
    let position = dims.sequences().into_iter().zip(&initial.position);
    let position = position.map(|((_, tokens), position)| (position + tokens.len()) % options.mini_batch);
    let position: Vec<usize> = position.collect();
    let initial = initial.pack();
    if fused {
        let op = cpu::FusedTtt { dims, mini_batch: options.mini_batch, position: initial.position };
        let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), eta.into_dispatch()];
        inputs.extend([ln_w.into_dispatch(), ln_b.into_dispatch()]);
        inputs.extend([initial.weights.into_dispatch(), initial.gathered.into_dispatch()]);
        let [o, weights, gathered] = apply(Arc::new(op), inputs);
        let [weights, gathered] = [weights, gathered].map(Tensor::from_dispatch);
        return Ok((Tensor::from_dispatch(o), TttState::unpack(weights, gathered, rate, position)));
    }
    let tokens = composed::Tokens { q, k, v, eta, ln_w, ln_b };
    let (o, weights, gathered) = composed::ttt_linear(tokens, initial, offsets, options.mini_batch, scale);
    Ok((o, TttState::unpack(weights, gathered, rate, position)))
}

/// Values as wide as keys, and the shapes of the normalisation.
fn check_norm<const D: usize>(
    arguments: &Arguments,
    dims: &Dims,
    v: &Tensor<D>,
    ln_w: &Tensor<2>,
    ln_b: &Tensor<2>,
) -> Result<(), OpError> {
    if dims.value != dims.key {
        let expected = format!("values as wide as the keys, {}: the inner model adds to its input", dims.key);
        return Err(arguments.wrong_shape("v", v, expected));
    }
    arguments.tensor("ln_w", ln_w, [dims.heads, dims.key])?;
    arguments.tensor("ln_b", ln_b, [dims.heads, dims.key])
}

/// The rate of each sequence's last token `[N,H]`; of a document without a token, what it had.
fn last_rates(eta: &Tensor<3>, before: &Tensor<2>, offsets: Option<&Offsets>) -> Tensor<2> {
    let at = |t: usize| eta.clone().narrow(1, t, 1).squeeze_dim::<2>(1);
    match offsets {
        None => at(eta.dims()[1] - 1),
        Some(offsets) => {
            let of_document = |(n, tokens): (usize, std::ops::Range<usize>)| match tokens.is_empty() {
                true => before.clone().narrow(0, n, 1),
                false => at(tokens.end - 1),
            };
            Tensor::cat(offsets.ranges().enumerate().map(of_document).collect(), 0)
        }
    }
}
