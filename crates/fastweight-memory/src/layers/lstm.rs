//! The long short-term memory: a gated vector that every token rewrites.

use burn::module::{Module, Param};
use burn::nn::{GateController, Linear};
use burn::tensor::activation::{sigmoid, tanh};
use burn::tensor::module::linear as affine;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, STATE_ELEMENT};
use crate::context::{MOST_HEAD_CHANNELS, setting_error};
use crate::init::placeholder;
use crate::lockstep::Lockstep;
use crate::projection::{check_sequence, check_state, check_token, linear};
use crate::{LayerContext, LstmState, MemoryError, State, StateSize};

const NAME: &str = LstmConfig::NAME;

/// Configuration of [`Lstm`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LstmConfig {
    /// Cells; the value channels of all heads when absent.
    #[schemars(range(min = 1, max = MOST_HEAD_CHANNELS))]
    pub hidden: Option<usize>,
}

/// LSTM (Hochreiter and Schmidhuber 1997; forget gate: Gers et al. 2000).
///
/// `i, f, o = sigmoid(W x_t + U h_{t-1} + b)`, `g = tanh(W x_t + U h_{t-1} + b)`, `c_t = f c_{t-1} + i g`,
/// `h_t = o tanh(c_t)`, then an output map. The forget gate's bias starts at one (Jozefowicz et al. 2015), the others at zero.
///
/// The gates are `burn`'s modules with its names, and compute what `burn::nn::Lstm` does. That module's own loop is not used: it
/// returns the cells of the last token only, where documents of several lengths end at several tokens, and it writes each
/// token into a copy of the whole output. Its second bias a gate, which adds to the first, is left out.
#[derive(Module, Debug)]
pub struct Lstm {
    /// What enters the cells.
    pub input_gate: GateController,
    /// What stays in them.
    pub forget_gate: GateController,
    /// What is read from them.
    pub output_gate: GateController,
    /// What is written.
    pub cell_gate: GateController,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    hidden: usize,
    #[module(skip)]
    width: usize,
}

impl LstmConfig {
    fn hidden(&self, ctx: &LayerContext) -> usize {
        self.hidden.unwrap_or_else(|| ctx.value_width())
    }

    /// Checks the number of cells alone.
    pub(crate) fn validate_hidden(&self) -> Result<(), MemoryError> {
        match self.hidden {
            Some(hidden) if hidden == 0 || hidden > MOST_HEAD_CHANNELS => {
                Err(setting_error(NAME, "hidden", hidden, format!("from 1 to {MOST_HEAD_CHANNELS} cells")))
            }
            _ => Ok(()),
        }
    }
}

impl LayerConfig for LstmConfig {
    const NAME: &'static str = "lstm";
    type Layer = Lstm;

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        self.validate_hidden()
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Lstm, MemoryError> {
        self.validate(ctx)?;
        let hidden = self.hidden(ctx);
        let gate = || GateController {
            input_transform: Linear {
                weight: placeholder([ctx.width, hidden], device),
                bias: Some(placeholder([hidden], device)),
            },
            hidden_transform: linear(hidden, hidden, device),
        };
        Ok(Lstm {
            input_gate: gate(),
            forget_gate: gate(),
            output_gate: gate(),
            cell_gate: gate(),
            o: linear(hidden, ctx.width, device),
            hidden,
            width: ctx.width,
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let hidden = self.hidden(ctx);
        4 * hidden * (ctx.width + hidden + 1) + hidden * ctx.width
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        StateSize { fixed: 2 * self.hidden(ctx) * STATE_ELEMENT, growing: 0 }
    }
}

impl Layer for Lstm {
    type State = LstmState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<LstmState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, LstmState), MemoryError> {
        check_sequence(NAME, self.width, &x, offsets, state.as_ref().map(State::batch))?;
        let [batch, time, _] = x.dims();
        let sequences = offsets.map_or(batch, Offsets::documents);
        let state = state.unwrap_or_else(|| self.zero_state(sequences, &x.device()));
        self.check(&state)?;
        let (input, bias, recurrent) = self.weights();
        let gates = affine(x, input, Some(bias));
        let steps = Lockstep::new(batch, time, offsets);
        let (h, [hidden, cell]) = steps.run(gates, [state.hidden, state.cell], |gates, [hidden, cell]| {
            let [hidden, cell] = self.write(gates + hidden.matmul(recurrent.clone()), cell);
            (hidden.clone(), [hidden, cell])
        });
        Ok((self.o.forward(h), LstmState { hidden, cell }))
    }

    fn step(&self, x: Tensor<2>, state: LstmState) -> Result<(Tensor<2>, LstmState), MemoryError> {
        check_token(NAME, self.width, &x, state.batch())?;
        self.check(&state)?;
        let (input, bias, recurrent) = self.weights();
        let gates = affine(x, input, Some(bias)) + state.hidden.matmul(recurrent);
        let [hidden, cell] = self.write(gates, state.cell);
        Ok((self.o.forward(hidden.clone()), LstmState { hidden, cell }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> LstmState {
        let zeros = || Tensor::zeros([batch, self.hidden], device);
        LstmState { hidden: zeros(), cell: zeros() }
    }
}

impl Lstm {
    fn check(&self, state: &LstmState) -> Result<(), MemoryError> {
        let shape = [state.batch(), self.hidden];
        check_state(NAME, &state.hidden, shape)?;
        check_state(NAME, &state.cell, shape)
    }

    /// The maps of all gates side by side, input, forget, output and cell: from the input `[width, 4 hidden]`, its bias, and from
    /// the hidden vector `[hidden, 4 hidden]`.
    fn weights(&self) -> (Tensor<2>, Tensor<1>, Tensor<2>) {
        let gates = [&self.input_gate, &self.forget_gate, &self.output_gate, &self.cell_gate];
        let bias = |bias: &Param<Tensor<1>>| bias.val();
        (
            Tensor::cat(gates.map(|gate| gate.input_transform.weight.val()).into(), 1),
            Tensor::cat(
                gates.iter().filter_map(|gate| gate.input_transform.bias.as_ref().map(bias)).collect(),
                0,
            ),
            Tensor::cat(gates.map(|gate| gate.hidden_transform.weight.val()).into(), 1),
        )
    }

    /// The next hidden vector and cells, from the gates `[rows, 4 hidden]` before their sigmoids and the cells.
    fn write(&self, gates: Tensor<2>, cell: Tensor<2>) -> [Tensor<2>; 2] {
        let part = |from: &Tensor<2>, i: usize| from.clone().narrow(1, i * self.hidden, self.hidden);
        let open = sigmoid(gates.clone().narrow(1, 0, 3 * self.hidden));
        let cell = part(&open, 1) * cell + part(&open, 0) * tanh(part(&gates, 3));
        [part(&open, 2) * tanh(cell.clone()), cell]
    }
}
