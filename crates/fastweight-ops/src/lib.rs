//! Differentiable sequence-memory operators.
//!
//! Each operator has one folder: `reference.rs` is its definition, a plain float64 loop; `cpu.rs` the fused
//! chunked kernel with a hand-written backward pass; `composed.rs` the same on tensor operations of any
//! device; `mod.rs` the public function on tensors. All forms agree in outputs, final states and gradients.
//!
//! Shapes are `[batch, time, heads, dim]`; a matrix state is `[batch, heads, key, value]`; gates are logs.

pub mod activation;
mod check;
mod chunked;
pub mod comba;
mod decay;
pub mod delta;
pub mod delta_product;
pub mod dplr;
mod error;
pub mod fused;
pub mod gla;
pub mod kda;
pub mod kernel;
pub mod linear;
pub mod loss;
pub mod momentum_delta;
pub mod norm;
pub mod normalised_linear;
mod offsets;
mod options;
mod pointwise;
mod reference;
pub mod rope;
pub mod short_conv;
pub mod softmax;
pub mod titans;
pub mod ttt;

pub use error::OpError;
pub use offsets::Offsets;
pub use options::{Path, SequenceOptions, is_flex};
