//! The architectures of Titans: a long-term memory, attention, and persistent tokens.

use std::ops::Range;

use serde_json::{Value, json};

use super::deep::{Network, deep_head};
use super::{empty, layer, read, titans_head};
use crate::{H, K, Plain, Rows, dot, head, rotate, sigmoid, unit};

/// The parameters of a part of a layer.
fn part(p: &Plain, name: &str) -> Plain {
    let prefix = format!("{name}.");
    let own =
        p.0.iter()
            .filter_map(|(name, values)| Some((name.strip_prefix(&prefix)?.to_owned(), values.clone())));
    Plain(own.collect())
}

/// Name and options of the memory inside.
fn memory_options(options: &Value) -> (&'static str, Value) {
    let or = |name: &str, usual: f64| options[name].as_f64().unwrap_or(usual);
    if options["memory"] == "matrix" {
        return (
            "titans",
            json!({"theta_max": or("theta_max", 1.0), "forget_shift": or("forget_shift", 4.0)}),
        );
    }
    let (theta_max, forget_shift) = (or("theta_max", 0.1), or("forget_shift", 8.0));
    let chunk = &options["chunk"];
    (
        "titans_mlp",
        json!({"kind": "titans_mlp", "theta_max": theta_max, "forget_shift": forget_shift, "chunk": chunk}),
    )
}

fn rms(p: &Plain, name: &str, x: &[f64]) -> Vec<f64> {
    let weight = p.0[&format!("{name}.weight")].clone();
    Plain([("norm.weight".to_owned(), weight)].into()).norm(x)
}

fn tokens(p: &Plain, name: &str, width: usize) -> Rows {
    p.0.get(name).map_or_else(Vec::new, |values| values.chunks(width).map(<[f64]>::to_vec).collect())
}

/// Softmax attention of one query over keys and values.
fn attend(q: &[f64], keys: &Rows, values: &Rows) -> Vec<f64> {
    let weights: Vec<f64> = keys.iter().map(|k| (dot(q, k) / (K as f64).sqrt()).exp()).collect();
    let sum: f64 = weights.iter().sum();
    read(values, &weights).into_iter().map(|v| v / sum).collect()
}

/// Attention of token t over unrotated tokens and over others at positions, all heads.
fn attention(
    p: &Plain,
    x: &[f64],
    at: usize,
    still: &Rows,
    seen: &[(usize, &[f64])],
    rope: bool,
) -> Vec<f64> {
    let turn = |x: &[f64], at: usize| if rope { rotate(x, at) } else { x.to_vec() };
    let heads = (0..H).flat_map(|h| {
        let still = still.iter().map(|x| (0, x.as_slice()));
        let all: Vec<(usize, &[f64])> = still.chain(seen.iter().copied()).collect();
        let keys: Rows = all.iter().map(|(at, x)| turn(head(&p.linear("k", x), H, h), *at)).collect();
        let values: Rows = all.iter().map(|(_, x)| head(&p.linear("v", x), H, h).to_vec()).collect();
        attend(&turn(head(&p.linear("q", x), H, h), at), &keys, &values)
    });
    heads.collect()
}

fn joined(p: &Plain, y: &[f64], m: &[f64]) -> Vec<f64> {
    let gate = rms(p, "join.memory_norm", m);
    let product: Vec<f64> = y.iter().zip(gate).map(|(y, m)| y * sigmoid(m)).collect();
    p.linear("join.o", &product)
}

fn window(t: usize, options: &Value) -> Range<usize> {
    (t + 1).saturating_sub(options["window"].as_u64().unwrap() as usize)..t + 1
}

pub fn mag(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let (name, inner) = memory_options(options);
    let m = layer(name, &part(p, "memory"), x, &inner).unwrap();
    let own = part(p, "attention");
    let persistent = tokens(&own, "persistent", x[0].len());
    let output = |t: usize| {
        let seen: Vec<(usize, &[f64])> = window(t, options).map(|i| (i, x[i].as_slice())).collect();
        let o = attention(&own, &x[t], t, &persistent, &seen, options["rope"] == true);
        joined(p, &rms(p, "join.attention_norm", &own.linear("y", &o)), &m[t])
    };
    (0..x.len()).map(output).collect()
}

pub fn mal(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let (name, inner) = memory_options(options);
    let mut all = tokens(p, "persistent", x[0].len());
    let prefix = all.len();
    all.extend(x.iter().cloned());
    let m = layer(name, &part(p, "memory"), &all, &inner).unwrap();
    let m: Rows = m.iter().map(|m| rms(p, "norm", m)).collect();
    let own = part(p, "attention");
    let output = |t: usize| {
        let seen: Vec<(usize, &[f64])> = window(t, options).map(|i| (i, m[i].as_slice())).collect();
        own.linear("o", &attention(&own, &m[t], t, &Vec::new(), &seen, options["rope"] == true))
    };
    (prefix..all.len()).map(output).collect()
}

/// A head's memory after some tokens.
enum Memory {
    Matrix(Rows),
    Network(Network),
}

impl Memory {
    fn after(p: &Plain, x: &[Vec<f64>], options: &Value, h: usize) -> Self {
        let (name, inner) = memory_options(options);
        match (name, x.is_empty()) {
            ("titans", true) => Self::Matrix(empty()),
            ("titans", false) => Self::Matrix(titans_head(p, &x.to_vec(), &inner, h).1),
            (_, true) => Self::Network(Network::new(p, h)),
            (_, false) => Self::Network(deep_head(p, &x.to_vec(), &inner, h).1),
        }
    }

    fn reading(&self, q: &[f64]) -> Vec<f64> {
        match self {
            Self::Matrix(s) => read(s, q),
            Self::Network(network) => network.reading(q),
        }
    }
}

pub fn mac(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let segment = options["segment"].as_u64().unwrap() as usize;
    let (memory, own) = (part(p, "memory"), part(p, "attention"));
    let persistent = tokens(&own, "persistent", x[0].len());
    let q = p.projection("recall", x, true);
    let mut y: Rows = Vec::new();
    while y.len() < x.len() {
        let start = y.len();
        let end = x.len().min(start + segment);
        let memories: Vec<Memory> = (0..H).map(|h| Memory::after(&memory, &y, options, h)).collect();
        let recalled = |t: usize| {
            let heads = memories.iter().enumerate();
            let all: Vec<f64> =
                heads.flat_map(|(h, memory)| memory.reading(&unit(head(&q[t], H, h)))).collect();
            p.linear("h", &all)
        };
        let recalled: Rows = (start..end).map(recalled).collect();
        for t in start..end {
            let seen: Vec<(usize, &[f64])> = (0..=t - start)
                .flat_map(|i| [(i, x[start + i].as_slice()), (i, recalled[i].as_slice())])
                .collect();
            let o = attention(&own, &x[t], t - start, &persistent, &seen, options["rope"] == true);
            y.push(rms(p, "join.attention_norm", &own.linear("y", &o)));
        }
    }
    let (name, inner) = memory_options(options);
    let m = layer(name, &memory, &y, &inner).unwrap();
    y.iter().zip(&m).map(|(y, m)| joined(p, y, m)).collect()
}
