//! Deep memories: the tensor form and the fused kernel against the plain loop, and what holds for any numbers.

#[path = "../comparing/mod.rs"]
mod comparing;

mod arguments;
mod fixtures;
mod gates;
mod gradients;
mod inner;
mod kernel;
mod loops;
mod memories;
mod partition;
mod problem;
mod soak;
mod states;
mod training;
