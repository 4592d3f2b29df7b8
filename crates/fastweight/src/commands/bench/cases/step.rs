//! Operators one token at a time, for several sessions together.

use burn::tensor::Device;
use fastweight::ops::comba::comba_step;
use fastweight::ops::deep_memory::{DeepGate, DeepMemory, DeepState, DeepToken, deep_memory_step};
use fastweight::ops::delta::delta_rule_step;
use fastweight::ops::delta_product::delta_product_step;
use fastweight::ops::dplr::dplr_step;
use fastweight::ops::gla::gated_linear_attention_step;
use fastweight::ops::kda::kimi_delta_attention_step;
use fastweight::ops::linear::linear_attention_step;
use fastweight::ops::normalised_linear::normalised_linear_attention_step;
use fastweight::ops::short_conv::short_convolution;
use fastweight::ops::softmax::{KvCache, SoftmaxOptions, softmax_attention};
use fastweight::ops::titans::titans_memory_step;
use fastweight::ops::ttt::{TttOptions, TttState, ttt_linear_step};
use fastweight::ops::{OpError, Path};

use super::{Draw, Gate, Operator, STEPS, Shape, TAPS};

/// One more token in every session, whose states go from call to call. The first error ends them.
pub fn step(
    operator: Operator,
    gate: Gate,
    shape: &Shape,
    device: &Device,
) -> Box<dyn FnMut() -> Result<(), OpError>> {
    let Shape { time, heads, key, value, sessions, .. } = *shape;
    let draw = Draw { gate, device };
    let scalars = [sessions, heads];
    let keys = || draw.unit_token([sessions, heads, key]);
    let (q, k) = (keys(), keys());
    let v = draw.normal([sessions, heads, value]);
    let matrix = || draw.normal([sessions, heads, key, value]);
    // The state is handed over, so that it is updated in place.
    macro_rules! advance {
        ($state:expr, $next:pat => $kept:expr, $function:ident($($argument:expr),*; $($last:expr),*)) => {{
            let mut state = Some($state);
            Box::new(move || {
                if let Some(now) = state.take() {
                    let $next = $function($($argument.clone()),*, now, $($last),*)?;
                    state = Some($kept);
                }
                Ok(())
            })
        }};
    }
    match operator {
        Operator::Softmax => {
            let cache = KvCache {
                k: draw.normal([sessions, time, heads, key]),
                v: draw.normal([sessions, time, heads, value]),
                lengths: None,
            };
            let [q, k] = [q, k].map(|x| x.unsqueeze_dim::<4>(1));
            let v = v.unsqueeze_dim::<4>(1);
            Box::new(move || {
                let options = SoftmaxOptions::default();
                softmax_attention(q.clone(), k.clone(), v.clone(), Some(cache.clone()), &options).map(drop)
            })
        }
        Operator::Linear => {
            let gate = draw.some_gates(scalars);
            advance!(matrix(), (_, next) => next, linear_attention_step(q, k, v, gate; None))
        }
        Operator::NormalisedLinear => {
            let gate = draw.some_gates(scalars);
            let mut state = Some((matrix(), draw.share([sessions, heads, key])));
            Box::new(move || {
                if let Some((s, z)) = state.take() {
                    let (q, k, v) = (q.clone(), k.clone(), v.clone());
                    let (_, s, z) = normalised_linear_attention_step(q, k, v, gate.clone(), s, z)?;
                    state = Some((s, z));
                }
                Ok(())
            })
        }
        Operator::Delta => {
            let (beta, gate) = (draw.share(scalars), draw.some_gates(scalars));
            advance!(matrix(), (_, next) => next, delta_rule_step(q, k, v, beta, gate; None))
        }
        Operator::Gla => {
            let gate = draw.gates([sessions, heads, key]);
            advance!(matrix(), (_, next) => next, gated_linear_attention_step(q, k, v, gate; None))
        }
        Operator::Kda => {
            let (beta, gate) = (draw.share(scalars), draw.gates([sessions, heads, key]));
            advance!(matrix(), (_, next) => next, kimi_delta_attention_step(q, k, v, beta, gate; None))
        }
        Operator::Dplr => {
            let (w, a, b) = (draw.gates([sessions, heads, key]), keys(), keys().mul_scalar(0.5));
            advance!(matrix(), (_, next) => next, dplr_step(q, w, k, v, a, b; None))
        }
        Operator::Comba => {
            let (beta, gate) = (draw.share(scalars), draw.gates(scalars));
            let (b, d) = (draw.share([heads]), draw.share([heads]));
            advance!(matrix(), (_, next) => next, comba_step(q, k, v, beta, gate, b, d; None))
        }
        Operator::DeltaProduct => {
            let k = draw.unit([sessions, STEPS, heads, key]);
            let v = draw.normal([sessions, STEPS, heads, value]);
            let (beta, gate) = (draw.share([sessions, STEPS, heads]), draw.some_gates(scalars));
            advance!(matrix(), (_, next) => next, delta_product_step(q, k, v, beta, gate; None))
        }
        Operator::Titans => {
            let (theta, eta) = (draw.share(scalars), draw.share(scalars));
            let alpha = draw.forgotten(scalars);
            let state = (matrix(), matrix());
            advance!(state, (_, s, p) => (s, p), titans_memory_step(q, k, v, theta, eta, alpha; None))
        }
        Operator::TttLinear => {
            let v = draw.normal([sessions, heads, key]);
            let eta = draw.share(scalars);
            let (weight, bias) = (draw.share([heads, key]), draw.normal([heads, key]));
            let state = TttState::zeros(sessions, heads, key, (device, v.dtype()));
            let options = TttOptions::default();
            advance!(state, (_, next) => next, ttt_linear_step(q, k, v, eta, weight, bias; &options))
        }
        Operator::DeepMemory => {
            let memory = DeepMemory::default();
            let token = DeepToken {
                q,
                k,
                v: draw.normal([sessions, heads, key]),
                rate: Some(DeepGate::Heads(draw.up_to(0.01, scalars))),
                momentum: Some(DeepGate::Heads(draw.share(scalars))),
                decay: Some(DeepGate::Heads(draw.up_to(0.001, scalars))),
                threshold: None,
            };
            let (weights, norm) = draw.deep(&memory, heads, key);
            let mut state = Some(DeepState::shared(&weights, sessions).with_momentum());
            Box::new(move || {
                if let Some(before) = state.take() {
                    state = Some(deep_memory_step(&memory, token.clone(), Some(&norm), before)?.1);
                }
                Ok(())
            })
        }
        Operator::ShortConvolution => {
            let x = draw.normal([sessions, 1, heads * key]);
            let taps = draw.normal([heads * key, TAPS]);
            let mut state = Some(draw.normal([sessions, TAPS - 1, heads * key]));
            Box::new(move || {
                let (x, taps) = (x.clone(), taps.clone());
                state = Some(short_convolution(x, taps, None, state.take(), true, None, Path::Auto)?.1);
                Ok(())
            })
        }
    }
}
