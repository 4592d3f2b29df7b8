//! What a session of a deep memory holds.

use burn::tensor::{Int, Tensor, TensorData};

use crate::OpError;

use super::DeepMemory;
use super::config::wrong;

/// The state of a deep memory, one row per session or document.
///
/// Gradients are taken at `start`, the weights at the chunk's start, while `current` holds what the chunk's tokens
/// made of them so far: the same for every way to cut a document. After a chunk's last token both are equal.
#[derive(Debug, Clone)]
pub struct DeepState {
    /// Weights at the start of the chunk, `[N,H,in,out]` for each layer.
    pub start: Vec<Tensor<4>>,
    /// Weights after the last token read.
    pub current: Vec<Tensor<4>>,
    /// Momentum; where the reading token's rate counts, minus the gradients gathered in the chunk. Absent when
    /// there is none.
    pub momentum: Option<Vec<Tensor<4>>>,
    /// The last `window - 1` tokens, `[N,H,window-1,K+V+2]`: key, value, rate and threshold side by side, with a rate
    /// of zero where there was none. Absent without a window.
    pub recent: Option<Tensor<4>>,
    /// Tokens that each row's document has had.
    pub positions: Vec<usize>,
}

impl DeepState {
    /// The state before the first token: weights `[N,H,in,out]` for each layer, no momentum.
    pub fn new(weights: Vec<Tensor<4>>) -> Self {
        let rows = weights.first().map_or(0, |w| w.dims()[0]);
        Self {
            start: weights.clone(),
            current: weights,
            momentum: None,
            recent: None,
            positions: vec![0; rows],
        }
    }

    /// [`new`](Self::new) for `rows` rows that all start from the weights `[H,in,out]`.
    pub fn shared(weights: &[Tensor<3>], rows: usize) -> Self {
        let spread = |w: &Tensor<3>| {
            let [heads, from, to] = w.dims();
            w.clone().unsqueeze_dim::<4>(0).expand([rows, heads, from, to])
        };
        Self::new(weights.iter().map(spread).collect())
    }

    /// The same with a momentum of zero where there is none.
    pub fn with_momentum(mut self) -> Self {
        let zeros = |w: &Tensor<4>| Tensor::zeros(w.dims(), (&w.device(), w.dtype()));
        self.momentum.get_or_insert_with(|| self.current.iter().map(zeros).collect());
        self
    }

    /// The same with a window of tokens that wrote nothing, where the memory has one and the state has none.
    pub(super) fn with_window(mut self, memory: &DeepMemory, [heads, key, value]: [usize; 3]) -> Self {
        if let (2.., None, Some(like)) = (memory.window, &self.recent, self.current.first()) {
            let shape = [self.rows(), heads, memory.window - 1, DeepMemory::recent_columns(key, value)];
            self.recent = Some(Tensor::zeros(shape, (&like.device(), like.dtype())));
        }
        self
    }

    /// Rows of the state.
    pub fn rows(&self) -> usize {
        self.positions.len()
    }

    /// Every tensor, with a name that is stable: `start.0`, `current.0`, `momentum.0`, ..., `recent.0`.
    pub fn tensors(&self) -> Vec<(String, Tensor<4>)> {
        let momentum = self.momentum.as_deref().unwrap_or_default();
        let recent = self.recent.as_slice();
        let groups = [
            ("start", self.start.as_slice()),
            ("current", &self.current),
            ("momentum", momentum),
            ("recent", recent),
        ];
        let named = |(name, tensors): (&'static str, &[Tensor<4>])| {
            tensors
                .iter()
                .cloned()
                .enumerate()
                .map(move |(i, t)| (format!("{name}.{i}"), t))
                .collect::<Vec<_>>()
        };
        groups.into_iter().flat_map(named).collect()
    }

    /// The state with `change` applied to each tensor; positions stay.
    pub fn map(self, mut change: impl FnMut(Tensor<4>) -> Tensor<4>) -> Self {
        let mut each = |tensors: Vec<Tensor<4>>| tensors.into_iter().map(&mut change).collect::<Vec<_>>();
        Self {
            start: each(self.start),
            current: each(self.current),
            momentum: self.momentum.map(&mut each),
            recent: self.recent.map(change),
            positions: self.positions,
        }
    }

    /// Bytes held by the tensors and the positions.
    pub fn bytes(&self) -> usize {
        let tensors = self.tensors();
        let held = tensors.iter().map(|(_, t)| t.dims().iter().product::<usize>() * t.dtype().size());
        held.sum::<usize>() + size_of_val(self.positions.as_slice())
    }

    /// The given rows, in the given order; a row may come more than once.
    ///
    /// # Errors
    /// [`OpError::Value`] for a row that the state does not have.
    pub fn select(&self, rows: &[usize]) -> Result<Self, OpError> {
        let count = self.rows();
        if let Some(row) = rows.iter().find(|&&row| row >= count) {
            return Err(wrong("rows", row, format!("less than the {count} rows of the state")));
        }
        Ok(self.pick(rows))
    }

    /// [`select`](Self::select) of rows that exist.
    pub(super) fn pick(&self, rows: &[usize]) -> Self {
        if rows.iter().copied().eq(0..self.rows()) {
            return self.clone();
        }
        let positions = rows.iter().map(|&row| self.positions[row]).collect();
        let picked = self.clone().map(|t| {
            let index = indices(rows, &t);
            t.select(0, index)
        });
        Self { positions, ..picked }
    }

    /// Rows of several states, one after the other.
    pub(super) fn concatenated(states: Vec<Self>) -> Self {
        let stack = |layers: Vec<Vec<Tensor<4>>>| -> Vec<Tensor<4>> {
            let depth = layers.first().map_or(0, Vec::len);
            let layer = |i: usize| Tensor::cat(layers.iter().map(|l| l[i].clone()).collect(), 0);
            (0..depth).map(layer).collect()
        };
        let recent: Option<Vec<_>> = states.iter().map(|s| s.recent.clone()).collect();
        let momentum: Option<Vec<_>> = states.iter().map(|s| s.momentum.clone()).collect();
        Self {
            start: stack(states.iter().map(|s| s.start.clone()).collect()),
            current: stack(states.iter().map(|s| s.current.clone()).collect()),
            momentum: momentum.map(stack),
            recent: recent.map(|recent| Tensor::cat(recent, 0)),
            positions: states.into_iter().flat_map(|s| s.positions).collect(),
        }
    }

    /// Checks the layers' shapes for `rows` rows.
    pub(super) fn check(
        &self,
        memory: &DeepMemory,
        [rows, heads, key, value]: [usize; 4],
        mut tensor: impl FnMut(&Tensor<4>, [usize; 4]) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        if self.positions.len() != rows {
            return Err(wrong(
                "state.positions",
                format!("{} rows", self.positions.len()),
                format!("{rows}"),
            ));
        }
        if let Some(recent) = &self.recent {
            if memory.window == 1 {
                return Err(wrong("state.recent", "present", "nothing, since the memory has no window"));
            }
            tensor(recent, [rows, heads, memory.window - 1, DeepMemory::recent_columns(key, value)])?;
        }
        let shapes = memory.weight_shapes(key, value);
        let groups = [Some(&self.start), Some(&self.current), self.momentum.as_ref()];
        for tensors in groups.into_iter().flatten() {
            if tensors.len() != shapes.len() {
                let found = format!("{} layers", tensors.len());
                return Err(wrong("state", found, format!("{}, the memory's depth", shapes.len())));
            }
            for (weight, [from, to]) in tensors.iter().zip(&shapes) {
                tensor(weight, [rows, heads, *from, *to])?;
            }
        }
        Ok(())
    }
}

/// Row numbers on the device of `like`.
pub(super) fn indices<const D: usize>(rows: &[usize], like: &Tensor<D>) -> Tensor<1, Int> {
    let numbers: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    Tensor::from_data(TensorData::new(numbers, [rows.len()]), &like.device())
}
