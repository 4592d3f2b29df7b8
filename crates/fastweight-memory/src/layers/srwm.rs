//! The self-referential weight matrix: a matrix that rewrites itself with keys, queries and rates of its own.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Device, Tensor, TensorData};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, STATE_ELEMENT};
use crate::init::placeholder;
use crate::lockstep::Lockstep;
use crate::projection::{check_sequence, check_state, check_token, linear, merge_heads, split_heads};
use crate::{LayerContext, MatrixState, MemoryError, State, StateSize};

const NAME: &str = SrwmConfig::NAME;

/// Blocks of the matrix with a rate of their own: output, query, key and the rates themselves.
const BLOCKS: usize = 4;

/// Configuration of [`Srwm`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SrwmConfig {}

/// The self-referential weight matrix, SRWM (Irie et al. 2022, 2202.05780, eqs. 5 to 8).
///
/// A head has one matrix. With `phi` the softmax over a head's channels, a token reads
/// `y, q, k, beta = W_{t-1} phi(x)`, then `v = W_{t-1} phi(q)`, `v_bar = W_{t-1} phi(k)`, and writes
/// `W_t = W_{t-1} + sigmoid(beta) (v - v_bar) phi(k)^T`: the delta rule on the matrix itself, with one of four rates for
/// each block of its rows, the fourth block being what makes the rates. The output is a map of `y`, read before the write.
///
/// `W_0` is trained; the state is the change of W since, so that a cleared row is at the start, wherever that is. The paper
/// cuts the layer's input into heads; here a linear map in front of them leaves the sizes of a head free.
#[derive(Module, Debug)]
pub struct Srwm {
    /// Inputs of the heads.
    pub x: Linear,
    /// The matrix before the first token, key first, `[H, K, V + 2 K + 4]`: output, query, key, rates.
    pub start: Param<Tensor<3>>,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    ctx: LayerContext,
}

/// Rows of the matrix, in the paper's orientation.
fn outputs(ctx: &LayerContext) -> usize {
    ctx.value_dim + 2 * ctx.head_dim + BLOCKS
}

impl LayerConfig for SrwmConfig {
    const NAME: &'static str = "srwm";
    type Layer = Srwm;

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Srwm, MemoryError> {
        self.validate(ctx)?;
        Ok(Srwm {
            x: linear(ctx.width, ctx.key_width(), device),
            start: placeholder([ctx.heads, ctx.head_dim, outputs(ctx)], device),
            o: linear(ctx.value_width(), ctx.width, device),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        ctx.width * (ctx.key_width() + ctx.value_width()) + ctx.key_width() * outputs(ctx)
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        StateSize { fixed: ctx.key_width() * outputs(ctx) * STATE_ELEMENT, growing: 0 }
    }
}

impl Layer for Srwm {
    type State = MatrixState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MatrixState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MatrixState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let [batch, time, _] = x.dims();
        let sequences = offsets.map_or(batch, Offsets::documents);
        let change = state.unwrap_or_else(|| self.zero_state(sequences, &x.device())).memory;
        self.check(&change)?;
        let shares = merge_heads(softmax(split_heads(self.x.forward(x), self.ctx.heads), 3));
        // The start goes along row by row: its gradients are then added up over the rows once.
        let start = self.start.val().unsqueeze_dim::<4>(0).expand(change.dims());
        let blocks = self.blocks(&change.device());
        let (y, [memory, _]) =
            Lockstep::new(batch, time, offsets).run(shares, [change, start], |token, [change, start]| {
                let (y, change) = self.write(token, change, start.clone(), blocks.clone());
                (y, [change, start])
            });
        Ok((self.o.forward(y), MatrixState { memory, conv: None }))
    }

    fn step(&self, x: Tensor<2>, state: MatrixState) -> Result<(Tensor<2>, MatrixState), MemoryError> {
        check_token(NAME, self.ctx.width, &x, state.batch())?;
        self.check(&state.memory)?;
        let shares = softmax(split_heads(self.x.forward(x).unsqueeze_dim(1), self.ctx.heads), 3);
        let token = merge_heads(shares).squeeze_dim(1);
        let start = self.start.val().unsqueeze_dim::<4>(0);
        let blocks = self.blocks(&state.memory.device());
        let (y, memory) = self.write(token, state.memory, start, blocks);
        Ok((self.o.forward(y), MatrixState { memory, conv: None }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MatrixState {
        let shape = [batch, self.ctx.heads, self.ctx.head_dim, outputs(&self.ctx)];
        MatrixState { memory: Tensor::zeros(shape, device), conv: None }
    }
}

impl Srwm {
    fn check(&self, change: &Tensor<4>) -> Result<(), MemoryError> {
        let ctx = &self.ctx;
        check_state(NAME, change, [change.dims()[0], ctx.heads, ctx.head_dim, outputs(ctx)])
    }

    /// Spreads four rates over the columns of their blocks, `[4, V + 2 K + 4]`.
    fn blocks(&self, device: &Device) -> Tensor<2> {
        let [key, value] = [self.ctx.head_dim, self.ctx.value_dim];
        let columns = outputs(&self.ctx);
        let mut spread = vec![0.0f32; BLOCKS * columns];
        let mut first = 0;
        for (block, size) in [value, key, key, BLOCKS].into_iter().enumerate() {
            spread[block * columns + first..][..size].fill(1.0);
            first += size;
        }
        Tensor::from_data(TensorData::new(spread, [BLOCKS, columns]), device)
    }

    /// One token of every row: `phi(x) [rows, H K]` and the change `[rows, H, K, V + 2 K + 4]` to the reading `[rows, H V]` and the
    /// next change. `start` has the change's shape or one row.
    fn write(
        &self,
        token: Tensor<2>,
        change: Tensor<4>,
        start: Tensor<4>,
        blocks: Tensor<2>,
    ) -> (Tensor<2>, Tensor<4>) {
        let [key, value] = [self.ctx.head_dim, self.ctx.value_dim];
        let [rows, heads, _, columns] = change.dims();
        let matrix = change.clone() + start;
        let read = token.reshape([rows, heads, 1, key]).matmul(matrix.clone());
        let part = |from: usize, size: usize| read.clone().narrow(3, from, size);
        let [q, k] = [value, value + key].map(|from| softmax(part(from, key), 3));
        let rates = sigmoid(part(value + 2 * key, BLOCKS)).reshape([rows * heads, BLOCKS]).matmul(blocks);
        // v - v_bar, both read with one product.
        let error = (q - k.clone()).matmul(matrix);
        let change = change + k.swap_dims(2, 3).matmul(error * rates.reshape([rows, heads, 1, columns]));
        (part(0, value).reshape([rows, heads * value]), change)
    }
}
