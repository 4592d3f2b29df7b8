//! How a fused CPU kernel becomes a differentiable operator.
//!
//! A kernel implements [`FusedOp`] on plain slices; [`apply`] runs it on tensors of the flex
//! backend and records its hand-written backward pass. This is the only place that talks to
//! burn's backend extension. A GPU kernel joins by implementing [`FusedBackend`] for its backend.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, DispatchTensor, ExtensionType, Flex, backend_extension};
use burn::tensor::{Bytes, DType, Shape, Tensor};

use crate::options::is_flex;

/// Tensor inputs a fused operator can have.
pub const MAX_INPUTS: usize = 10;
/// Outputs a fused operator can have: the sequence output, then up to two final states.
pub const MAX_OUTPUTS: usize = 3;

/// What a forward pass leaves behind.
#[derive(Debug, Default)]
pub struct Forward {
    /// The outputs, in the order of [`FusedOp::output_shapes`].
    pub outputs: Vec<Vec<f32>>,
    /// Whatever the backward pass wants to see again; empty when nothing is to be saved.
    pub saved: Vec<Vec<f32>>,
}

/// A fused kernel with a hand-written backward pass, on contiguous row-major `f32` slices.
pub trait FusedOp: Debug + Send + Sync + 'static {
    /// The operator's name.
    fn name(&self) -> &'static str;
    /// Shapes of the outputs, at most [`MAX_OUTPUTS`].
    fn output_shapes(&self) -> Vec<Vec<usize>>;
    /// Computes the outputs; `save` asks for what [`FusedOp::backward`] needs.
    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward;
    /// Gradients of the inputs where `needs` is true.
    ///
    /// `grads[i]` is the gradient of output `i`, absent when that output took no part in the loss.
    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>>;
}

/// Tensor inputs of a fused operator; slots past the operator's own hold an unused constant.
#[derive(ExtensionType)]
pub struct Inputs<B: Backend> {
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    c: FloatTensor<B>,
    d: FloatTensor<B>,
    e: FloatTensor<B>,
    f: FloatTensor<B>,
    g: FloatTensor<B>,
    h: FloatTensor<B>,
    i: FloatTensor<B>,
    j: FloatTensor<B>,
}

/// Outputs of a fused operator; slots past the operator's own hold an unused constant.
#[derive(ExtensionType)]
pub struct Outputs<B: Backend> {
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    c: FloatTensor<B>,
}

/// A backend that runs fused operators.
#[backend_extension(Flex, Autodiff)]
pub trait FusedBackend: Backend {
    /// Runs `op` on the first `count` inputs.
    fn run_fused(#[extension_type] inputs: Inputs<Self>, op: Arc<dyn FusedOp>, count: usize)
    -> Outputs<Self>;
}

fn constant() -> FlexTensor {
    flex_tensor(vec![0.0], &[1])
}

fn flex_tensor(values: Vec<f32>, shape: &[usize]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::from(shape.to_vec())), DType::F32)
}

fn slice(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().unwrap_or(&[])
}

fn slices(tensors: &[FlexTensor]) -> Vec<&[f32]> {
    tensors.iter().map(slice).collect()
}

fn forward(
    op: &dyn FusedOp,
    inputs: &[FlexTensor],
    save: bool,
) -> ([FlexTensor; MAX_OUTPUTS], Vec<Vec<f32>>) {
    let Forward { outputs, saved } = op.forward(&slices(inputs), save);
    let mut tensors =
        outputs.into_iter().zip(op.output_shapes()).map(|(values, shape)| flex_tensor(values, &shape));
    ([(); MAX_OUTPUTS].map(|()| tensors.next().unwrap_or_else(constant)), saved)
}

fn contiguous(inputs: [FlexTensor; MAX_INPUTS], count: usize) -> Vec<FlexTensor> {
    inputs.into_iter().take(count).map(|tensor| tensor.to_contiguous()).collect()
}

impl FusedBackend for Flex {
    fn run_fused(inputs: Inputs<Self>, op: Arc<dyn FusedOp>, count: usize) -> Outputs<Self> {
        let Inputs { a, b, c, d, e, f, g, h, i, j } = inputs;
        let inputs = contiguous([a, b, c, d, e, f, g, h, i, j], count);
        let ([a, b, c], _) = forward(op.as_ref(), &inputs, false);
        Outputs { a, b, c }
    }
}

/// What the backward pass of one call needs; the gradients of the second and third output
/// arrive in `state_grads` before the pass runs, since their nodes hang below the first one's.
#[derive(Debug)]
struct Tape {
    op: Arc<dyn FusedOp>,
    inputs: Vec<FlexTensor>,
    saved: Vec<Vec<f32>>,
    first_shape: Vec<usize>,
    state_grads: Mutex<[Option<FlexTensor>; MAX_OUTPUTS - 1]>,
}

impl Tape {
    fn take_state_grads(&self) -> [Option<FlexTensor>; MAX_OUTPUTS - 1] {
        let mut grads = self.state_grads.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        std::mem::take(&mut *grads)
    }
}

#[derive(Debug)]
struct FirstOutput;

impl Backward<Flex, MAX_INPUTS> for FirstOutput {
    type State = Arc<Tape>;

    fn backward(self, ops: Ops<Arc<Tape>, MAX_INPUTS>, grads: &mut Gradients, _: &mut Checkpointer) {
        let tape = ops.state;
        let first = grads.consume::<Flex>(&ops.node).to_contiguous();
        let [second, third] = tape.take_state_grads();
        let grad_slices = [Some(slice(&first)), second.as_ref().map(slice), third.as_ref().map(slice)];
        let needs: Vec<bool> = ops.parents.iter().take(tape.inputs.len()).map(Option::is_some).collect();
        let outputs = tape.op.output_shapes().len();
        let results = tape.op.backward(&slices(&tape.inputs), &tape.saved, &grad_slices[..outputs], &needs);
        for ((parent, input), result) in ops.parents.into_iter().zip(&tape.inputs).zip(results) {
            if let (Some(node), Some(values)) = (parent, result) {
                let shape = input.layout().shape().clone();
                grads.register::<Flex>(
                    node.id,
                    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape), DType::F32),
                );
            }
        }
    }
}

#[derive(Debug)]
struct StateOutput;

impl Backward<Flex, 1> for StateOutput {
    type State = (Arc<Tape>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (tape, index) = ops.state;
        let grad = grads.consume::<Flex>(&ops.node).to_contiguous();
        tape.state_grads.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[index] = Some(grad);
        if let [Some(node)] = ops.parents {
            let zeros = Flex::float_expand(constant(), Shape::from(tape.first_shape.clone()));
            grads.register::<Flex>(node.id, zeros);
        }
    }
}

type Tracked<C> = FloatTensor<Autodiff<Flex, C>>;

fn state_output<C: CheckpointStrategy>(
    first: &Tracked<C>,
    tape: &Option<Arc<Tape>>,
    index: usize,
    value: FlexTensor,
) -> Tracked<C> {
    match (StateOutput.prepare::<C>([first.node()]).compute_bound().stateful(), tape) {
        (OpsKind::Tracked(prep), Some(tape)) => prep.finish((tape.clone(), index), value),
        (OpsKind::UnTracked(prep), _) => prep.finish(value),
        (OpsKind::Tracked(_), None) => Tracked::<C>::new(value),
    }
}

impl<C: CheckpointStrategy> FusedBackend for Autodiff<Flex, C> {
    fn run_fused(inputs: Inputs<Self>, op: Arc<dyn FusedOp>, count: usize) -> Outputs<Self> {
        let Inputs { a, b, c, d, e, f, g, h, i, j } = inputs;
        let [a, b, c, d, e, f, g, h, i, j] = [a, b, c, d, e, f, g, h, i, j].map(|tensor| tensor.into_parts());
        let nodes = [a.1, b.1, c.1, d.1, e.1, f.1, g.1, h.1, i.1, j.1];
        let inputs = contiguous([a.0, b.0, c.0, d.0, e.0, f.0, g.0, h.0, i.0, j.0], count);
        let (first, [second, third], tape) = match FirstOutput.prepare::<C>(nodes).compute_bound().stateful()
        {
            OpsKind::Tracked(prep) => {
                let ([first, second, third], saved) = forward(op.as_ref(), &inputs, true);
                let first_shape = op.output_shapes().into_iter().next().unwrap_or_default();
                let tape = Arc::new(Tape { op, inputs, saved, first_shape, state_grads: Mutex::default() });
                (prep.finish(tape.clone(), first), [second, third], Some(tape))
            }
            OpsKind::UnTracked(prep) => {
                let ([first, second, third], _) = forward(op.as_ref(), &inputs, false);
                (prep.finish(first), [second, third], None)
            }
        };
        let b = state_output::<C>(&first, &tape, 0, second);
        let c = state_output::<C>(&first, &tape, 1, third);
        Outputs { a: first, b, c }
    }
}

/// Runs a fused operator on float32 tensors of the flex device, recording its backward pass.
///
/// `inputs` are the operator's own, at most [`MAX_INPUTS`], each from [`Tensor::into_dispatch`];
/// the outputs go back through [`Tensor::from_dispatch`].
pub fn apply(op: Arc<dyn FusedOp>, inputs: Vec<DispatchTensor>) -> [DispatchTensor; MAX_OUTPUTS] {
    let count = inputs.len();
    let filler = Tensor::<1>::from_primitive::<Flex>(constant()).into_dispatch();
    let mut inputs = inputs.into_iter();
    let mut next = || inputs.next().unwrap_or_else(|| filler.clone());
    let inputs = Inputs {
        a: next(),
        b: next(),
        c: next(),
        d: next(),
        e: next(),
        f: next(),
        g: next(),
        h: next(),
        i: next(),
        j: next(),
    };
    let Outputs { a, b, c } = <Dispatch as FusedBackend>::run_fused(inputs, op, count);
    [a, b, c]
}

/// The same tensor with its numbers one behind the other, as [`step_in_place`] can update them.
///
/// A tensor that carries gradients, or is not on the flex device, comes back as it is.
pub fn make_contiguous<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if tensor.is_tracked() || tensor.dtype() != DType::F32 || !is_flex(&tensor.device()) {
        return tensor;
    }
    let autodiff = tensor.is_autodiff();
    match tensor.clone().without_autodiff().try_into_primitive::<Flex>() {
        Ok(plain) => {
            let plain = Tensor::<D>::from_primitive::<Flex>(plain.to_contiguous());
            if autodiff { Tensor::from_inner(plain) } else { plain }
        }
        Err(_) => tensor,
    }
}

/// A one-token kernel that updates a state in place: [`step_states_in_place`] with one state.
pub fn step_in_place<const D: usize>(
    state: Tensor<D>,
    inputs: Vec<DispatchTensor>,
    output_shape: &[usize],
    kernel: impl FnOnce(&mut [f32], &[&[f32]], &mut [f32]),
) -> (DispatchTensor, Tensor<D>) {
    let (output, [state]) =
        step_states_in_place([state], inputs, output_shape, |[state], x, out| kernel(state, x, out));
    (output, state)
}

/// A one-token kernel that updates states in place.
///
/// The tensors are moved in; a state is written in place when nobody else holds it, else copied first.
/// Works on tensors of the flex device that need no gradient.
pub fn step_states_in_place<const D: usize, const N: usize>(
    states: [Tensor<D>; N],
    inputs: Vec<DispatchTensor>,
    output_shape: &[usize],
    kernel: impl FnOnce([&mut [f32]; N], &[&[f32]], &mut [f32]),
) -> (DispatchTensor, [Tensor<D>; N]) {
    let plain = |tensor: DispatchTensor| {
        Tensor::<1>::from_dispatch(tensor)
            .without_autodiff()
            .try_into_primitive::<Flex>()
            .map(|t| t.to_contiguous())
    };
    let autodiff = states.iter().any(Tensor::is_autodiff);
    let inputs: Vec<FlexTensor> = inputs.into_iter().filter_map(|t| plain(t).ok()).collect();
    let mut states = states.map(|state| match state.without_autodiff().try_into_primitive::<Flex>() {
        Ok(tensor) if tensor.as_slice::<f32>().is_some_and(|s| s.len() * 4 == tensor.bytes().len()) => tensor,
        Ok(tensor) => tensor.to_contiguous(),
        Err(_) => constant(),
    });
    let mut output = vec![0.0; output_shape.iter().product()];
    kernel(states.each_mut().map(|state| state.storage_mut()), &slices(&inputs), &mut output);
    let lift = |tensor: FlexTensor| {
        let tensor = Tensor::<D>::from_primitive::<Flex>(tensor);
        if autodiff { Tensor::from_inner(tensor) } else { tensor }
    };
    let output = Tensor::<1>::from_primitive::<Flex>(flex_tensor(output, output_shape));
    let output = if autodiff { Tensor::from_inner(output) } else { output };
    (output.into_dispatch(), states.map(lift))
}
