//! Pieces shared by the fused CPU kernels.

pub mod backward;
mod backward_rows;
mod dims;
pub mod forward;
pub mod gates;
pub mod memory;
mod plan;
pub mod simd;
#[cfg(target_arch = "aarch64")]
mod simd_neon;
mod simd_portable;
#[cfg(target_arch = "x86_64")]
mod simd_x86;
pub mod step;
pub mod tile;
pub mod workspace;

pub use dims::Dims;
pub use simd::{InstructionSet, with_instruction_set};
