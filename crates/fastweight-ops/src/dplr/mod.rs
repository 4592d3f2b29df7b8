//! Diagonal plus low rank: the recurrence of RWKV-7.

pub mod cpu;
