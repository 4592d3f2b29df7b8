//! Operators over whole sequences.

use burn::tensor::{Device, Tensor};
use fastweight::ops::comba::comba;
use fastweight::ops::deep_memory::{DeepGate, DeepMemory, DeepState, DeepTokens, deep_memory};
use fastweight::ops::delta::delta_rule;
use fastweight::ops::delta_product::delta_product;
use fastweight::ops::dplr::dplr;
use fastweight::ops::gla::gated_linear_attention;
use fastweight::ops::kda::kimi_delta_attention;
use fastweight::ops::linear::{LinearGate, linear_attention};
use fastweight::ops::normalised_linear::normalised_linear_attention;
use fastweight::ops::short_conv::short_convolution;
use fastweight::ops::softmax::{SoftmaxOptions, softmax_attention};
use fastweight::ops::titans::titans_memory;
use fastweight::ops::ttt::{TttOptions, ttt_linear};
use fastweight::ops::{OpError, Path, SequenceOptions};

use super::{Draw, Gate, Operator, STEPS, Shape, TAPS};

/// A forward pass over random arguments; gives the output as one sum, so that a backward pass can start from it.
pub fn sequence(
    operator: Operator,
    gate: Gate,
    shape: &Shape,
    device: &Device,
) -> Box<dyn Fn() -> Result<Tensor<1>, OpError>> {
    let Shape { batch, time, heads, key, value, .. } = *shape;
    let draw = Draw { gate, device };
    let scalars = [batch, time, heads];
    let keys = || draw.unit([batch, time, heads, key]);
    let (q, k) = (keys(), keys());
    let v = draw.normal([batch, time, heads, value]);
    let options = SequenceOptions::default();
    macro_rules! call {
        ($function:ident($($argument:expr),*)) => {
            Box::new(move || Ok($function($($argument.clone()),*, None, &options)?.0.sum()))
        };
    }
    match operator {
        Operator::Softmax => Box::new(move || {
            let options = SoftmaxOptions::default();
            Ok(softmax_attention(q.clone(), k.clone(), v.clone(), None, &options)?.sum())
        }),
        Operator::Linear => {
            let gate = draw.some_gates(scalars).map_or(LinearGate::None, LinearGate::PerToken);
            call!(linear_attention(q, k, v, gate))
        }
        Operator::NormalisedLinear => {
            let gate = draw.some_gates(scalars);
            call!(normalised_linear_attention(q, k, v, gate))
        }
        Operator::Delta => {
            let (beta, gate) = (draw.share(scalars), draw.some_gates(scalars));
            call!(delta_rule(q, k, v, beta, gate))
        }
        Operator::Gla => {
            let gate = draw.gates([batch, time, heads, key]);
            call!(gated_linear_attention(q, k, v, gate))
        }
        Operator::Kda => {
            let (beta, gate) = (draw.share(scalars), draw.gates([batch, time, heads, key]));
            call!(kimi_delta_attention(q, k, v, beta, gate))
        }
        Operator::Dplr => {
            let (w, a, b) = (draw.gates([batch, time, heads, key]), keys(), keys());
            call!(dplr(q, w, k, v, a, b))
        }
        Operator::Comba => {
            let (beta, gate) = (draw.share(scalars), draw.gates(scalars));
            let (b, d) = (draw.share([heads]), draw.share([heads]));
            call!(comba(q, k, v, beta, gate, b, d))
        }
        Operator::DeltaProduct => {
            let k = draw.unit([batch, time * STEPS, heads, key]);
            let k = draw.leaf(k.reshape([batch, time, STEPS, heads, key]));
            let v = draw.normal([batch, time, STEPS, heads, value]);
            let (beta, gate) = (draw.share([batch, time, STEPS, heads]), draw.some_gates(scalars));
            call!(delta_product(q, k, v, beta, gate))
        }
        Operator::Titans => {
            let (theta, eta) = (draw.share(scalars), draw.share(scalars));
            let alpha = draw.forgotten(scalars);
            call!(titans_memory(q, k, v, theta, eta, alpha))
        }
        Operator::TttLinear => {
            let v = draw.normal([batch, time, heads, key]);
            let eta = draw.share(scalars);
            let (weight, bias) = (draw.share([heads, key]), draw.normal([heads, key]));
            Box::new(move || {
                let (weight, bias) = (weight.clone(), bias.clone());
                let [q, k, v] = [&q, &k, &v].map(Tensor::clone);
                Ok(ttt_linear(q, k, v, eta.clone(), weight, bias, None, &TttOptions::default())?.0.sum())
            })
        }
        Operator::DeepMemory => {
            let memory = DeepMemory::default();
            let tokens = DeepTokens {
                q,
                k,
                v: draw.normal([batch, time, heads, key]),
                rate: Some(DeepGate::Heads(draw.up_to(0.01, scalars))),
                momentum: Some(DeepGate::Heads(draw.share(scalars))),
                decay: Some(DeepGate::Heads(draw.up_to(0.001, scalars))),
                threshold: None,
            };
            let (weights, norm) = draw.deep(&memory, heads, key);
            Box::new(move || {
                let state = DeepState::shared(&weights, batch);
                Ok(deep_memory(&memory, tokens.clone(), Some(&norm), state, None, Path::Auto)?.0.sum())
            })
        }
        Operator::ShortConvolution => {
            let x = draw.normal([batch, time, heads * key]);
            let taps = draw.normal([heads * key, TAPS]);
            Box::new(move || {
                let (x, taps) = (x.clone(), taps.clone());
                Ok(short_convolution(x, taps, None, None, true, None, Path::Auto)?.0.sum())
            })
        }
    }
}
