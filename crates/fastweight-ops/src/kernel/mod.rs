//! Pieces shared by the fused CPU kernels.
//!
//! - `simd`: lanes of `f32`, the instruction sets and the run-time choice between them;
//! - `tile`: register tiles, the one shape of every product; `workspace`: a thread's scratch memory;
//! - `gates`: decays inside a chunk; `memory`: what the matrix memories share; `plan`: parallel tasks;
//! - `forward`, `backward`: the chunked passes of the delta rule and of linear attention; `step`: one token.
//!
//! The operators' own `cpu.rs` files only say which rule and which inputs they have.

pub(crate) mod ahead;
pub(crate) mod backward;
mod backward_rows;
mod backward_scalars;
mod dims;
pub(crate) mod forward;
mod forward_rows;
pub(crate) mod gates;
pub(crate) mod memory;
mod plan;
pub(crate) mod recurrent;
pub mod simd;
#[cfg(target_arch = "aarch64")]
mod simd_neon;
mod simd_portable;
#[cfg(target_arch = "x86_64")]
mod simd_x86;
pub(crate) mod step;
pub(crate) mod tile;
pub(crate) mod workspace;

pub use dims::Dims;
pub use simd::{InstructionSet, with_instruction_set};
