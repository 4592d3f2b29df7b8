//! The public functions token by token.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::Tensor;
use fastweight_ops::OpError;
use fastweight_ops::comba::comba_step;
use fastweight_ops::delta::delta_rule_step;
use fastweight_ops::dplr::dplr_step;
use fastweight_ops::gla::gated_linear_attention_step;
use fastweight_ops::kda::kimi_delta_attention_step;
use fastweight_ops::linear::linear_attention_step;
use fastweight_ops::momentum_delta::{MomentumToken, momentum_delta_rule_step};
use fastweight_ops::normalised_linear::normalised_linear_attention_step;
use fastweight_ops::softmax::{KvCache, SoftmaxOptions, softmax_attention};
use fastweight_ops::titans::{titans_memory_channelwise_step, titans_memory_step};

use super::super::{Operator, Problem, STATES};
use super::{Tape, delta_product, ttt};

/// What one sequence, or all rows of a batch, hold between two tokens.
#[derive(Default)]
struct Held {
    matrices: BTreeMap<&'static str, Tensor<4>>,
    z: Option<Tensor<3>>,
    cache: Option<KvCache>,
}

impl Held {
    fn take(&mut self, name: &str) -> Tensor<4> {
        self.matrices.remove(name).expect("a state")
    }
}

/// What all tokens bring: vectors `[B,T,H,*]` and numbers `[B,T,H]`.
struct Tokens {
    vectors: BTreeMap<String, Tensor<4>>,
    numbers: BTreeMap<String, Tensor<3>>,
}

impl Tokens {
    fn new(tape: &mut Tape, q: Tensor<4>) -> Self {
        let [batch, time, heads, _] = q.dims();
        let mut tokens = Self { vectors: [("q".to_owned(), q)].into(), numbers: BTreeMap::new() };
        let states = STATES.into_iter().chain(["k_cache", "v_cache", "q"]).collect::<Vec<_>>();
        for (name, array) in &tape.problem.inputs {
            match array.shape.len() {
                _ if states.contains(&name.as_str()) => {}
                4 => drop(tokens.vectors.insert(name.clone(), tape.needed(name))),
                3 => drop(tokens.numbers.insert(name.clone(), tape.needed(name))),
                // A gate per head is the same at every token.
                _ => {
                    let gate = tape.needed::<1>(name).reshape([1, 1, heads]).expand([batch, time, heads]);
                    tokens.numbers.insert(name.clone(), gate);
                }
            }
        }
        tokens
    }

    fn at(&self, t: usize) -> Token<'_> {
        Token { tokens: self, t }
    }
}

/// One token of every row.
struct Token<'a> {
    tokens: &'a Tokens,
    t: usize,
}

impl Token<'_> {
    fn sequence(&self, name: &str) -> Tensor<4> {
        self.tokens.vectors[name].clone().narrow(1, self.t, 1)
    }

    fn vector(&self, name: &str) -> Tensor<3> {
        self.sequence(name).squeeze_dim(1)
    }

    fn number(&self, name: &str) -> Option<Tensor<2>> {
        self.tokens.numbers.get(name).map(|x| x.clone().narrow(1, self.t, 1).squeeze_dim(1))
    }

    fn needed(&self, name: &str) -> Tensor<2> {
        self.number(name).unwrap_or_else(|| panic!("the problem has no {name}"))
    }
}

/// Rows and tokens.
type Part = (Range<usize>, Range<usize>);

/// All rows at once, or one document after the other.
pub(super) fn runs(problem: &Problem) -> Result<Vec<Part>, OpError> {
    Ok(match problem.offsets()? {
        None => vec![(0..problem.shape("q")[0], 0..problem.time())],
        Some(offsets) => offsets.ranges().enumerate().map(|(n, tokens)| (n..n + 1, tokens)).collect(),
    })
}

pub(super) fn run(tape: &mut Tape) -> Result<(), OpError> {
    let problem = tape.problem;
    match problem.operator {
        Operator::DeltaProduct => return delta_product::steps(tape),
        Operator::TttLinear => return ttt::steps(tape),
        _ => {}
    }
    let (q, scale) = tape.query();
    let tokens = Tokens::new(tape, q);
    let mut matrices = BTreeMap::new();
    for name in ["S", "M"] {
        matrices.extend(tape.input::<4>(name).map(|state| (name, state)));
    }
    let z = tape.input::<3>("z");
    let cache = tape.input::<4>("k_cache").zip(tape.input::<4>("v_cache"));
    let (mut outputs, mut normalisers) = (Vec::new(), Vec::new());
    let mut states: BTreeMap<&str, Vec<Tensor<4>>> = BTreeMap::new();
    for (rows, range) in runs(problem)? {
        let of4 = |x: &Tensor<4>| x.clone().narrow(0, rows.start, rows.len());
        let mut held = Held {
            matrices: matrices.iter().map(|(&name, state)| (name, of4(state))).collect(),
            z: z.as_ref().map(|z| z.clone().narrow(0, rows.start, rows.len())),
            cache: cache.as_ref().map(|(k, v)| KvCache { k: of4(k), v: of4(v), lengths: None }),
        };
        for t in range {
            let o = match problem.operator {
                Operator::Softmax => attend(&mut held, &tokens.at(t), scale, problem.window)?,
                operator => step(operator, &mut held, &tokens.at(t), scale)?,
            };
            outputs.push(o.unsqueeze_dim::<4>(1));
        }
        for (name, state) in held.matrices {
            states.entry(name).or_default().push(state);
        }
        normalisers.extend(held.z);
    }
    tape.output("o", Tensor::cat(outputs, 1));
    for (name, states) in states {
        tape.output(name, Tensor::cat(states, 0));
    }
    if !normalisers.is_empty() {
        tape.output("z", Tensor::cat(normalisers, 0));
    }
    Ok(())
}

fn attend(
    held: &mut Held,
    token: &Token,
    scale: Option<f32>,
    window: Option<usize>,
) -> Result<Tensor<3>, OpError> {
    let options = SoftmaxOptions { scale, window, ..Default::default() };
    let [q, k, v] = ["q", "k", "v"].map(|name| token.sequence(name));
    let o = softmax_attention(q, k.clone(), v.clone(), held.cache.clone(), &options)?;
    held.cache = Some(match held.cache.take() {
        Some(cache) => {
            let [k, v] = [[cache.k, k], [cache.v, v]].map(|pair| Tensor::cat(pair.into(), 1));
            KvCache { k, v, lengths: None }
        }
        None => KvCache { k, v, lengths: None },
    });
    Ok(o.squeeze_dim(1))
}

fn step(
    operator: Operator,
    held: &mut Held,
    token: &Token,
    scale: Option<f32>,
) -> Result<Tensor<3>, OpError> {
    let [q, k, v] = ["q", "k", "v"].map(|name| token.vector(name));
    let s = held.take("S");
    let (o, s) = match operator {
        Operator::Softmax => unreachable!("it has a cache instead of a state"),
        Operator::DeltaProduct | Operator::TttLinear => unreachable!("it has a loop of its own"),
        Operator::Comba => {
            let [b, d] =
                ["b_head", "d_head"].map(|name| token.needed(name).narrow(0, 0, 1).squeeze_dim::<1>(0));
            comba_step(q, k, v, token.needed("beta"), token.needed("g"), b, d, s, scale)?
        }
        Operator::Linear | Operator::ScalarGatedLinear => {
            linear_attention_step(q, k, v, token.number("g"), s, scale)?
        }
        Operator::NormalisedLinear => {
            let z = held.z.take().expect("a normaliser");
            let (o, s, z) = normalised_linear_attention_step(q, k, v, token.number("g"), s, z)?;
            held.z = Some(z);
            (o, s)
        }
        Operator::Delta | Operator::GatedDelta => {
            delta_rule_step(q, k, v, token.needed("beta"), token.number("g"), s, scale)?
        }
        Operator::Gla => gated_linear_attention_step(q, k, v, token.vector("g"), s, scale)?,
        Operator::Kda => {
            kimi_delta_attention_step(q, k, v, token.needed("beta"), token.vector("g"), s, scale)?
        }
        Operator::Dplr => {
            let [w, a, b] = ["w", "a", "b"].map(|name| token.vector(name));
            dplr_step(q, w, k, v, a, b, s, scale)?
        }
        Operator::MomentumDelta => {
            let [log_alpha, log_mu, beta, eta] =
                ["log_alpha", "log_mu", "beta", "eta"].map(|name| token.needed(name));
            let token = MomentumToken { q, k, p: token.vector("p"), v, log_alpha, log_mu, beta, eta };
            let (o, s, m) = momentum_delta_rule_step(token, (s, held.take("M")), scale)?;
            held.matrices.insert("M", m);
            (o, s)
        }
        Operator::Titans => {
            let [theta, eta, alpha] = ["theta", "eta", "alpha"].map(|name| token.needed(name));
            let memory = (held.take("M"), s);
            let (o, m, s) = titans_memory_step(q, k, v, theta, eta, alpha, memory, scale)?;
            held.matrices.insert("M", m);
            (o, s)
        }
        Operator::TitansChannels => {
            let [theta, eta, alpha] = ["theta", "eta", "alpha"].map(|name| token.vector(name));
            let memory = (held.take("M"), s);
            let (o, m, s) = titans_memory_channelwise_step(q, k, v, theta, eta, alpha, memory, scale)?;
            held.matrices.insert("M", m);
            (o, s)
        }
    };
    held.matrices.insert("S", s);
    Ok(o)
}
