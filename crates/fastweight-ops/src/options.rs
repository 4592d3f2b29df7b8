//! Options that every sequence operator takes.

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Tensor};

use crate::{Offsets, OpError};

/// Which implementation of an operator runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Path {
    /// The fused kernel where one exists (flex device, float32), tensor operations elsewhere.
    #[default]
    Auto,
    /// The fused kernel, or [`OpError::NoFusedKernel`].
    Fused,
    /// Tensor operations, on any device and float type.
    Composed,
}

/// Options of a sequence operator.
#[derive(Debug, Clone, Default)]
pub struct SequenceOptions {
    /// Factor on the output, `1 / sqrt(K)` when absent.
    pub scale: Option<f32>,
    /// Documents packed in the one row of the batch.
    pub offsets: Option<Offsets>,
    /// Which implementation runs.
    pub path: Path,
}

impl SequenceOptions {
    /// Options with a scale, otherwise the defaults.
    pub fn with_scale(scale: f32) -> Self {
        Self { scale: Some(scale), ..Self::default() }
    }
}

/// Whether the device computes on the flex CPU backend, with or without gradients.
pub fn is_flex(device: &Device) -> bool {
    match device.as_dispatch() {
        DispatchDevice::Flex(_) => true,
        DispatchDevice::Autodiff(inner) => matches!(inner.clone().inner(), DispatchDevice::Flex(_)),
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

impl Path {
    /// Resolves [`Path::Auto`]: true for the fused kernel, false for tensor operations.
    ///
    /// # Errors
    /// [`OpError::NoFusedKernel`] when the fused kernel is demanded and there is none.
    pub fn is_fused<const D: usize>(
        self,
        operator: &'static str,
        example: &Tensor<D>,
    ) -> Result<bool, OpError> {
        let device = example.device();
        let available = example.dtype() == DType::F32 && is_flex(&device);
        match self {
            Path::Auto => Ok(available),
            Path::Composed => Ok(false),
            Path::Fused if available => Ok(true),
            Path::Fused => {
                Err(OpError::NoFusedKernel { operator, found: format!("{device:?}, {:?}", example.dtype()) })
            }
        }
    }
}
