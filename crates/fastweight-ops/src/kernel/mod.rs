//! Pieces shared by the fused CPU kernels.

mod dims;

pub use dims::Dims;
