//! The algebra of rules: definitions against stored numbers, closed forms against objectives, tensors against
//! definitions.

mod blocks;
mod choices;
mod fixtures;
mod layer;
mod minimise;
mod named;
mod operators;
mod outputs;
mod support;
mod tensors;
