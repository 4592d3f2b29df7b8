//! Rows and packed documents: those that are equally long and equally far into a chunk run together.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use crate::Offsets;

use super::chunked::{run, split};
use super::network::Network;
use super::{DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens};

impl DeepTokens {
    fn map(
        &self,
        vector: impl Fn(&Tensor<4>) -> Tensor<4>,
        scalar: impl Fn(&Tensor<3>) -> Tensor<3>,
    ) -> Self {
        let gate = |gate: &Option<DeepGate>| gate.as_ref().map(|gate| gate.map(&scalar, &vector));
        Self {
            q: vector(&self.q),
            k: vector(&self.k),
            v: vector(&self.v),
            rate: gate(&self.rate),
            momentum: gate(&self.momentum),
            decay: gate(&self.decay),
            threshold: self.threshold.as_ref().map(&scalar),
        }
    }

    /// The sequences `[1,L,H,*]` that are not empty: the documents of the one row, or the rows.
    fn sequences(&self, offsets: Option<&Offsets>) -> Vec<Self> {
        let (axis, mut bounds) = match offsets {
            Some(offsets) => (1, offsets.as_slice().to_vec()),
            None => (0, (0..=self.q.dims()[0]).collect()),
        };
        bounds.dedup();
        self.cut(axis, &bounds)
    }

    /// Halves of halves, for the reason given at [`split`].
    fn cut(&self, axis: usize, bounds: &[usize]) -> Vec<Self> {
        let parts = bounds.len() - 1;
        if parts == 1 {
            return vec![self.clone()];
        }
        let part = |range: &[usize]| {
            let (from, length) = (range[0] - bounds[0], range[range.len() - 1] - range[0]);
            self.map(|x| x.clone().narrow(axis, from, length), |x| x.clone().narrow(axis, from, length))
                .cut(axis, range)
        };
        let mut all = part(&bounds[..=parts / 2]);
        all.extend(part(&bounds[parts / 2..]));
        all
    }

    fn stacked(parts: &[&Self]) -> Self {
        let gates = |pick: fn(&Self) -> &Option<DeepGate>| {
            DeepGate::stacked(parts.iter().map(|part| pick(part)).collect())
        };
        let threshold: Option<Vec<_>> = parts.iter().map(|part| part.threshold.clone()).collect();
        let vectors = |pick: fn(&Self) -> &Tensor<4>| {
            Tensor::cat(parts.iter().map(|part| pick(part).clone()).collect(), 0)
        };
        Self {
            q: vectors(|x| &x.q),
            k: vectors(|x| &x.k),
            v: vectors(|x| &x.v),
            rate: gates(|x| &x.rate),
            momentum: gates(|x| &x.momentum),
            decay: gates(|x| &x.decay),
            threshold: threshold.map(|all| Tensor::cat(all, 0)),
        }
    }
}

impl DeepNorm {
    /// `[N*H,1,V]` each.
    pub(super) fn spread(&self, rows: usize) -> (Tensor<3>, Tensor<3>) {
        let spread = |x: &Tensor<2>| {
            let [heads, value] = x.dims();
            let x = x.clone().unsqueeze_dim::<3>(0).expand([rows, heads, value]);
            x.reshape([rows * heads, 1, value])
        };
        (spread(&self.weight), spread(&self.bias))
    }
}

/// Runs every sequence from its own state; the arguments are checked.
pub(super) fn run_all(
    memory: &DeepMemory,
    norm: Option<&DeepNorm>,
    fused: bool,
    tokens: DeepTokens,
    state: DeepState,
    offsets: Option<&Offsets>,
) -> (Tensor<4>, DeepState) {
    let [_, time, heads, value] = tokens.v.dims();
    let lengths: Vec<usize> = match offsets {
        Some(offsets) => offsets.ranges().map(|range| range.len()).collect(),
        None => vec![time; state.rows()],
    };
    let mut groups: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (row, length) in lengths.iter().enumerate() {
        groups.entry((*length, state.positions[row] % memory.chunk)).or_default().push(row);
    }
    let network = |rows: usize| Network { memory, norm: norm.map(|norm| norm.spread(rows)), fused };
    if groups.len() == 1 && tokens.q.dims()[0] == state.rows() {
        return run(&network(state.rows()), &tokens, state);
    }

    let mut parts = tokens.sequences(offsets).into_iter();
    let parts: Vec<_> = lengths.iter().map(|&length| if length > 0 { parts.next() } else { None }).collect();
    let (mut outputs, mut states, mut order) = (vec![None; lengths.len()], Vec::new(), Vec::new());
    for ((length, _), rows) in groups {
        let mut group = state.pick(&rows);
        if length > 0 {
            let stacked =
                DeepTokens::stacked(&rows.iter().filter_map(|&row| parts[row].as_ref()).collect::<Vec<_>>());
            let (o, after) = run(&network(rows.len()), &stacked, group);
            group = after;
            for (row, o) in rows.iter().zip(split::<4, 3>(o)) {
                outputs[*row] = Some(o.unsqueeze_dim::<4>(0));
            }
        }
        states.push(group);
        order.extend(rows);
    }
    let mut back = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, &row)| back[row] = at);
    let state = DeepState::concatenated(states).pick(&back);
    let outputs: Vec<_> = outputs.into_iter().flatten().collect();
    let o = match outputs.is_empty() {
        true => Tensor::zeros([1, time, heads, value], (&tokens.q.device(), tokens.q.dtype())),
        false => Tensor::cat(outputs, if offsets.is_some() { 1 } else { 0 }),
    };
    (o, state)
}
