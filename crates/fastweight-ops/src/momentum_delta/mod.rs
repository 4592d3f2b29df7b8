//! The delta rule with momentum: errors are gathered in a second matrix, which is then added to the memory.
//!
//! `M_t = exp(log_mu_t) M_{t-1} - eta_t k_t (v_t - S_{t-1}^T p_t)^T`,
//! `S_t = exp(log_alpha_t) S_{t-1} - beta_t M_t`, `o_t = scale * S_t^T q_t`: memory `S`, momentum `M`, the error is read
//! with the key `p` from the state before its decay. [Titans](crate::titans) is the same recurrence with `p = k`.
//!
//! The fused kernel keeps what [`cpu`] says for the backward pass. On tensor operations a forward and backward pass
//! takes about 10 kB a token and head of 64 by 64, in float32 (at most; linear in the tokens).

mod composed;
pub mod cpu;
pub mod reference;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::check::{Arguments, default_scale, tracked};
use crate::fused::{apply, step_states_in_place};
use crate::kernel::Dims;
use crate::{OpError, Path, SequenceOptions};

const NAME: &str = "momentum_delta_rule";

/// What each token brings to [`momentum_delta_rule`].
#[derive(Debug, Clone)]
pub struct MomentumTokens {
    /// Queries `[B,T,H,K]`.
    pub q: Tensor<4>,
    /// Keys to write with, `[B,T,H,K]`.
    pub k: Tensor<4>,
    /// Keys to read the error with, `[B,T,H,K]`.
    pub p: Tensor<4>,
    /// Values `[B,T,H,V]`.
    pub v: Tensor<4>,
    /// Log decays of the memory, `[B,T,H]`, `<= 0`; `-inf` forgets everything.
    pub log_alpha: Tensor<3>,
    /// Log decays of the momentum, `[B,T,H]`, `<= 0`; `-inf` is no momentum.
    pub log_mu: Tensor<3>,
    /// How much of the momentum is written, `[B,T,H]`.
    pub beta: Tensor<3>,
    /// Rates at which errors enter the momentum, `[B,T,H]`.
    pub eta: Tensor<3>,
}

/// One token of each row, for [`momentum_delta_rule_step`].
#[derive(Debug, Clone)]
pub struct MomentumToken {
    /// Queries `[B,H,K]`.
    pub q: Tensor<3>,
    /// Keys to write with, `[B,H,K]`.
    pub k: Tensor<3>,
    /// Keys to read the error with, `[B,H,K]`.
    pub p: Tensor<3>,
    /// Values `[B,H,V]`.
    pub v: Tensor<3>,
    /// Log decays of the memory, `[B,H]`, `<= 0`.
    pub log_alpha: Tensor<2>,
    /// Log decays of the momentum, `[B,H]`, `<= 0`.
    pub log_mu: Tensor<2>,
    /// How much of the momentum is written, `[B,H]`.
    pub beta: Tensor<2>,
    /// Rates at which errors enter the momentum, `[B,H]`.
    pub eta: Tensor<2>,
}

/// The delta rule with momentum over a sequence.
///
/// `initial` holds memory and momentum, `[N,H,K,V]` each (zero when absent). `N` is the batch, or the number of
/// documents when [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]`, the final memories and the final momenta; all carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Gate`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
pub fn momentum_delta_rule(
    tokens: MomentumTokens,
    initial: Option<(Tensor<4>, Tensor<4>)>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>), OpError> {
    let MomentumTokens { q, k, p, v, log_alpha, log_mu, beta, eta } = tokens;
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    let per_token = [dims.batch, dims.time, dims.heads];
    arguments.tensor("p", &p, q.dims())?;
    arguments.gate("log_alpha", &log_alpha, per_token)?;
    arguments.gate("log_mu", &log_mu, per_token)?;
    arguments.tensor("beta", &beta, per_token)?;
    arguments.tensor("eta", &eta, per_token)?;
    let (s, m) = initial.unzip();
    let shape = [dims.states(), dims.heads, dims.key, dims.value];
    let s = arguments.state("initial memory", s, shape, &q)?;
    let m = arguments.state("initial momentum", m, shape, &q)?;
    let multipliers = Multipliers {
        retain: log_alpha.exp(),
        momentum: log_mu.exp(),
        rate: eta.neg(),
        write: Some(beta.neg()),
    };
    run(NAME, [q, k, p, v], multipliers, [s, m], dims, options)
}

/// What the recurrence multiplies with as plain numbers, `[B,T,H]` each, or `[B,H]` of one token.
///
/// Without `write` all of the momentum is written, and the others are numbers for each column of the states, with a last
/// axis of `V`.
pub(crate) struct Multipliers<const D: usize> {
    pub(crate) retain: Tensor<D>,
    pub(crate) momentum: Tensor<D>,
    pub(crate) rate: Tensor<D>,
    pub(crate) write: Option<Tensor<D>>,
}

impl<const D: usize> Multipliers<D> {
    fn map<const E: usize>(self, to: impl Fn(Tensor<D>) -> Tensor<E>) -> Multipliers<E> {
        let [retain, momentum, rate] = [self.retain, self.momentum, self.rate].map(&to);
        Multipliers { retain, momentum, rate, write: self.write.map(to) }
    }

    /// Numbers of a token and head.
    fn columns(&self, dims: &Dims) -> usize {
        if self.write.is_some() { 1 } else { dims.value }
    }
}

/// `P_t = momentum P_{t-1} + rate k (v - S_{t-1}^T p)^T`, `S_t = retain S_{t-1} + write P_t`, `o = scale S_t^T q` on
/// checked arguments; returns `o`, `S` and `P`.
pub(crate) fn run<const D: usize>(
    name: &'static str,
    [q, k, p, v]: [Tensor<4>; 4],
    multipliers: Multipliers<D>,
    [state, momentum_state]: [Tensor<4>; 2],
    dims: Dims,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>), OpError> {
    let fused = options.path.is_fused(name, &q)?;
    if dims.time == 0 {
        return Ok((v, state, momentum_state));
    }
    if fused {
        let Multipliers { retain, momentum, rate, write } = multipliers;
        let channel_gates = write.is_none();
        let mut inputs: Vec<_> = [q, k, p, v].map(Tensor::into_dispatch).into();
        inputs.extend([retain, momentum, rate].map(Tensor::into_dispatch));
        inputs.extend([state, momentum_state].map(Tensor::into_dispatch));
        inputs.extend(write.map(Tensor::into_dispatch));
        let [o, s, p] = apply(Arc::new(cpu::FusedMomentumDelta { dims, channel_gates }), inputs);
        return Ok((Tensor::from_dispatch(o), Tensor::from_dispatch(s), Tensor::from_dispatch(p)));
    }
    let scale = options.scale.map_or_else(|| default_scale(dims.key), f64::from);
    let shape = [dims.batch, dims.time, dims.heads, multipliers.columns(&dims)];
    let Multipliers { retain, momentum, rate, write } = multipliers.map(|x| x.reshape(shape));
    let tokens = composed::Tokens { q, k, p, v, retain, momentum, rate, write };
    let (o, [s, p]) = composed::run(tokens, [state, momentum_state], options.offsets.as_ref(), scale);
    Ok((o, s, p))
}

/// One token of the delta rule with momentum, for every row of the batch.
///
/// `state` holds memory and momentum, `[B,H,K,V]` each; `scale` `1 / sqrt(K)` when absent.
/// Returns the output `[B,H,V]`, the next memory and the next momentum. They are updated in place when nobody else
/// holds them and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
pub fn momentum_delta_rule_step(
    token: MomentumToken,
    state: (Tensor<4>, Tensor<4>),
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>, Tensor<4>), OpError> {
    let MomentumToken { q, k, p, v, log_alpha, log_mu, beta, eta } = token;
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.token(&q, &k, &v, scale)?;
    let per_head = [dims.batch, dims.heads];
    arguments.tensor("p", &p, q.dims())?;
    arguments.gate("log_alpha", &log_alpha, per_head)?;
    arguments.gate("log_mu", &log_mu, per_head)?;
    arguments.tensor("beta", &beta, per_head)?;
    arguments.tensor("eta", &eta, per_head)?;
    let shape = [dims.batch, dims.heads, dims.key, dims.value];
    arguments.tensor("memory", &state.0, shape)?;
    arguments.tensor("momentum", &state.1, shape)?;
    let multipliers = Multipliers {
        retain: log_alpha.exp(),
        momentum: log_mu.exp(),
        rate: eta.neg(),
        write: Some(beta.neg()),
    };
    run_step(NAME, [q, k, p, v], multipliers, state.into(), dims, scale)
}

/// [`run`] for one token of each row.
pub(crate) fn run_step<const D: usize>(
    name: &'static str,
    [q, k, p, v]: [Tensor<3>; 4],
    multipliers: Multipliers<D>,
    state: [Tensor<4>; 2],
    dims: Dims,
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>, Tensor<4>), OpError> {
    let Multipliers { retain, momentum, rate, write } = &multipliers;
    let gradients =
        tracked([&q, &k, &p, &v]) || tracked([retain, momentum, rate]) || tracked(write) || tracked(&state);
    if Path::Auto.is_fused(name, &q)? && !gradients {
        let Multipliers { retain, momentum, rate, write } = multipliers;
        let shape = v.dims();
        let mut inputs: Vec<_> = [q, k, p, v].map(Tensor::into_dispatch).into();
        inputs.extend([retain, momentum, rate].map(Tensor::into_dispatch));
        inputs.extend(write.map(Tensor::into_dispatch));
        let (o, [s, p]) = step_states_in_place(state, inputs, &shape, |[s, p], x, out| {
            cpu::step(&dims, s, p, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x.get(7).copied(), out);
        });
        return Ok((Tensor::from_dispatch(o), s, p));
    }
    let options = SequenceOptions { scale, ..SequenceOptions::default() };
    let tokens = [q, k, p, v].map(|x| x.unsqueeze_dim(1));
    let shape = [dims.batch, 1, dims.heads, multipliers.columns(&dims)];
    let multipliers = multipliers.map(|x| x.reshape(shape));
    let (o, s, p) = run(name, tokens, multipliers, state, dims, &options)?;
    Ok((o.squeeze_dim(1), s, p))
}
