//! The dual form: chunks one after the other, the tokens of a chunk together.

use burn::tensor::Tensor;

use super::factors::{Factors, Rows, Scalars, Tokenwise, cut, parts};
use super::gates::spans;
use super::network::{Gradients, Network};
use super::orthogonal;
use super::output_factors::OutputGates;
use super::pieces::blend;
use super::{DeepGate, DeepState, DeepTokens, InnerLoss, RateOf};

/// Weights of every row and head, `[M,in,out]` for each layer.
type Layers = Vec<Tensor<3>>;

/// What goes from chunk to chunk.
struct Running {
    start: Layers,
    current: Layers,
    momentum: Option<Layers>,
    /// The window's tokens, `[M,window-1,K+V+2]`.
    recent: Option<Tensor<3>>,
}

/// One chunk's share of the tokens, `[M,C,*]` each.
struct Chunk {
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    threshold: Option<Tensor<3>>,
    /// Where `factors` are without them or the gradients depend on them: rates `[M,C,1]`, or of each layer `[M,C,out]`.
    rates: Option<Vec<Tensor<3>>>,
    /// Factors for all layers, or of each.
    factors: Vec<Factors>,
}

/// Runs rows that are all as far into a chunk; returns the output `[N,T,H,V]` and the states after it.
pub(super) fn run(network: &Network, tokens: &DeepTokens, state: DeepState) -> (Tensor<4>, DeepState) {
    let chunk = network.memory.chunk;
    let [rows, time, heads, _] = tokens.q.dims();
    let phase = state.positions.first().map_or(0, |position| position % chunk);
    let first = if phase == 0 { 0 } else { time.min(chunk - phase) };
    let whole = (time - first) / chunk;
    let last = time - first - whole * chunk;

    let DeepState { start, current, momentum, recent, positions } = state;
    let flat = |layers: Vec<Tensor<4>>| layers.into_iter().map(flatten).collect::<Layers>();
    let mut running = Running {
        start: flat(start),
        current: flat(current),
        momentum: momentum.map(flat),
        recent: recent.map(flatten),
    };
    let mut outputs = Vec::new();
    for (from, count, length) in [(0, 1, first), (first, whole, chunk), (time - last, 1, last)] {
        if count * length > 0 {
            for part in chunks(network, tokens, from, count, length) {
                if from > 0 || phase == 0 {
                    running.enter(network);
                }
                outputs.push(running.read_and_write(network, part));
            }
        }
    }
    if (phase + time).is_multiple_of(chunk) {
        running.enter(network);
    }
    let [_, _, value] = outputs[0].dims();
    let o = Tensor::cat(outputs, 1).reshape([rows, heads, time, value]).swap_dims(1, 2);
    let unflat = |layers: Layers| {
        let unflat = |w: Tensor<3>| {
            let [_, from, to] = w.dims();
            w.reshape([rows, heads, from, to])
        };
        layers.into_iter().map(unflat).collect::<Vec<_>>()
    };
    let state = DeepState {
        start: unflat(running.start),
        current: unflat(running.current),
        momentum: running.momentum.map(unflat),
        recent: running.recent.map(|recent| {
            let [_, tokens, columns] = recent.dims();
            recent.reshape([rows, heads, tokens, columns])
        }),
        positions: positions.into_iter().map(|position| position + time).collect(),
    };
    (o, state)
}

fn flatten(weight: Tensor<4>) -> Tensor<3> {
    let [rows, heads, from, to] = weight.dims();
    weight.reshape([rows * heads, from, to])
}

impl Running {
    /// A chunk begins: gradients are taken here.
    fn enter(&mut self, network: &Network) {
        self.start = self.current.clone();
        if network.memory.rate == RateOf::Reading {
            self.momentum = Some(self.current.iter().map(Tensor::zeros_like).collect());
        }
    }

    /// One chunk, or the part of one that is there: its output `[M,C,V]`.
    fn read_and_write(&mut self, network: &Network, chunk: Chunk) -> Tensor<3> {
        let Chunk { q, mut k, mut v, mut threshold, mut rates, mut factors } = chunk;
        let [_, tokens, _] = q.dims();
        if let Some(recent) = self.recent.take() {
            let own = rates.and_then(|rates| rates.into_iter().next());
            let rate;
            (k, v, rate, threshold) = self.slide(network, recent, [k, v], own, threshold);
            factors = factors.into_iter().map(|factors| factors.weighed(&rate)).collect();
            rates = Some(vec![rate]);
        }
        let mut gradients = network.gradients(&self.start, k, v, threshold);
        if let Some(rates) = rates.filter(|_| network.memory.proximal) {
            gradients = gradients.proximal(&rates);
        }
        let base = match network.memory.rate {
            RateOf::Written => &self.current,
            RateOf::Reading => &self.start,
        };
        if let Some(tokenwise) = &factors[0].tokenwise {
            return self.write_orthogonal(network, q, gradients, tokenwise, factors[0].rows.keep.clone());
        }
        let Gradients { inputs, errors } = gradients;
        let of = |layer: usize| &factors[layer.min(factors.len() - 1)];
        let output = network.value(q, |layer, h| {
            let Rows { keep, carry, mix } = of(layer).reader();
            let scores = h.clone().matmul(inputs[layer].clone().swap_dims(1, 2));
            let carried = carry.clone().zip(self.momentum.as_ref());
            let carried = carried.map(|(carry, p)| (h.clone().matmul(p[layer].clone()), carry));
            let written = mix.apply(scores, &errors[layer]);
            blend(h.matmul(base[layer].clone()), keep.clone(), carried, network.fused) - written
        });

        let end = |x: &Tensor<3>| x.clone().narrow(1, tokens - 1, 1);
        let ends: Vec<_> = factors
            .iter()
            .map(|Factors { rows, .. }| {
                (rows.keep.as_ref().map(end), rows.carry.as_ref().map(end), rows.mix.end())
            })
            .collect();
        let write = |layer: usize, weights: &Tensor<3>| {
            let (h, d, weights) = (inputs[layer].clone(), errors[layer].clone(), weights.clone());
            match weights.dims() {
                [_, _, 1] => (h * weights).swap_dims(1, 2).matmul(d),
                _ => h.swap_dims(1, 2).matmul(d * weights),
            }
        };
        let advance = |(layer, base): (usize, &Tensor<3>)| {
            let (keep, carry, mix) = &ends[layer.min(ends.len() - 1)];
            let carried = carry.clone().zip(self.momentum.as_ref());
            let carried = carried.map(|(carry, p)| (p[layer].clone(), carry));
            blend(base.clone(), keep.clone(), carried, network.fused) - write(layer, mix)
        };
        let current: Layers = base.iter().enumerate().map(advance).collect();
        for (layer, p) in self.momentum.iter_mut().flatten().enumerate() {
            if let Factors { hold, gather: Some(gather), .. } = of(layer) {
                *p = blend(p.clone(), hold.clone(), None, network.fused) - write(layer, gather);
            }
        }
        self.current = current;
        output
    }

    /// The same where the momentum passes through Newton-Schulz steps, token by token.
    fn write_orthogonal(
        &mut self,
        network: &Network,
        q: Tensor<3>,
        Gradients { inputs, errors }: Gradients,
        factors: &Tokenwise,
        keep: Option<Tensor<3>>,
    ) -> Tensor<3> {
        let [rows, tokens, _] = q.dims();
        let mut all = Vec::new();
        for (layer, base) in self.current.iter().enumerate() {
            let momentum = self.momentum.as_ref().map(|p| &p[layer]);
            let (h, d) = (&inputs[layer], &errors[layer]);
            let (weights, last) = orthogonal::weights(network, factors, keep.clone(), base, momentum, h, d);
            if let Some(momentum) = &mut self.momentum {
                momentum[layer] = last;
            }
            all.push(weights);
        }
        let output = network.value(q, |layer, h| {
            let mut weights = all[layer].clone();
            if network.memory.read_before_write {
                let first = self.current[layer].clone().unsqueeze_dim::<4>(1);
                weights = match tokens {
                    1 => first,
                    _ => Tensor::cat(vec![first, weights.narrow(1, 0, tokens - 1)], 1),
                };
            }
            orthogonal::apply_each(h, weights)
        });
        let last = |weights: Tensor<4>| {
            let [_, _, from, to] = weights.dims();
            weights.narrow(1, tokens - 1, 1).reshape([rows, from, to])
        };
        self.current = all.into_iter().map(last).collect();
        output
    }

    /// Puts the window's tokens before the chunk's and keeps the last ones: keys, values, rates and thresholds.
    fn slide(
        &mut self,
        network: &Network,
        recent: Tensor<3>,
        [k, v]: [Tensor<3>; 2],
        rate: Option<Tensor<3>>,
        threshold: Option<Tensor<3>>,
    ) -> (Tensor<3>, Tensor<3>, Tensor<3>, Option<Tensor<3>>) {
        let ([rows, tokens, key], [.., value]) = (k.dims(), v.dims());
        let ones = || Tensor::ones([rows, tokens, 1], (&k.device(), k.dtype()));
        let number = |x: Option<Tensor<3>>| x.unwrap_or_else(ones);
        let has_threshold = network.memory.loss == InnerLoss::Huber;
        let new = Tensor::cat(vec![k.clone(), v, number(rate), number(threshold)], 2);
        let kept = recent.dims()[1];
        let all = Tensor::cat(vec![recent, new], 1);
        self.recent = Some(all.clone().narrow(1, tokens, kept));
        let columns = |from: usize, count: usize| all.clone().narrow(2, from, count);
        (
            columns(0, key),
            columns(key, value),
            columns(key + value, 1),
            has_threshold.then(|| columns(key + value + 1, 1)),
        )
    }
}

/// The tokens `from..from + count * length` as chunks.
fn chunks(network: &Network, tokens: &DeepTokens, from: usize, count: usize, length: usize) -> Vec<Chunk> {
    let [rows, _, heads, _] = tokens.q.dims();
    let m = rows * heads;
    let vectors = |x: &Tensor<4>| {
        let [_, _, _, size] = x.dims();
        let x = x.clone().narrow(1, from, count * length).reshape([rows, count, length, heads, size]);
        split(x.permute([1, 0, 3, 2, 4]).reshape([count, m, length, size]))
    };
    // [count * M, C]
    let scalars = |x: &Tensor<3>| {
        let x = x.clone().narrow(1, from, count * length).reshape([rows, count, length, heads]);
        x.permute([1, 0, 3, 2]).reshape([count * m, length])
    };
    // One for all layers, or one for each.
    let (mut all_rates, mut all_factors) = (Vec::new(), Vec::new());
    let mut add = |rate: Tensor<3>, mut factors: Factors| {
        factors.before = network.memory.read_before_write.then(|| factors.rows.before());
        if network.memory.proximal || network.memory.window > 1 {
            all_rates.push(cut(rate, count).into_iter());
        }
        all_factors.push(factors.cut(count).into_iter());
    };
    let options = (&tokens.q.device(), tokens.q.dtype());
    if tokens.has_output_gates() {
        let ([.., key], [.., value]) = (tokens.q.dims(), tokens.v.dims());
        for span in spans(network.memory, key, value) {
            let gate = |gate: &DeepGate| {
                let x = gate.layer(span).narrow(1, from, count * length);
                let x = x.reshape([rows, count, length, heads, span[1]]).permute([1, 0, 3, 2, 4]);
                x.reshape([count * m, length, span[1]])
            };
            let ones = || Tensor::ones([count * m, length, span[1]], options);
            let gates = OutputGates {
                rate: tokens.rate.as_ref().map_or_else(ones, gate),
                momentum: tokens.momentum.as_ref().map(gate),
                decay: tokens.decay.as_ref().map(gate),
            };
            add(gates.rate.clone(), gates.factors(network.fused));
        }
    } else {
        let gate = |gate: &Option<DeepGate>| gate.as_ref().and_then(DeepGate::heads).map(scalars);
        let rate = gate(&tokens.rate).unwrap_or_else(|| Tensor::ones([count * m, length], options));
        let column = rate.clone().unsqueeze_dim::<3>(2);
        let numbers = Scalars { rate, momentum: gate(&tokens.momentum), decay: gate(&tokens.decay) };
        add(column, Factors::new(numbers, network.memory));
    }
    let mut threshold = parts(tokens.threshold.as_ref().map(|x| scalars(x).unsqueeze_dim::<3>(2)), count);
    let qkv = vectors(&tokens.q).into_iter().zip(vectors(&tokens.k)).zip(vectors(&tokens.v));
    let chunk = |((q, k), v)| Chunk {
        q,
        k,
        v,
        threshold: threshold(),
        rates: (!all_rates.is_empty()).then(|| all_rates.iter_mut().filter_map(Iterator::next).collect()),
        factors: all_factors.iter_mut().filter_map(Iterator::next).collect(),
    };
    qkv.map(chunk).collect()
}

/// The parts of the first dimension. Halves of halves: the gradient of a part is as large as what it was cut from,
/// so cutting each from the whole would take time that grows with the square of their number.
pub(super) fn split<const D: usize, const E: usize>(x: Tensor<D>) -> Vec<Tensor<E>> {
    let count = x.dims()[0];
    if count == 1 {
        return vec![x.squeeze_dim(0)];
    }
    let half = count / 2;
    let mut parts = split(x.clone().narrow(0, 0, half));
    parts.extend(split(x.narrow(0, half, count - half)));
    parts
}
