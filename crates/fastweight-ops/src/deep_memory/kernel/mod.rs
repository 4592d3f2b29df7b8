//! Fused CPU kernel of deep memories.
//!
//! A head of a sequence is one task: its weights, its momentum and all that a piece of tokens needs stay in the
//! second-level cache. Vectors of a piece's tokens lie with a token in each lane, so that a weight is read as it is
//! and as its own transpose, and sums over features need no shuffles. For the backward pass the weights are saved at
//! every fourth chunk; those between are made again, and a piece's forward pass with them.

mod backward;
mod factors;
mod forward;
mod head;
mod lanes;
mod loss;
mod norm;
mod plan;
mod products;
mod work;

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{DeepMemory, DeepNorm, DeepState, DeepTokens, InnerLoss, RateOf};
use crate::Offsets;
use crate::fused::{Forward, FusedOp, apply};
use crate::kernel::Dims;
use crate::kernel::simd::InstructionSet;
use crate::kernel::workspace::{SharedOut, with_workspace};
use backward::Gradients;
use forward::Targets;
use head::Head;
use plan::{Plan, Task, layers};
use work::{Needs, Work};

/// Whether the kernel knows the memory: all but a window and Newton-Schulz steps.
pub(super) fn supports(memory: &DeepMemory) -> bool {
    memory.window == 1 && !memory.newton_schulz
}

/// Tokens between two points whose weights a long sequence keeps for the backward pass, where the kernel runs.
pub(super) fn saved_every(memory: &DeepMemory) -> Option<usize> {
    supports(memory).then(|| plan::group_tokens(memory.chunk))
}

/// A deep memory on slices. Inputs `[q, k, v, current]`, then where they are there `[start, momentum]`, each
/// `[N,H,count]` with the layers one behind the other, the scalars one behind the other, the LayerNorm's weight and
/// bias `[2,H,V]`. Outputs `[o, weights [N,H,1 or 2,count]]` (current, start), then the momentum where there is one.
#[derive(Debug, Clone)]
pub(super) struct FusedDeep {
    pub memory: DeepMemory,
    /// Sizes and documents.
    pub dims: Dims,
    /// Tokens that each sequence has had.
    pub positions: Vec<usize>,
    /// Whether the weights at the chunk's start come and go beside the current ones.
    pub takes_start: bool,
    pub gives_start: bool,
    /// Whether there is a momentum.
    pub momentum: bool,
    /// Which of rate, momentum, decay and threshold there are.
    pub scalars: [bool; 4],
    pub norm: bool,
}

/// Inputs, contiguous.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub current: &'a [f32],
    pub start: Option<&'a [f32]>,
    pub momentum: Option<&'a [f32]>,
    pub rate: Option<&'a [f32]>,
    pub scalar_momentum: Option<&'a [f32]>,
    pub decay: Option<&'a [f32]>,
    pub threshold: Option<&'a [f32]>,
    pub norm: Option<&'a [f32]>,
}

impl FusedDeep {
    /// Numbers in the weights of a head.
    fn count(&self) -> usize {
        self.memory.weight_count(self.dims.key, self.dims.value)
    }

    fn reading(&self) -> bool {
        self.memory.rate == RateOf::Reading
    }

    /// Groups begin with a chunk, where a momentum of gathered gradients is zero.
    fn saves_momentum(&self) -> bool {
        self.momentum && !self.reading()
    }

    fn saved_count(&self) -> usize {
        self.count() * (1 + usize::from(self.saves_momentum()))
    }

    fn weight_groups(&self) -> usize {
        1 + usize::from(self.gives_start)
    }

    fn states(&self) -> usize {
        self.dims.states() * self.dims.heads
    }

    fn has_scalars(&self) -> bool {
        self.scalars.contains(&true)
    }

    fn inputs<'a>(&self, inputs: &[&'a [f32]]) -> Inputs<'a> {
        let mut rest = inputs[4..].iter().copied();
        let mut next = |there: bool| if there { rest.next() } else { None };
        let (start, momentum) = (next(self.takes_start), next(self.momentum));
        let scalars = next(self.has_scalars()).unwrap_or_default();
        let norm = next(self.norm);
        let size = self.dims.batch * self.dims.time * self.dims.heads;
        let mut parts = scalars.chunks_exact(size.max(1));
        let [rate, scalar_momentum, decay, threshold] =
            self.scalars.map(|there| if there { parts.next() } else { None });
        Inputs {
            q: inputs[0],
            k: inputs[1],
            v: inputs[2],
            current: inputs[3],
            start,
            momentum,
            rate,
            scalar_momentum,
            decay,
            threshold,
            norm,
        }
    }

    /// Runs `body` on every head with its scratch memory.
    fn run<R: Send>(
        &self,
        inputs: &Inputs<'_>,
        plan: &Plan,
        backward: bool,
        body: impl Fn(&mut Head<'_>, &Task) -> R + Sync + Send,
    ) -> Vec<R> {
        let set = InstructionSet::active();
        let needs = Needs {
            layers: layers(&self.memory, self.dims.key, self.dims.value),
            key: self.dims.key,
            value: self.dims.value,
            width: plan.tokens.next_multiple_of(set.lanes().max(8)),
            slots: if backward { plan.longest } else { 1 },
            momentum: self.momentum,
            proximal: self.memory.proximal,
            backward,
        };
        let size = Work::size(&needs);
        plan.run(|task| {
            with_workspace(size, |mut carver| {
                let work = Work::carve(&needs, &mut carver);
                body(&mut Head::new(self, inputs, task, set, work), task)
            })
        })
    }
}

impl FusedOp for FusedDeep {
    fn name(&self) -> &'static str {
        "deep_memory"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Dims { batch, time, heads, value, .. } = self.dims;
        let (states, count) = (self.dims.states(), self.count());
        let mut shapes =
            vec![vec![batch, time, heads, value], vec![states, heads, self.weight_groups(), count]];
        if self.momentum {
            shapes.push(vec![states, heads, count]);
        }
        shapes
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let inputs = self.inputs(inputs);
        let plan = Plan::new(&self.dims, &self.memory, &self.positions);
        let (mut o, numbers) = (vec![0.0; inputs.v.len()], self.states() * self.count());
        let mut weights = vec![0.0; numbers * self.weight_groups()];
        let mut momentum = vec![0.0; if self.momentum { numbers } else { 0 }];
        let mut saved = vec![0.0; if save { plan.saved * self.saved_count() } else { 0 }];
        let to = Targets {
            o: SharedOut::new(&mut o),
            weights: SharedOut::new(&mut weights),
            momentum: SharedOut::new(&mut momentum),
            saved: if save { SharedOut::new(&mut saved) } else { SharedOut::null() },
        };
        self.run(&inputs, &plan, false, |head, task| {
            // SAFETY: the targets have the sizes of the call, and each task is another head.
            unsafe { head.forward(&plan.cuts[task.cut], to) }
        });
        let mut outputs = vec![o, weights];
        if self.momentum {
            outputs.push(momentum);
        }
        Forward { outputs, saved: vec![saved] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let input = self.inputs(inputs);
        let plan = Plan::new(&self.dims, &self.memory, &self.positions);
        let mut results: Vec<Vec<f32>> = inputs.iter().map(|input| vec![0.0; input.len()]).collect();
        let mut targets: Vec<SharedOut> = results.iter_mut().map(|x| SharedOut::new(x)).collect();
        let mut rest = targets.split_off(4).into_iter();
        let mut next = |there: bool| if there { rest.next() } else { None }.unwrap_or_else(SharedOut::null);
        let to = Gradients {
            q: targets[0],
            k: targets[1],
            v: targets[2],
            current: targets[3],
            start: next(self.takes_start),
            momentum: next(self.momentum),
            scalars: next(self.has_scalars()),
            o: grads[0],
            after: grads[1],
            after_momentum: grads.get(2).copied().flatten(),
            saved: &saved[0],
        };
        let norms = self.run(&input, &plan, true, |head, task| {
            // SAFETY: the targets have the sizes of the call, and each task is another head.
            unsafe { head.backward(&plan.cuts[task.cut], &to) }
        });
        if let (true, Some(sum)) = (self.norm, results.last_mut()) {
            let value = self.dims.value;
            for (task, norm) in plan.tasks.iter().zip(&norms) {
                for (part, sum) in norm.iter().zip(sum.chunks_exact_mut(self.dims.heads * value)) {
                    let sum = &mut sum[task.head * value..(task.head + 1) * value];
                    crate::pointwise::add(sum, part);
                }
            }
        }
        results.into_iter().zip(needs).map(|(d, &needed)| needed.then_some(d)).collect()
    }
}

/// The layers one behind the other, `[N,H,count]`.
fn pack(layers: &[Tensor<4>]) -> Tensor<3> {
    let flat = |layer: &Tensor<4>| {
        let [rows, heads, from, to] = layer.dims();
        layer.clone().reshape([rows, heads, from * to])
    };
    match layers {
        [layer] => flat(layer),
        layers => Tensor::cat(layers.iter().map(flat).collect(), 2),
    }
}

/// The layers of `[N,H,count]`.
fn unpack(packed: Tensor<3>, shapes: &[[usize; 2]]) -> Vec<Tensor<4>> {
    let [rows, heads, _] = packed.dims();
    let mut offset = 0;
    let layer = |[from, to]: &[usize; 2]| {
        let layer = packed.clone().narrow(2, offset, from * to).reshape([rows, heads, *from, *to]);
        offset += from * to;
        layer
    };
    shapes.iter().map(layer).collect()
}

/// A deep memory over every sequence from its own state; the arguments are checked, [`supports`] is true, no gate has outputs, and
/// there is a token.
pub(super) fn run(
    memory: &DeepMemory,
    norm: Option<&DeepNorm>,
    tokens: DeepTokens,
    state: DeepState,
    offsets: Option<&Offsets>,
) -> (Tensor<4>, DeepState) {
    let [batch, time, heads, key] = tokens.q.dims();
    let [.., value] = tokens.v.dims();
    let dims = Dims { batch, time, heads, key, value, scale: 1.0, offsets: offsets.cloned() };
    let lengths: Vec<usize> = dims.sequences().into_iter().map(|(_, range)| range.len()).collect();
    let DeepTokens { q, k, v, rate, momentum, decay, threshold } = tokens;
    let threshold = threshold.filter(|_| memory.loss == InnerLoss::Huber);
    let [rate, momentum, decay] =
        [rate, momentum, decay].map(|gate| gate.and_then(|gate| gate.heads().cloned()));
    let scalars = [rate, momentum, decay, threshold];
    let ends: Vec<usize> = state.positions.iter().zip(&lengths).map(|(at, length)| at + length).collect();
    let within = |positions: &[usize]| positions.iter().any(|at| at % memory.chunk != 0);
    let op = FusedDeep {
        memory: memory.clone(),
        takes_start: within(&state.positions),
        gives_start: within(&ends),
        positions: state.positions.clone(),
        momentum: state.momentum.is_some(),
        scalars: scalars.each_ref().map(Option::is_some),
        norm: norm.is_some(),
        dims,
    };
    let mut inputs = [q, k, v].map(Tensor::into_dispatch).to_vec();
    inputs.push(pack(&state.current).into_dispatch());
    if op.takes_start {
        inputs.push(pack(&state.start).into_dispatch());
    }
    if let Some(momentum) = &state.momentum {
        inputs.push(pack(momentum).into_dispatch());
    }
    let scalars: Vec<_> = scalars.into_iter().flatten().collect();
    if !scalars.is_empty() {
        inputs.push(Tensor::stack::<4>(scalars, 0).into_dispatch());
    }
    if let Some(DeepNorm { weight, bias }) = norm {
        inputs.push(Tensor::stack::<3>(vec![weight.clone(), bias.clone()], 0).into_dispatch());
    }
    let (gives_start, moves) = (op.gives_start, op.momentum);
    let [o, weights, after] = apply(Arc::new(op), inputs);
    let shapes = memory.weight_shapes(key, value);
    let weights = Tensor::<4>::from_dispatch(weights);
    let group = |at: usize| unpack(weights.clone().narrow(2, at, 1).squeeze_dim(2), &shapes);
    let current = group(0);
    let state = DeepState {
        start: if gives_start { group(1) } else { current.clone() },
        current,
        momentum: moves.then(|| unpack(Tensor::from_dispatch(after), &shapes)),
        recent: None,
        positions: ends,
    };
    (Tensor::from_dispatch(o), state)
}
