//! Gated linear attention: a matrix memory with a decay for every key channel.

pub mod cpu;
