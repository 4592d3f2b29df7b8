//! The public functions over whole sequences.

use burn::tensor::DType;
use fastweight_ops::comba::comba;
use fastweight_ops::delta::delta_rule;
use fastweight_ops::dplr::dplr;
use fastweight_ops::gla::gated_linear_attention;
use fastweight_ops::kda::kimi_delta_attention;
use fastweight_ops::linear::{LinearGate, linear_attention};
use fastweight_ops::momentum_delta::{MomentumTokens, momentum_delta_rule};
use fastweight_ops::normalised_linear::normalised_linear_attention;
use fastweight_ops::softmax::{KvCache, SoftmaxOptions, softmax_attention};
use fastweight_ops::titans::{titans_memory, titans_memory_channelwise};
use fastweight_ops::{OpError, Path, SequenceOptions};

use super::super::Operator;
use super::{Tape, delta_product, ttt};

pub(super) fn run(tape: &mut Tape, path: Path) -> Result<(), OpError> {
    let problem = tape.problem;
    let (q, scale) = tape.query();
    let offsets = problem.offsets()?;
    let options = SequenceOptions { scale, offsets: offsets.clone(), path };
    match problem.operator {
        Operator::DeltaProduct => return delta_product::sequence(tape, q, &options),
        Operator::TttLinear => return ttt::sequence(tape, q, options),
        _ => {}
    }
    let (k, v) = (tape.needed("k"), tape.needed("v"));
    match problem.operator {
        Operator::Softmax => {
            let cache = tape.input("k_cache").zip(tape.input("v_cache"));
            let cache = cache.map(|(k, v)| KvCache { k, v, lengths: None });
            let options = SoftmaxOptions { scale, window: problem.window, offsets, path };
            let o = softmax_attention(q, k, v, cache, &options)?;
            tape.output("o", o);
        }
        Operator::Linear | Operator::ScalarGatedLinear => {
            let gate = match problem.inputs.get("g").map(|gate| gate.shape.len()) {
                None => LinearGate::None,
                Some(1) => LinearGate::PerHead(tape.needed("g")),
                Some(_) => LinearGate::PerToken(tape.needed("g")),
            };
            let initial = tape.input("S");
            let (o, s) = linear_attention(q, k, v, gate, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
        }
        Operator::NormalisedLinear => {
            let initial = tape.input("S").zip(tape.input("z"));
            let (o, s, z) = normalised_linear_attention(q, k, v, tape.input("g"), initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
            tape.output("z", z);
        }
        Operator::Delta | Operator::GatedDelta => {
            let (beta, gate, initial) = (tape.needed("beta"), tape.input("g"), tape.input("S"));
            let (o, s) = delta_rule(q, k, v, beta, gate, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
        }
        Operator::Gla => {
            let (gate, initial) = (tape.needed("g"), tape.input("S"));
            let (o, s) = gated_linear_attention(q, k, v, gate, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
        }
        Operator::Kda => {
            let (beta, gate, initial) = (tape.needed("beta"), tape.needed("g"), tape.input("S"));
            let (o, s) = kimi_delta_attention(q, k, v, beta, gate, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
        }
        Operator::Dplr => {
            let [w, a, b] = ["w", "a", "b"].map(|name| tape.needed(name));
            let initial = tape.input("S");
            let (o, s) = dplr(q, w, k, v, a, b, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
        }
        Operator::MomentumDelta => {
            let p = tape.needed("p");
            let [log_alpha, log_mu, beta, eta] =
                ["log_alpha", "log_mu", "beta", "eta"].map(|name| tape.needed(name));
            let tokens = MomentumTokens { q, k, p, v, log_alpha, log_mu, beta, eta };
            let initial = tape.input("S").zip(tape.input("M"));
            let (o, s, m) = momentum_delta_rule(tokens, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
            tape.output("M", m);
        }
        Operator::DeltaProduct | Operator::TttLinear => {}
        Operator::Comba => {
            let (beta, gate) = (tape.needed("beta"), tape.needed("g"));
            let (b, mut d, initial) = (tape.needed("b_head"), tape.needed("d_head"), tape.input("S"));
            if tape.dtype == DType::F64 {
                // The query holds the scale already, what leaves it must too.
                d = d.mul_scalar(problem.scale);
            }
            let (o, s) = comba(q, k, v, beta, gate, b, d, initial, &options)?;
            tape.output("o", o);
            tape.output("S", s);
        }
        Operator::Titans => {
            let [theta, eta, alpha] = ["theta", "eta", "alpha"].map(|name| tape.needed(name));
            let initial = tape.input("M").zip(tape.input("S"));
            let (o, m, s) = titans_memory(q, k, v, theta, eta, alpha, initial, &options)?;
            tape.output("o", o);
            tape.output("M", m);
            tape.output("S", s);
        }
        Operator::TitansChannels => {
            let [theta, eta, alpha] = ["theta", "eta", "alpha"].map(|name| tape.needed(name));
            let initial = tape.input("M").zip(tape.input("S"));
            let (o, m, s) = titans_memory_channelwise(q, k, v, theta, eta, alpha, initial, &options)?;
            tape.output("o", o);
            tape.output("M", m);
            tape.output("S", s);
        }
    }
    Ok(())
}
