//! Checks of operator arguments, shared by every operator.

use burn::tensor::{DType, Device, Tensor};

use crate::kernel::Dims;
use crate::options::is_flex;
use crate::{Offsets, OpError};

/// The arguments of one call: every further argument is checked against the first.
pub(crate) struct Arguments {
    operator: &'static str,
    dtype: DType,
    device: Device,
}

impl Arguments {
    /// Starts from the argument that fixes the element type and the device.
    pub(crate) fn new<const D: usize>(operator: &'static str, first: &Tensor<D>) -> Self {
        Self { operator, dtype: first.dtype(), device: first.device().inner() }
    }

    pub(crate) fn wrong_shape<const D: usize>(
        &self,
        argument: &'static str,
        found: &Tensor<D>,
        expected: impl Into<String>,
    ) -> OpError {
        let (operator, found) = (self.operator, found.dims().to_vec());
        OpError::Shape { operator, argument, found, expected: expected.into() }
    }

    pub(crate) fn wrong_value(&self, argument: &'static str, found: String, expected: String) -> OpError {
        OpError::Value { operator: self.operator, argument, found, expected }
    }

    /// One argument: its shape, and the element type and device of the first.
    pub(crate) fn tensor<const D: usize>(
        &self,
        argument: &'static str,
        tensor: &Tensor<D>,
        expected: [usize; D],
    ) -> Result<(), OpError> {
        if tensor.dims() != expected {
            return Err(self.wrong_shape(argument, tensor, format!("{expected:?}")));
        }
        if tensor.dtype() != self.dtype {
            let expected = format!("{:?}, as the first argument has", self.dtype);
            return Err(self.wrong_value(argument, format!("{:?}", tensor.dtype()), expected));
        }
        let device = tensor.device().inner();
        if device != self.device {
            let expected = format!("{:?}, where the first argument is", self.device);
            return Err(self.wrong_value(argument, format!("{device:?}"), expected));
        }
        Ok(())
    }

    /// A log gate: besides shape and type, its values must be `<= 0` where they are cheap to read.
    pub(crate) fn gate<const D: usize>(
        &self,
        argument: &'static str,
        gate: &Tensor<D>,
        expected: [usize; D],
    ) -> Result<(), OpError> {
        self.tensor(argument, gate, expected)?;
        if !is_flex(&self.device) {
            return Ok(());
        }
        let Ok(values) = gate.clone().without_autodiff().try_into_data() else { return Ok(()) };
        let invalid = |g: f32| g > 0.0 || g.is_nan();
        let bad = match values.as_slice::<f32>() {
            Ok(slice) => slice.iter().position(|&g| invalid(g)).map(|i| (i, slice[i])),
            Err(_) => values.iter::<f32>().enumerate().find(|&(_, g)| invalid(g)),
        };
        match bad {
            Some((position, value)) => {
                Err(OpError::Gate { operator: self.operator, argument, value, position })
            }
            None => Ok(()),
        }
    }

    /// `q, k [batch, time, heads, key]` and `v [batch, time, heads, value]` with their options.
    pub(crate) fn sequence(
        &self,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        scale: Option<f32>,
        offsets: Option<&Offsets>,
    ) -> Result<Dims, OpError> {
        let [batch, time, heads, key] = q.dims();
        let [.., value] = v.dims();
        if batch == 0 || heads == 0 || key == 0 {
            return Err(self.wrong_shape("q", q, "at least one row, one head and one dimension"));
        }
        self.tensor("k", k, [batch, time, heads, key])?;
        self.tensor("v", v, [batch, time, heads, value])?;
        if value == 0 {
            return Err(self.wrong_shape("v", v, "at least one dimension"));
        }
        self.offsets(offsets, batch, time)?;
        let scale = self.scale(scale, key)?;
        Ok(Dims { batch, time, heads, key, value, scale, offsets: offsets.cloned() })
    }

    /// One token of each row: `q, k [batch, heads, key]` and `v [batch, heads, value]`.
    pub(crate) fn token(
        &self,
        q: &Tensor<3>,
        k: &Tensor<3>,
        v: &Tensor<3>,
        scale: Option<f32>,
    ) -> Result<Dims, OpError> {
        let [batch, heads, key] = q.dims();
        let [.., value] = v.dims();
        if batch == 0 || heads == 0 || key == 0 {
            return Err(self.wrong_shape("q", q, "at least one row, one head and one dimension"));
        }
        self.tensor("k", k, [batch, heads, key])?;
        self.tensor("v", v, [batch, heads, value])?;
        if value == 0 {
            return Err(self.wrong_shape("v", v, "at least one dimension"));
        }
        let scale = self.scale(scale, key)?;
        Ok(Dims { batch, time: 1, heads, key, value, scale, offsets: None })
    }

    /// An initial state, zeros of the kind of `like` when absent.
    pub(crate) fn state<const D: usize, const E: usize>(
        &self,
        argument: &'static str,
        state: Option<Tensor<D>>,
        shape: [usize; D],
        like: &Tensor<E>,
    ) -> Result<Tensor<D>, OpError> {
        match state {
            Some(state) => self.tensor(argument, &state, shape).map(|()| state),
            None => Ok(Tensor::zeros(shape, (&like.device(), like.dtype()))),
        }
    }

    /// Offsets pack documents into the one row of the batch and end at its length.
    pub(crate) fn offsets(
        &self,
        offsets: Option<&Offsets>,
        batch: usize,
        time: usize,
    ) -> Result<(), OpError> {
        let Some(offsets) = offsets else { return Ok(()) };
        if batch != 1 {
            return Err(OpError::PackedBatch { operator: self.operator, batch });
        }
        Offsets::new(offsets.as_slice(), time).map(|_| ())
    }

    /// The factor on the output, `1 / sqrt(key)` when absent.
    pub(crate) fn scale(&self, scale: Option<f32>, key: usize) -> Result<f32, OpError> {
        match scale {
            Some(scale) if !scale.is_finite() => {
                Err(self.wrong_value("scale", scale.to_string(), "a finite number".into()))
            }
            Some(scale) => Ok(scale),
            None => Ok(default_scale(key) as f32),
        }
    }
}

/// `1 / sqrt(key)`, the factor on the output when none is given.
pub(crate) fn default_scale(key: usize) -> f64 {
    1.0 / (key as f64).sqrt()
}

/// Whether a gradient has to reach any of the tensors.
pub(crate) fn tracked<'a, const D: usize>(tensors: impl IntoIterator<Item = &'a Tensor<D>>) -> bool {
    tensors.into_iter().any(Tensor::is_tracked)
}
