//! What a rule carries from token to token, on tensors.

use burn::tensor::{Device, Tensor, TensorData};

use super::{Memory, NAME, Retention, Rule};
use crate::MemoryError;
use crate::state::rows;

/// The last `window - 1` pairs of the loss, oldest first; a rate of zero marks a token before the first.
#[derive(Debug, Clone)]
pub struct Past {
    /// Keys `[N, H, window - 1, K]`.
    pub k: Tensor<4>,
    /// Values `[N, H, window - 1, V]`.
    pub v: Tensor<4>,
    /// Rates `[N, H, window - 1, 1]`.
    pub rate: Tensor<4>,
}

/// The state of a rule for N sequences and H heads.
///
/// Weights are key first, `[N, H, rows, cols]`, one a layer of the memory ([`Rule::layer_shapes`]).
#[derive(Debug, Clone)]
pub struct RuleState {
    /// The memory in the space where its retention adds gradients: the weights, their logarithms for
    /// [`Retention::Kl`], the dual `A` for [`Retention::Lq`].
    pub memory: Vec<Tensor<4>>,
    /// The memory at the chunk's start; empty for chunks of one token.
    pub start: Vec<Tensor<4>>,
    /// The momentum; empty without one.
    pub momentum: Vec<Tensor<4>>,
    /// The inverse of the history's Hessian, `[N, H, K, K]` (of a vector memory its diagonal, `[N, H, K, 1]`), for the
    /// squared loss with [`Retention::Bregman`].
    pub history: Option<Tensor<4>>,
    /// The last tokens of the window; none for a window of one.
    pub past: Option<Past>,
    /// Tokens read by each row. Held on the host, not counted in bytes.
    pub positions: Vec<usize>,
}

impl RuleState {
    /// The state before the first token of memories that start at `memory [N, H, rows, cols]` (in the space of
    /// [`RuleState::memory`]); `value` value channels a head.
    ///
    /// # Errors
    /// [`MemoryError::Input`] for weights that do not fit the rule.
    pub fn new(rule: &Rule, memory: Vec<Tensor<4>>, value: usize) -> Result<Self, MemoryError> {
        let Some([batch, heads, key, _]) = memory.first().map(Tensor::dims) else {
            return Err(MemoryError::Input {
                layer: NAME,
                found: vec![0],
                expected: "one weight a layer".into(),
            });
        };
        let expected = rule.layer_shapes(key, value);
        let found: Vec<[usize; 4]> = memory.iter().map(Tensor::dims).collect();
        if found != expected.iter().map(|[rows, cols]| [batch, heads, *rows, *cols]).collect::<Vec<_>>() {
            let found = found.into_iter().flatten().collect();
            let expected = format!("start weights of batch, heads and {expected:?}");
            return Err(MemoryError::Input { layer: NAME, found, expected });
        }
        let (device, dtype) = (memory[0].device(), memory[0].dtype());
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (&device, dtype));
        let history = rule.has_history().then(|| match rule.memory {
            Memory::Vector => zeros([batch, heads, key, 1]) + 1.0,
            _ => {
                let eye = Tensor::<2>::eye(key, &device).cast(dtype).reshape([1, 1, key, key]);
                eye.expand([batch, heads, key, key])
            }
        });
        let past = (rule.window > 1).then(|| Past {
            k: zeros([batch, heads, rule.window - 1, key]),
            v: zeros([batch, heads, rule.window - 1, value]),
            rate: zeros([batch, heads, rule.window - 1, 1]),
        });
        Ok(Self {
            start: if rule.chunk > 1 { memory.clone() } else { Vec::new() },
            momentum: if rule.has_momentum() {
                memory.iter().map(Tensor::zeros_like).collect()
            } else {
                Vec::new()
            },
            memory,
            history,
            past,
            positions: vec![0; batch],
        })
    }

    /// The state before the first token of memories that start empty: zero, or for [`Retention::Kl`] rows that
    /// weigh every key alike.
    ///
    /// # Errors
    /// [`MemoryError::Setting`] for a rule that cannot start at zero ([`Rule::needs_start`]).
    pub fn zero(
        rule: &Rule,
        [batch, heads, key, value]: [usize; 4],
        device: &Device,
    ) -> Result<Self, MemoryError> {
        if rule.needs_start() {
            let expected = "given: an MLP at zero has no gradient and an l_q memory at zero no direction";
            return Err(crate::context::setting_error(NAME, "the start of the memory", "absent", expected));
        }
        Self::new(rule, zero_memory(rule, [batch, heads, key, value], device), value)
    }

    /// Zeros in the place of every tensor of a state.
    pub(crate) fn zeros(rule: &Rule, [batch, heads, key, value]: [usize; 4], device: &Device) -> Self {
        let zeros = |rows: usize, cols: usize| Tensor::<4>::zeros([batch, heads, rows, cols], device);
        let weights =
            || rule.layer_shapes(key, value).into_iter().map(|[rows, cols]| zeros(rows, cols)).collect();
        let past = rule.window - 1;
        Self {
            memory: weights(),
            start: if rule.chunk > 1 { weights() } else { Vec::new() },
            momentum: if rule.has_momentum() { weights() } else { Vec::new() },
            history: rule
                .has_history()
                .then(|| zeros(key, if rule.memory == Memory::Vector { 1 } else { key })),
            past: (past > 0).then(|| Past {
                k: zeros(past, key),
                v: zeros(past, value),
                rate: zeros(past, 1),
            }),
            positions: vec![0; batch],
        }
    }

    /// Every tensor with its name.
    fn tensors(&self) -> Vec<(String, &Tensor<4>)> {
        let list = |name: &'static str, tensors| named(name, tensors);
        let mut all = list("memory", &self.memory);
        all.extend(list("start", &self.start));
        all.extend(list("momentum", &self.momentum));
        all.extend(self.history.iter().map(|history| ("history".to_owned(), history)));
        if let Some(past) = &self.past {
            let parts = [("past.k", &past.k), ("past.v", &past.v), ("past.rate", &past.rate)];
            all.extend(parts.map(|(name, tensor)| (name.to_owned(), tensor)));
        }
        all
    }

    /// The same state with `f` applied to every tensor.
    pub(crate) fn map(self, mut f: impl FnMut(Tensor<4>) -> Tensor<4>) -> Self {
        Self {
            memory: self.memory.into_iter().map(&mut f).collect(),
            start: self.start.into_iter().map(&mut f).collect(),
            momentum: self.momentum.into_iter().map(&mut f).collect(),
            history: self.history.map(&mut f),
            past: self.past.map(|past| Past { k: f(past.k), v: f(past.v), rate: f(past.rate) }),
            positions: self.positions,
        }
    }

    /// The same state with `f(tensor, tensor of other)` for every tensor; `other` is of the same rule.
    pub(crate) fn zip(self, other: &Self, f: impl Fn(Tensor<4>, Tensor<4>) -> Tensor<4>) -> Self {
        let others: Vec<Tensor<4>> = other.tensors().into_iter().map(|(_, tensor)| tensor.clone()).collect();
        let mut others = others.into_iter();
        self.map(|tensor| match others.next() {
            Some(other) => f(tensor, other),
            None => tensor,
        })
    }

    /// The rows of several states one after another; none for no state.
    pub fn cat(states: Vec<Self>) -> Option<Self> {
        let positions = states.iter().flat_map(|state| state.positions.iter().copied()).collect();
        let first = states.first()?.clone();
        let columns: Vec<Vec<Tensor<4>>> = states
            .iter()
            .map(|state| state.tensors().into_iter().map(|(_, t)| t.clone()).collect())
            .collect();
        let mut index = 0;
        let joined = first.map(|_| {
            index += 1;
            Tensor::cat(columns.iter().map(|column| column[index - 1].clone()).collect(), 0)
        });
        Some(Self { positions, ..joined })
    }

    /// One row.
    pub(super) fn row(&self, row: usize) -> Self {
        let positions = vec![self.positions[row]];
        Self { positions, ..self.clone().map(|tensor| tensor.narrow(0, row, 1)) }
    }
}

fn named<'a>(name: &str, tensors: &'a [Tensor<4>]) -> Vec<(String, &'a Tensor<4>)> {
    let only = tensors.len() == 1;
    let name = |i: usize| if only { name.to_owned() } else { format!("{name}.{i}") };
    tensors.iter().enumerate().map(|(i, tensor)| (name(i), tensor)).collect()
}

/// The empty memory, in the space of [`RuleState::memory`].
pub(crate) fn zero_memory(
    rule: &Rule,
    [batch, heads, key, value]: [usize; 4],
    device: &Device,
) -> Vec<Tensor<4>> {
    let layer = |[rows, cols]: [usize; 2]| {
        let zeros = Tensor::<4>::zeros([batch, heads, rows, cols], device);
        if rule.retention == Retention::Kl { zeros - (rows as f64).ln() } else { zeros }
    };
    rule.layer_shapes(key, value).into_iter().map(layer).collect()
}

impl RuleState {
    /// Sequences held.
    pub fn batch(&self) -> usize {
        self.positions.len()
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.tensors().into_iter().map(|(_, tensor)| rows::bytes(tensor)).sum()
    }

    /// The given rows in the given order.
    ///
    /// # Errors
    /// [`MemoryError::Row`] for a row that does not exist.
    pub fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        let positions = selected.iter().map(|row| self.positions[*row]).collect();
        let chosen = self.clone().map(|tensor| rows::gather(&tensor, 0, selected.iter().copied()));
        Ok(Self { positions, ..chosen })
    }

    /// The same state with zeros in all tensors of the given rows.
    pub(crate) fn zero_rows(self, zeroed: &[usize]) -> Result<Self, MemoryError> {
        rows::check(zeroed, self.batch())?;
        let mut state = self.map(|tensor| rows::zero(tensor, zeroed));
        zeroed.iter().for_each(|row| state.positions[*row] = 0);
        Ok(state)
    }

    /// Every tensor and counter with a stable name.
    pub fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named: Vec<(String, TensorData)> =
            self.tensors().into_iter().map(|(name, tensor)| (name, tensor.to_data())).collect();
        named.push(("positions".to_owned(), rows::counters(&self.positions)));
        named
    }
}
