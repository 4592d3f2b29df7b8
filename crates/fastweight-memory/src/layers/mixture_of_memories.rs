//! A mixture of memories: one that every token shares, and several of which a router gives each token a few.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Device, Tensor};
use fastweight_ops::deep_memory::{DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, deep_memory};
use fastweight_ops::{Offsets, Path};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, STATE_ELEMENT, step_as_sequence};
use crate::context::{MOST_WINDOW, setting_error, validate_conv, validate_rate};
use crate::init::placeholder;
use crate::projection::{Heads, Projection, Qkv, QkvSizes, check_sequence, linear, merge_heads};
use crate::state::rows;
use crate::{DeepMemoryState, LayerContext, MemoryError, Shared, State, StateSize};

const NAME: &str = MixtureOfMemoriesConfig::NAME;

/// Taken from the forgetting before its sigmoid, so that the memories start by forgetting little.
const FORGET_SHIFT: f64 = 4.0;

/// Most parallel memories.
const MOST_MEMORIES: usize = 256;

/// Configuration of [`MixtureOfMemories`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MixtureOfMemoriesConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
    /// Parallel memories, the shared one not counted.
    #[schemars(range(min = 1, max = MOST_MEMORIES))]
    pub memories: usize,
    /// Parallel memories that a token reads and writes.
    #[schemars(range(min = 1))]
    pub top_k: usize,
    /// Tokens between two points where inner gradients are taken; 1 is the recurrence as it is printed.
    #[schemars(range(min = 1, max = MOST_WINDOW))]
    pub chunk: usize,
    /// Largest inner learning rate, above 0.
    #[schemars(range(max = crate::context::MOST_RATE), extend("exclusiveMinimum" = 0))]
    pub eta_max: f32,
    /// Whether each reading has the token's key added to it.
    pub add_key: bool,
    /// Whether the readings of the chosen memories are added up as they are, without the router's weights.
    pub unweighted: bool,
}

impl Default for MixtureOfMemoriesConfig {
    fn default() -> Self {
        Self {
            conv_width: 4,
            memories: 4,
            top_k: 2,
            chunk: 16,
            eta_max: 1.0,
            add_key: false,
            unweighted: false,
        }
    }
}

/// A mixture of memories: a shared memory and the `top_k` of n parallel ones that a router chooses for each token.
///
/// `y = W_o (sigmoid(W_g x + b_g) * sum_i g_i(x) f_i(x))`, where `f_i(x) = LN_i(M_i^T q)` is a memory's reading after its
/// write, the shared memory has weight one, and the chosen ones the softmax of the router's scores among themselves (one choice
/// a token, for all heads). A memory that a token reads learns `LN_i(M_i^T k) = v` by gradient descent on half the squared
/// error, `M_i <- (1 - alpha) M_i - eta grad`, with `eta = eta_max sigmoid(W x)` and `alpha = sigmoid(W x - 4)` for each memory and head,
/// the gradient being taken at the chunk's start (see [`fastweight_ops::deep_memory`]). A memory that is not chosen neither
/// forgets nor writes.
///
/// All memories have the same unit queries and keys and the same values, each its own trained start and LayerNorm. Left open
/// by the formula and decided here: the maps of `eta` and `alpha`, short convolutions, and that ties go to the first memory. With
/// `top_k = 1`, or without weights, only the balance loss of [`MixtureOfMemories::load`] trains the router.
#[derive(Module, Debug)]
pub struct MixtureOfMemories {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Scores of the parallel memories.
    pub router: Linear,
    /// Inner learning rate before the sigmoid, for each memory, the shared one first, and head.
    pub eta: Linear,
    /// Forgetting before the sigmoid, in the same order.
    pub alpha: Linear,
    /// The memories before the first token, `[memories H, K, V]`, in the same order.
    pub start: Param<Tensor<3>>,
    /// Scale of the inner normalisations, `[memories H, V]`.
    pub ln_weight: Param<Tensor<2>>,
    /// Shift of the inner normalisations, `[memories H, V]`.
    pub ln_bias: Param<Tensor<2>>,
    /// Output gate, with a bias.
    pub gate: Linear,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: MixtureOfMemoriesConfig,
    #[module(skip)]
    ctx: LayerContext,
}

/// How the tokens of a sequence spread over the parallel memories of a [`MixtureOfMemories`].
#[derive(Debug, Clone)]
pub struct MemoryLoad {
    /// Share of the tokens that each memory is chosen for, `[n]`; all add up to `top_k`.
    pub share: Tensor<1>,
    /// Mean probability of each memory in the router's softmax over all, `[n]`.
    pub probability: Tensor<1>,
    /// `n / top_k sum_i share_i probability_i`, `[1]`: 1 where all memories are as busy, up to `n / top_k` where the same few take
    /// every token. Added to a training loss it keeps the router from favouring a few (Fedus et al. 2021, 2101.03961, eq. 4).
    pub balance: Tensor<1>,
}

impl MixtureOfMemoriesConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }

    /// Matrices of the layer: of every head, the shared memory and the parallel ones.
    fn matrices(&self, ctx: &LayerContext) -> usize {
        ctx.heads * (1 + self.memories)
    }

    /// Checks the number of memories alone.
    pub(crate) fn validate_memories(&self) -> Result<(), MemoryError> {
        match self.memories {
            1..=MOST_MEMORIES => Ok(()),
            memories => Err(setting_error(NAME, "memories", memories, format!("from 1 to {MOST_MEMORIES}"))),
        }
    }
}

impl LayerConfig for MixtureOfMemoriesConfig {
    const NAME: &'static str = "mixture_of_memories";
    type Layer = MixtureOfMemories;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        validate_conv(NAME, self.conv_width)?;
        self.validate_memories()?;
        if self.top_k == 0 || self.top_k > self.memories {
            let expected = format!("from 1 to memories = {}", self.memories);
            return Err(setting_error(NAME, "top_k", self.top_k, expected));
        }
        if self.chunk == 0 || self.chunk > MOST_WINDOW {
            let expected = format!("at least 1 (16 is usual) and at most {MOST_WINDOW}");
            return Err(setting_error(NAME, "chunk", self.chunk, expected));
        }
        validate_rate(NAME, "eta_max", self.eta_max, "1")?;
        if self.add_key && ctx.value_dim != ctx.head_dim {
            let expected = format!("head_dim = {}: keys are added to readings", ctx.head_dim);
            return Err(setting_error(NAME, "value_dim", ctx.value_dim, expected));
        }
        Ok(())
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<MixtureOfMemories, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(false, device);
        let matrices = self.matrices(ctx);
        let per_value = || placeholder([matrices, ctx.value_dim], device);
        let gate = linear(ctx.width, ctx.value_width(), device);
        Ok(MixtureOfMemories {
            q,
            k,
            v,
            router: linear(ctx.width, self.memories, device),
            eta: linear(ctx.width, matrices, device),
            alpha: linear(ctx.width, matrices, device),
            start: placeholder([matrices, ctx.head_dim, ctx.value_dim], device),
            ln_weight: per_value(),
            ln_bias: per_value(),
            gate: Linear { bias: Some(placeholder([ctx.value_width()], device)), ..gate },
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let matrices = self.matrices(ctx);
        let inner = matrices * (2 * ctx.width + ctx.value_dim * (ctx.head_dim + 2));
        let output = ctx.value_width() * (2 * ctx.width + 1);
        self.qkv(ctx).parameter_count() + ctx.width * self.memories + inner + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        let inner = 2 * self.matrices(ctx) * ctx.head_dim * ctx.value_dim;
        StateSize { fixed: (inner + self.qkv(ctx).conv_elements()) * STATE_ELEMENT, growing: 0 }
    }
}

impl Layer for MixtureOfMemories {
    type State = DeepMemoryState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<DeepMemoryState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, DeepMemoryState), MemoryError> {
        self.forward_shared(x, state, offsets, &mut Shared::default())
    }

    fn step(
        &self,
        x: Tensor<2>,
        state: DeepMemoryState,
    ) -> Result<(Tensor<2>, DeepMemoryState), MemoryError> {
        step_as_sequence(self, NAME, self.ctx.width, x, state)
    }

    fn forward_shared(
        &self,
        x: Tensor<3>,
        state: Option<DeepMemoryState>,
        offsets: Option<&Offsets>,
        shared: &mut Shared,
    ) -> Result<(Tensor<3>, DeepMemoryState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let sequences = offsets.map_or(x.dims()[0], Offsets::documents);
        let DeepMemoryState { change, conv } =
            state.unwrap_or_else(|| self.zero_state(sequences, &x.device()));
        let routes = self.route(x.clone());
        shared.loads.push(routes.load());

        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let Heads { q, k, v, conv } = qkv.unit(x.clone(), conv, offsets, self.ctx.heads, self.ctx.heads)?;
        let copies = |x: Tensor<4>| x.repeat_dim(2, 1 + self.config.memories);
        let k = copies(k);
        let chosen = self.to_heads(routes.chosen.clone());
        let rate = sigmoid(self.eta.forward(x.clone())) * self.config.eta_max * chosen.clone();
        let decay = sigmoid(self.alpha.forward(x.clone()) - FORGET_SHIFT) * chosen;
        let tokens = DeepTokens {
            q: copies(q),
            k: k.clone(),
            v: copies(v),
            rate: Some(DeepGate::Heads(rate)),
            momentum: None,
            decay: Some(DeepGate::Heads(decay)),
            threshold: None,
        };
        let memory = self.memory();
        let norm = DeepNorm { weight: self.ln_weight.val(), bias: self.ln_bias.val() };
        let before = self.shifted(change.clone(), 1.0);
        let (o, end) = deep_memory(&memory, tokens, Some(&norm), before, offsets, Path::Auto)?;
        let end = unread_rows(self.shifted(end, -1.0), change, offsets);

        let o = if self.config.add_key { o + k } else { o };
        let weights = if self.config.unweighted { routes.chosen } else { routes.weights };
        let [batch, time, _] = x.dims();
        let (heads, value) = (self.ctx.heads, self.ctx.value_dim);
        let readings = o * self.to_heads(weights).unsqueeze_dim::<4>(3);
        let sum = readings.reshape([batch, time, 1 + self.config.memories, heads * value]).sum_dim(2);
        let gate = sigmoid(self.gate.forward(x));
        Ok((self.o.forward(gate * merge_heads(sum)), DeepMemoryState { change: end, conv }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> DeepMemoryState {
        let shape = [batch, self.config.matrices(&self.ctx), self.ctx.head_dim, self.ctx.value_dim];
        let change = DeepState::new(vec![Tensor::zeros(shape, device)]);
        DeepMemoryState { change, conv: self.config.qkv(&self.ctx).zero_conv(batch, device) }
    }
}

/// What the router says of each token; the shared memory first.
struct Routes {
    /// One where a memory is read and written, else zero, `[B, T, 1 + n]`.
    chosen: Tensor<3>,
    /// Weights of the readings, `[B, T, 1 + n]`.
    weights: Tensor<3>,
    /// Softmax over all parallel memories, `[B, T, n]`.
    probabilities: Tensor<3>,
    top_k: usize,
}

impl Routes {
    fn load(&self) -> MemoryLoad {
        let [batch, time, memories] = self.probabilities.dims();
        let mean = |x: Tensor<3>| x.reshape([batch * time, memories]).mean_dim(0).squeeze_dim::<1>(0);
        let share = mean(self.chosen.clone().narrow(2, 1, memories));
        let probability = mean(self.probabilities.clone());
        let balance = (share.clone() * probability.clone()).sum() * (memories as f64 / self.top_k as f64);
        MemoryLoad { share, probability, balance }
    }
}

impl MixtureOfMemories {
    /// How the tokens of the layer's input `x [B, T, width]` spread over the parallel memories.
    ///
    /// # Errors
    /// An input that does not fit.
    pub fn load(&self, x: Tensor<3>) -> Result<MemoryLoad, MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, None, None)?;
        Ok(self.route(x).load())
    }

    fn memory(&self) -> DeepMemory {
        DeepMemory { depth: 1, residual: false, chunk: self.config.chunk, ..DeepMemory::default() }
    }

    fn route(&self, x: Tensor<3>) -> Routes {
        let scores = self.router.forward(x);
        let [batch, time, memories] = scores.dims();
        // A memory's rank is the number of those that come before it: higher scores, and equal ones with a lower index.
        let square = [batch, time, memories, memories];
        let fixed = scores.clone().detach();
        let own = fixed.clone().unsqueeze_dim::<4>(3).expand(square);
        let other = fixed.unsqueeze_dim::<4>(2).expand(square);
        let device = scores.device();
        let first = Tensor::<2>::ones([memories, memories], &device).tril(-1);
        let first = first.reshape([1, 1, memories, memories]).expand(square);
        let before = other.clone().greater(own.clone()).float() + other.equal(own).float() * first;
        let rank = before.sum_dim(3).squeeze_dim::<3>(3);
        let chosen = rank.lower_elem(self.config.top_k as f32).float();

        let probabilities = softmax(scores, 2);
        let among = probabilities.clone() * chosen.clone();
        let weights = among.clone() / among.sum_dim(2);
        let shared = || Tensor::ones([batch, time, 1], &device);
        Routes {
            chosen: Tensor::cat(vec![shared(), chosen], 2),
            weights: Tensor::cat(vec![shared(), weights], 2),
            probabilities,
            top_k: self.config.top_k,
        }
    }

    /// A number for each memory, `[B, T, 1 + n]`, for each memory and head, `[B, T, (1 + n) H]`.
    fn to_heads(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, time, memories] = x.dims();
        let heads = self.ctx.heads;
        x.unsqueeze_dim::<4>(3).expand([batch, time, memories, heads]).reshape([
            batch,
            time,
            memories * heads,
        ])
    }

    /// The memories with the trained start added `sign` times.
    fn shifted(&self, state: DeepState, sign: f64) -> DeepState {
        let start = self.start.val().unsqueeze_dim::<4>(0) * sign;
        state.map(|weights| weights + start.clone())
    }
}

/// The state `after`, with the rows of empty documents taken from `before`, bit for bit.
fn unread_rows(after: DeepState, before: DeepState, offsets: Option<&Offsets>) -> DeepState {
    let Some(offsets) = offsets.filter(|offsets| offsets.ranges().any(|range| range.is_empty())) else {
        return after;
    };
    let count = offsets.documents();
    let taken =
        || offsets.ranges().enumerate().map(|(row, range)| row + if range.is_empty() { count } else { 0 });
    let mut old = before.start.into_iter().chain(before.current);
    after.map(|new| match old.next() {
        Some(old) => rows::gather(&Tensor::cat(vec![new, old], 0), 0, taken()),
        None => new,
    })
}
