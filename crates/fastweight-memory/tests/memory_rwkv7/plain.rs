//! What the formulas share: a module's parameters as float64 numbers, and a sequence as rows.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::Tensor;
use fastweight_memory::parameters::export;

use crate::common::{VOCAB, input, moved, numbers, tokens, values};

pub type Rows = Vec<Vec<f64>>;

/// Parameters of a module by name.
pub struct Plain(pub HashMap<String, Vec<f64>>);

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn map(weight: &[f64], x: &[f64]) -> Vec<f64> {
    let outputs = weight.len() / x.len();
    (0..outputs).map(|o| (0..x.len()).map(|i| x[i] * weight[i * outputs + o]).sum()).collect()
}

/// `x` mixed with what came before it, zero before the first.
pub fn lerps(x: &Rows, mix: &[f64]) -> Rows {
    let before = |t: usize, c: usize| if t > 0 { x[t - 1][c] } else { 0.0 };
    let token = |t: usize| (0..mix.len()).map(|c| x[t][c] + (before(t, c) - x[t][c]) * mix[c]).collect();
    (0..x.len()).map(token).collect()
}

pub fn layer_norm(x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let normed = |c: usize| (x[c] - mean) / (variance + 1e-5).sqrt() * weight[c] + bias[c];
    (0..x.len()).map(normed).collect()
}

pub fn product(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

impl Plain {
    /// The module with every parameter off its initial value, where many are zero or alike, and its numbers.
    pub fn of<M: Module>(module: M, seed: u64) -> (M, Self) {
        let values = export(&module);
        let directions =
            values.iter().zip(seed..).map(|((_, data), seed)| numbers(data.num_elements(), seed));
        let module = moved(&module, &directions.collect::<Vec<_>>(), 0.3);
        let values = export(&module).into_iter().map(|(name, data)| (name, data.iter::<f64>().collect()));
        let plain = Self(values.collect());
        (module, plain)
    }

    pub fn get(&self, name: &str) -> &[f64] {
        &self.0[name]
    }

    pub fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        layer_norm(x, self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")))
    }

    /// A token's vector in a table by id, with the map of its embedding if there is one.
    pub fn table(&self, name: &str, id: usize, embedding: &[f64]) -> Vec<f64> {
        let table = self.get(&format!("{name}.token_table"));
        let channels = table.len() / VOCAB;
        let own = &table[id * channels..(id + 1) * channels];
        match self.0.get(&format!("{name}.from_embedding")) {
            Some(weight) => own.iter().zip(map(weight, embedding)).map(|(a, b)| a + b).collect(),
            None => own.to_vec(),
        }
    }
}

pub fn rows(x: &Tensor<3>) -> Rows {
    let width = x.dims()[2];
    values(x).chunks(width).map(|row| row.iter().map(|v| f64::from(*v)).collect()).collect()
}

pub fn flat(rows: &Rows) -> Vec<f32> {
    rows.iter().flatten().map(|v| *v as f32).collect()
}

/// The ids of `common::shared`, and the embedding of each token.
pub fn token_ids(x: &Tensor<3>) -> (Vec<usize>, Rows) {
    let ids: Vec<usize> = tokens(x).to_data().iter::<i64>().map(|id| id as usize).collect();
    let width = x.dims()[2];
    let table: Vec<f32> = values(&input([VOCAB, width], 77, &x.device()));
    let row = |id: &usize| table[id * width..(id + 1) * width].iter().map(|v| f64::from(*v)).collect();
    let embeddings = ids.iter().map(row).collect();
    (ids, embeddings)
}
