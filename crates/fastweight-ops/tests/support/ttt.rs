//! TTT-Linear on named arrays: weights `W`, `bias`, and of a mini-batch in progress `G`, `G_bias`, `position`.
//!
//! As in the fixtures the outputs `W` and `bias` are those after a flush; `G` and `G_bias` are from before it.

use fastweight_ops::OpError;
use fastweight_ops::kernel::Dims;
use fastweight_ops::ttt::reference;

use super::random::Random;
use super::{Array, Arrays, Outcome, Problem};

/// Names of what the fixtures or a mini-batch in progress hold for each sequence.
pub const STATES: [&str; 5] = ["W", "bias", "G", "G_bias", "position"];

/// Tokens of a mini-batch, unless the problem says otherwise.
const MINI_BATCH: usize = 16;

pub fn mini_batch(problem: &Problem) -> usize {
    problem.inputs.get("mini_batch").map_or(MINI_BATCH, |array| array.values[0] as usize)
}

/// Adds what TTT-Linear takes beyond queries, keys and values; two in three problems start inside mini-batches.
pub fn random(
    problem: &mut Problem,
    random: &mut Random,
    seed: u64,
    [sequences, heads, key, value]: [usize; 4],
) {
    let [batch, time, ..] = *problem.shape("q") else { unreachable!("q has four axes") };
    let mut input = |name: &str, array| drop(problem.inputs.insert(name.into(), array));
    let mut eta = random.normals(&[batch, time, heads, 1]);
    eta.values.iter_mut().for_each(|x| *x = f64::from((0.1 / (1.0 + (-*x).exp())) as f32));
    input("eta", eta);
    let mut ln_w = random.normals(&[heads, value]);
    ln_w.values.iter_mut().for_each(|x| *x = f64::from((1.0 + 0.2 * *x) as f32));
    input("ln_w", ln_w);
    input("ln_b", random.normals(&[heads, value]));
    input("W", random.normals(&[sequences, heads, key, value]));
    input("bias", random.normals(&[sequences, heads, 1, value]));
    if !seed.is_multiple_of(3) {
        let position = |n: u64| ((seed / 3 + 5 * n) % MINI_BATCH as u64) as f64;
        let position: Vec<f64> = (0..sequences as u64).map(position).collect();
        let mut gathered = random.normals(&[sequences, heads, key, value]);
        let mut gathered_bias = random.normals(&[sequences, heads, 1, value]);
        for (n, _) in position.iter().enumerate().filter(|(_, position)| **position == 0.0) {
            gathered.values[n * heads * key * value..][..heads * key * value].fill(0.0);
            gathered_bias.values[n * heads * value..][..heads * value].fill(0.0);
        }
        input("G", gathered);
        input("G_bias", gathered_bias);
        input("position", Array::new(&[sequences], position));
    }
    for name in ["W", "G"] {
        problem.up.insert(name.into(), random.normals(&[sequences, heads, key, value]));
        problem.up.insert(bias_of(name).into(), random.normals(&[sequences, heads, 1, value]));
    }
}

fn bias_of(name: &str) -> &'static str {
    if name == "W" { "bias" } else { "G_bias" }
}

pub fn positions(problem: &Problem) -> Vec<usize> {
    match problem.inputs.get("position") {
        Some(array) => array.values.iter().map(|&p| p as usize).collect(),
        None => vec![0; problem.sequences()],
    }
}

/// Rows and bias as one array `[N,H,K+1,V]`, zeros where there are none.
fn packed(arrays: &Arrays, name: &str, [sequences, heads, key, value]: [usize; 4]) -> Vec<f64> {
    let rows = arrays.get(name).cloned().unwrap_or_else(|| Array::zeros(&[sequences, heads, key, value]));
    let bias = arrays.get(bias_of(name)).cloned();
    let bias = bias.unwrap_or_else(|| Array::zeros(&[sequences, heads, 1, value]));
    Array::concatenate(&[rows, bias], 2).values
}

/// The float64 loop with the flush after it.
pub fn reference(problem: &Problem) -> Result<Outcome, OpError> {
    let [batch, time, heads, key] = problem.shape("q").try_into().unwrap();
    let (value, offsets) = (problem.value(), problem.offsets()?);
    let dims = Dims { batch, time, heads, key, value, scale: problem.scale as f32, offsets };
    let shape = [dims.states(), heads, key, value];
    let input = |name: &str| problem.inputs[name].values.as_slice();
    let (weights, gathered) = (packed(&problem.inputs, "W", shape), packed(&problem.inputs, "G", shape));
    let position = positions(problem);
    let initial = reference::State { weights: &weights, gathered: &gathered, position: &position };
    let inputs = reference::Inputs {
        dims: &dims,
        mini_batch: mini_batch(problem),
        scale: problem.scale,
        q: input("q"),
        k: input("k"),
        v: input("v"),
        eta: input("eta"),
        ln_w: input("ln_w"),
        ln_b: input("ln_b"),
        initial: Some(initial),
    };
    let out = reference::forward(&inputs);
    let (up_weights, mut up_gathered) = (packed(&problem.up, "W", shape), packed(&problem.up, "G", shape));
    let mut flushed = out.weights.clone();
    let mut rates = Vec::new();
    let size = (key + 1) * value;
    for (n, (row, tokens)) in dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let Some(last) = tokens.clone().last() else { continue };
            let at = (row * time + last) * heads + head;
            let rate = input("eta")[at];
            let mut product = 0.0;
            for i in (n * heads + head) * size..(n * heads + head + 1) * size {
                flushed[i] -= rate * out.gathered[i];
                product += up_weights[i] * out.gathered[i];
                up_gathered[i] -= rate * up_weights[i];
            }
            rates.push((at, product));
        }
    }
    let nothing = vec![0.0; out.o.len()];
    let up_o = problem.up.get("o").map_or(nothing.as_slice(), |up| &up.values);
    let mut grads = reference::backward(&inputs, up_o, &up_weights, &up_gathered);
    rates.into_iter().for_each(|(at, product)| grads.eta[at] -= product);

    let mut outcome = Outcome::default();
    outcome.outputs.insert("o".into(), Array::new(problem.shape("v"), out.o));
    let unpack = |to: &mut Arrays, name: &str, values: Vec<f64>| {
        let whole = Array::new(&[shape[0], heads, key + 1, value], values);
        to.insert(name.into(), whole.slice(2, 0..key));
        to.insert(bias_of(name).into(), whole.slice(2, key..key + 1));
    };
    unpack(&mut outcome.outputs, "W", flushed);
    unpack(&mut outcome.outputs, "G", out.gathered);
    unpack(&mut outcome.grads, "W", grads.weights);
    unpack(&mut outcome.grads, "G", grads.gathered);
    for (name, values) in [
        ("q", grads.q),
        ("k", grads.k),
        ("v", grads.v),
        ("eta", grads.eta),
        ("ln_w", grads.ln_w),
        ("ln_b", grads.ln_b),
    ] {
        outcome.grads.insert(name.into(), Array::new(problem.shape(name), values));
    }
    outcome.grads.retain(|name, _| problem.inputs.contains_key(name));
    Ok(outcome)
}
