//! Pointwise functions of the layers: the SwiGLU product and the log decay gate.

mod cpu;

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::activation::{silu, softplus};

use crate::check::Arguments;
use crate::fused::apply;
use crate::{OpError, Path};

const SWIGLU: &str = "swiglu";
const LOG_GATE: &str = "log_gate";

/// `silu(gate) * up`, elementwise on tensors of one shape. Source: Shazeer 2020 (2002.05202).
///
/// # Errors
/// `up` of another shape than `gate`.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Result<Tensor<D>, OpError> {
    swiglu_on(gate, up, Path::Auto)
}

/// [`swiglu`] on a chosen path.
///
/// # Errors
/// Those of [`swiglu`], and a path that does not exist for the tensors.
pub fn swiglu_on<const D: usize>(gate: Tensor<D>, up: Tensor<D>, path: Path) -> Result<Tensor<D>, OpError> {
    Arguments::new(SWIGLU, &gate).tensor("up", &up, gate.dims())?;
    if !path.is_fused(SWIGLU, &gate)? {
        return Ok(silu(gate) * up);
    }
    let op = cpu::FusedSwiglu { shape: gate.dims().to_vec() };
    let [y, ..] = apply(Arc::new(op), vec![gate.into_dispatch(), up.into_dispatch()]);
    Ok(Tensor::from_dispatch(y))
}

/// The log decay `-exp(a_log) softplus(a + dt_bias)` of a scalar gate per head and token.
///
/// `a [B, T, H]`, `a_log, dt_bias [H]`; never above zero. Source: Mamba-2 (2405.21060), Gated DeltaNet
/// (2412.06464).
///
/// # Errors
/// `a_log` or `dt_bias` of another size than `H`.
pub fn log_gate(a: Tensor<3>, a_log: Tensor<1>, dt_bias: Tensor<1>) -> Result<Tensor<3>, OpError> {
    let [_, _, heads] = a.dims();
    let arguments = Arguments::new(LOG_GATE, &a);
    arguments.tensor("a_log", &a_log, [heads])?;
    arguments.tensor("dt_bias", &dt_bias, [heads])?;
    let rate = a_log.exp().neg().reshape([1, 1, heads]);
    Ok(softplus(a + dt_bias.reshape([1, 1, heads]), 1.0) * rate)
}
