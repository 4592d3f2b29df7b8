//! The delta rule with momentum: what is written passes through a second, decaying memory.

pub mod cpu;
