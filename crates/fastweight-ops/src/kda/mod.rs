//! Kimi Delta Attention: the delta rule with a decay for every key channel.

pub mod cpu;
