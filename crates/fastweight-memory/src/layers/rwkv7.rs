//! RWKV-7 time mix: a diagonal plus low rank state transition with a decay for every key channel.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::dplr::{dplr, dplr_step};
use fastweight_ops::norm::l2_normalise;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, STATE_ELEMENT, sequence_options};
use crate::context::setting_error;
use crate::init::placeholder;
use crate::projection::{check_sequence, check_token, linear, merge_heads, split_heads, token};
use crate::token_shift::token_shift;
use crate::token_table::{TokenTable, validate_vocab};
use crate::{LayerContext, MemoryError, Shared, ShiftedState, State, StateSize};

const NAME: &str = Rwkv7Config::NAME;

/// Added to the variance of a head's reading before it is normalised (RWKV-LM, `RWKV-v7`).
const GROUP_EPS: f64 = 64e-5;

/// Slowest and fastest log decay of a token are 0 and `-exp(-1/2)`.
const DECAY_RANGE: f64 = -0.606_530_659_712_633_4;

/// Added to the squared norm of the removal keys before the L2 normalisation.
const UNIT_EPS: f32 = 1e-12;

/// Most tokens that have keys and values of their own.
const MOST_VOCAB: usize = 1 << 31;

/// Largest rank of a low-rank map.
const MOST_RANK: usize = 1 << 16;

/// Configuration of [`Rwkv7`]. Ranks that are absent follow from the width as in RWKV-LM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Rwkv7Config {
    /// Rank of the map to the decays; `max(32, 1.8 sqrt(width))` in steps of 32 when absent.
    #[schemars(range(min = 1, max = MOST_RANK))]
    pub decay_rank: Option<usize>,
    /// Rank of the map to the in-context rates; as `decay_rank` when absent.
    #[schemars(range(min = 1, max = MOST_RANK))]
    pub rate_rank: Option<usize>,
    /// Rank of the map to the mix with the first layer's values; `max(32, 1.3 sqrt(width))` when absent.
    #[schemars(range(min = 1, max = MOST_RANK))]
    pub value_rank: Option<usize>,
    /// Rank of the map to the output gate; `max(32, 0.6 width^0.8)` when absent.
    #[schemars(range(min = 1, max = MOST_RANK))]
    pub gate_rank: Option<usize>,
    /// Keys and values are multiplied by a trained vector for each token id (DeepEmbed in its plain form).
    pub token_keys_values: bool,
}

/// A low-rank map `[.., width] -> [.., outputs]`: `f(x down) up + bias`.
#[derive(Module, Debug)]
pub struct LowRank {
    /// `[width, rank]`.
    pub lora_a: Param<Tensor<2>>,
    /// `[rank, outputs]`.
    pub lora_b: Param<Tensor<2>>,
    /// `[outputs]`; named by what it starts: each has its own initial values.
    pub start: Option<Param<Tensor<1>>>,
}

impl LowRank {
    fn new(width: usize, rank: usize, outputs: usize, start: bool, device: &Device) -> Self {
        Self {
            lora_a: placeholder([width, rank], device),
            lora_b: placeholder([rank, outputs], device),
            start: start.then(|| placeholder([outputs], device)),
        }
    }

    fn forward(&self, x: Tensor<3>, inner: fn(Tensor<3>) -> Tensor<3>) -> Tensor<3> {
        let hidden = inner(x.matmul(self.lora_a.val().unsqueeze()));
        let y = hidden.matmul(self.lora_b.val().unsqueeze());
        match &self.start {
            Some(start) => y + start.val().unsqueeze(),
            None => y,
        }
    }
}

/// How much of the token before goes into each of the six inputs, `[width]` each.
#[derive(Module, Debug)]
pub struct ShiftMix {
    /// Into the receptance (query).
    pub r: Param<Tensor<1>>,
    /// Into the decay.
    pub w: Param<Tensor<1>>,
    /// Into the key.
    pub k: Param<Tensor<1>>,
    /// Into the value.
    pub v: Param<Tensor<1>>,
    /// Into the in-context rate.
    pub a: Param<Tensor<1>>,
    /// Into the output gate.
    pub g: Param<Tensor<1>>,
}

/// The time mix of RWKV-7 (Peng et al. 2025, 2503.14456; RWKV-LM `RWKV-v7`).
///
/// Inputs are lerps of each token and the one before it. `log w = -e^{-1/2} sigmoid(w0 + tanh(x_w W1) W2)`,
/// `a = sigmoid(a0 + x_a A1 A2)`, `kk = unit(k k_k)` in each head, `k <- k (1 + (a - 1) k_a)`, from the second layer
/// on `v <- lerp(v, v_first, sigmoid(v0 + x_v V1 V2))`. The state follows
/// `S <- diag(w) S + (kk a)(-kk^T S) + k v^T`; the reading `S^T r` is normalised in each head, `(sum r k r_k) v` is
/// added, and all is gated by `sigmoid(x_g G1) G2` before the output map. A layer that stands alone has its own
/// values for `v_first`.
///
/// With `token_keys_values`, `k <- k * EmbK(id)` where the keys are made, so that what is removed follows what is written,
/// and `v <- v * EmbV(id)` after the lerp with `v_first`, which is left as it is. Both tables start at one.
#[derive(Module, Debug)]
pub struct Rwkv7 {
    /// Mixes of a token and the one before.
    pub shift: ShiftMix,
    /// Receptances (queries).
    pub r: Linear,
    /// Keys.
    pub k: Linear,
    /// Values.
    pub v: Linear,
    /// To the decays, `[heads K]`.
    pub decay: LowRank,
    /// To the in-context rates, `[heads K]`.
    pub rate: LowRank,
    /// To the share of the first layer's values, `[heads V]`; none in the first layer.
    pub first_value: Option<LowRank>,
    /// To the output gate, `[heads V]`.
    pub gate: LowRank,
    /// `k_k`, what is removed from the state relative to the key, `[heads K]`.
    pub removal: Param<Tensor<1>>,
    /// `k_a`, how much the rate replaces of the key, `[heads K]`.
    pub replacement: Param<Tensor<1>>,
    /// `r_k`, the weight of the current token's own value, `[heads, K]`.
    pub bonus: Param<Tensor<2>>,
    /// Factors of the normalised readings, `[heads V]`.
    pub norm: Param<Tensor<1>>,
    /// Added to the normalised readings, `[heads V]`.
    pub norm_shift: Param<Tensor<1>>,
    /// `EmbK`, `[vocab, heads K]`, with `token_keys_values`.
    pub k_table: Option<TokenTable>,
    /// `EmbV`, `[vocab, heads V]`, with `token_keys_values`.
    pub v_table: Option<TokenTable>,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    ctx: LayerContext,
}

impl Rwkv7Config {
    fn ranks(&self, width: usize) -> [usize; 4] {
        let steps = |x: f64| ((x / 32.0).round() as usize * 32).max(32);
        let root = (width as f64).sqrt();
        let decay = self.decay_rank.unwrap_or_else(|| steps(1.8 * root));
        [
            decay,
            self.rate_rank.unwrap_or(decay),
            self.value_rank.unwrap_or_else(|| steps(1.3 * root)),
            self.gate_rank.unwrap_or_else(|| steps(0.6 * (width as f64).powf(0.8))),
        ]
    }

    /// Checks the ranks for the layer of this name.
    pub(crate) fn validate_ranks(&self, name: &'static str, width: usize) -> Result<(), MemoryError> {
        let settings = ["decay_rank", "rate_rank", "value_rank", "gate_rank"];
        match settings.into_iter().zip(self.ranks(width)).find(|(_, rank)| *rank == 0 || *rank > MOST_RANK) {
            Some((setting, rank)) => Err(setting_error(name, setting, rank, format!("1 to {MOST_RANK}"))),
            None => Ok(()),
        }
    }
}

impl LayerConfig for Rwkv7Config {
    const NAME: &'static str = "rwkv7";
    type Layer = Rwkv7;

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        if self.token_keys_values {
            validate_vocab(NAME, ctx, MOST_VOCAB)?;
        }
        self.validate_ranks(NAME, ctx.width)
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Rwkv7, MemoryError> {
        self.validate(ctx)?;
        let (width, keys, values) = (ctx.width, ctx.key_width(), ctx.value_width());
        let [decay, rate, value, gate] = self.ranks(width);
        let mix = || placeholder([width], device);
        let table =
            |channels| self.token_keys_values.then(|| TokenTable::new(ctx.vocab, channels, None, device));
        Ok(Rwkv7 {
            shift: ShiftMix { r: mix(), w: mix(), k: mix(), v: mix(), a: mix(), g: mix() },
            r: linear(width, keys, device),
            k: linear(width, keys, device),
            v: linear(width, values, device),
            decay: LowRank::new(width, decay, keys, true, device),
            rate: LowRank::new(width, rate, keys, true, device),
            first_value: (ctx.layer > 0).then(|| LowRank::new(width, value, values, true, device)),
            gate: LowRank::new(width, gate, values, false, device),
            removal: placeholder([keys], device),
            replacement: placeholder([keys], device),
            bonus: placeholder([ctx.heads, ctx.head_dim], device),
            norm: placeholder([values], device),
            norm_shift: placeholder([values], device),
            k_table: table(keys),
            v_table: table(values),
            o: linear(values, width, device),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let (width, keys, values) = (ctx.width, ctx.key_width(), ctx.value_width());
        let [decay, rate, value, gate] = self.ranks(width);
        let low_rank = |rank: usize, outputs: usize| rank * (width + outputs);
        let first = if ctx.layer > 0 { low_rank(value, values) + values } else { 0 };
        let maps = 2 * width * (keys + values) + low_rank(decay, keys) + low_rank(rate, keys);
        // Per key channel: the two starts, removal, replacement, bonus. Per value channel: the two of the norm.
        let fixed = maps + low_rank(gate, values) + first + 6 * width + 5 * keys + 2 * values;
        let tables = if self.token_keys_values { ctx.vocab.saturating_mul(keys + values) } else { 0 };
        fixed.saturating_add(tables)
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        let elements = ctx.heads * ctx.head_dim * ctx.value_dim + ctx.width;
        StateSize { fixed: elements * STATE_ELEMENT, growing: 0 }
    }
}

/// What the memory reads at each token, `[B, T, H, K]` or `[B, T, H, V]`.
struct Tokens {
    r: Tensor<4>,
    w: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    /// What is removed, negative: `-kk`.
    a: Tensor<4>,
    /// What it is replaced by: `kk a`.
    b: Tensor<4>,
    /// Output gate `[B, T, heads V]`.
    gate: Tensor<3>,
    /// The last tokens, `[N, 1, width]`.
    last: Tensor<3>,
}

impl Layer for Rwkv7 {
    type State = ShiftedState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<ShiftedState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, ShiftedState), MemoryError> {
        self.forward_shared(x, state, offsets, &mut Shared::default())
    }

    fn step(&self, x: Tensor<2>, state: ShiftedState) -> Result<(Tensor<2>, ShiftedState), MemoryError> {
        self.step_shared(x, state, &mut Shared::default())
    }

    fn forward_shared(
        &self,
        x: Tensor<3>,
        state: Option<ShiftedState>,
        offsets: Option<&Offsets>,
        shared: &mut Shared,
    ) -> Result<(Tensor<3>, ShiftedState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let (memory, last) = state.map_or((None, None), |state| (Some(state.memory), Some(state.last)));
        let tokens = self.read(x, last, offsets, shared)?;
        let Tokens { r, w, k, v, a, b, gate, last } = tokens;
        let options = sequence_options(offsets, Some(1.0));
        let bonus = self.bonus(r.clone(), k.clone(), v.clone());
        let (o, memory) = dplr(r, w, k, v, a, b, memory, &options)?;
        Ok((self.output(o, bonus, gate), ShiftedState { memory, last }))
    }

    fn step_shared(
        &self,
        x: Tensor<2>,
        state: ShiftedState,
        shared: &mut Shared,
    ) -> Result<(Tensor<2>, ShiftedState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        let tokens = self.read(x.unsqueeze_dim(1), Some(state.last), None, shared)?;
        let Tokens { r, w, k, v, a, b, gate, last } = tokens;
        let bonus = self.bonus(r.clone(), k.clone(), v.clone());
        let [r, w, k, v, a, b] = [r, w, k, v, a, b].map(token);
        let (o, memory) = dplr_step(r, w, k, v, a, b, state.memory, Some(1.0))?;
        let y = self.output(o.unsqueeze_dim(1), bonus, gate).squeeze_dim(1);
        Ok((y, ShiftedState { memory, last }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> ShiftedState {
        let ctx = &self.ctx;
        ShiftedState {
            memory: Tensor::zeros([batch, ctx.heads, ctx.head_dim, ctx.value_dim], device),
            last: Tensor::zeros([batch, 1, ctx.width], device),
        }
    }
}

impl Rwkv7 {
    fn read(
        &self,
        x: Tensor<3>,
        last: Option<Tensor<3>>,
        offsets: Option<&Offsets>,
        shared: &mut Shared,
    ) -> Result<Tokens, MemoryError> {
        let heads = self.ctx.heads;
        let (before, last) = token_shift(x.clone(), last, offsets)?;
        let difference = before - x.clone();
        let mixed = |mix: &Param<Tensor<1>>| x.clone() + difference.clone() * mix.val().unsqueeze();
        let same = |x: Tensor<3>| x;

        let r = self.r.forward(mixed(&self.shift.r));
        let w = sigmoid(self.decay.forward(mixed(&self.shift.w), Tensor::tanh)) * DECAY_RANGE;
        let mut k = self.k.forward(mixed(&self.shift.k));
        let x_v = mixed(&self.shift.v);
        let mut v = self.values(x_v, shared);
        if let (Some(keys), Some(values)) = (&self.k_table, &self.v_table) {
            let ids = shared.ids(NAME, &x, keys.vocab())?;
            k = k * keys.of(ids.clone(), &x);
            v = v * values.of(ids, &x);
        }
        let a = sigmoid(self.rate.forward(mixed(&self.shift.a), same));
        let gate = self.gate.forward(mixed(&self.shift.g), sigmoid);

        let removed = l2_normalise(split_heads(k.clone() * self.removal.val().unsqueeze(), heads), UNIT_EPS);
        let k = k.clone() + k * (a.clone() - 1.0) * self.replacement.val().unsqueeze();
        Ok(Tokens {
            r: split_heads(r, heads),
            w: split_heads(w, heads),
            k: split_heads(k, heads),
            v: split_heads(v, heads),
            a: removed.clone().neg(),
            b: removed * split_heads(a, heads),
            gate,
            last,
        })
    }

    /// Values `[B, T, heads V]`, mixed with those of the first RWKV layer, which are left for the layers after it.
    fn values(&self, x: Tensor<3>, shared: &mut Shared) -> Tensor<3> {
        let v = self.v.forward(x.clone());
        let first = shared.first_value.get_or_insert_with(|| v.clone()).clone();
        match &self.first_value {
            Some(share) if first.dims() == v.dims() => {
                let share = sigmoid(share.forward(x, |x| x));
                v.clone() + (first - v) * share
            }
            _ => v,
        }
    }

    /// `(sum_k r k r_k) v`, `[B, T, H, V]`.
    fn bonus(&self, r: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        (r * k * self.bonus.val().unsqueeze()).sum_dim(3) * v
    }

    fn output(&self, o: Tensor<4>, bonus: Tensor<4>, gate: Tensor<3>) -> Tensor<3> {
        let centred = o.clone() - o.mean_dim(3);
        let variance = centred.clone().square().mean_dim(3);
        let normalised = merge_heads(centred / (variance + GROUP_EPS).sqrt());
        let y = normalised * self.norm.val().unsqueeze() + self.norm_shift.val().unsqueeze();
        self.o.forward((y + merge_heads(bonus)) * gate)
    }
}
