//! Memories of one layer against numbers of public implementations: Titans with a matrix, TTT-Linear.

use std::path::Path as FilePath;

use burn::tensor::{DType, Device, Tensor, TensorData};
use fastweight_ops::deep_memory::{
    DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, RateOf, deep_memory,
};
use fastweight_ops::{Offsets, Path};
use safetensors::{Dtype, SafeTensors};

use crate::problem::{Array, assert_same, read};

struct Case {
    arrays: Vec<(String, Array)>,
    scale: f64,
    offsets: Option<Vec<usize>>,
    device: Device,
    dtype: DType,
}

fn cases(operator: &str, dtype: DType, run: impl Fn(&str, &Case)) {
    let folder = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/ops");
    let manifest = std::fs::read_to_string(folder.join("manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let mut count = 0;
    for entry in manifest["cases"].as_array().unwrap() {
        if entry["operator"] != operator {
            continue;
        }
        let file = entry["file"].as_str().unwrap();
        let bytes = std::fs::read(folder.join(file)).unwrap();
        let file_tensors = SafeTensors::deserialize(&bytes).unwrap();
        let array = |(name, view): (String, safetensors::tensor::TensorView)| {
            let data = view.data();
            let values = match view.dtype() {
                Dtype::F32 => data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
                _ => data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            };
            (name, Array { shape: view.shape().to_vec(), values })
        };
        let offsets = entry["cu_seqlens"].as_array();
        let case = Case {
            arrays: file_tensors.tensors().into_iter().map(array).collect(),
            scale: entry["scale"].as_f64().unwrap(),
            offsets: offsets.map(|list| list.iter().map(|n| n.as_u64().unwrap() as usize).collect()),
            device: Device::flex().autodiff(),
            dtype,
        };
        run(&format!("{file} {dtype:?}"), &case);
        count += 1;
    }
    assert_eq!(count, 3, "{operator}");
}

impl Case {
    fn array(&self, name: &str) -> Option<&Array> {
        self.arrays.iter().find(|(n, _)| n == name).map(|(_, array)| array)
    }

    fn tensor<const D: usize>(&self, array: &Array) -> Tensor<D> {
        let data = TensorData::new(array.values.clone(), array.shape.clone()).convert_dtype(self.dtype);
        Tensor::from_data(data, (&self.device, self.dtype))
    }

    fn leaf<const D: usize>(&self, name: &str) -> Tensor<D> {
        self.tensor::<D>(self.array(name).unwrap()).require_grad()
    }

    /// An initial state, zeros where the case has none.
    fn state(&self, name: &str) -> Tensor<4> {
        let array = self.array(&format!("init.{name}")).cloned().unwrap_or_else(|| {
            let shape = self.array(&format!("final.{name}")).unwrap().shape.clone();
            Array { values: vec![0.0; shape.iter().product()], shape }
        });
        self.tensor::<4>(&array).require_grad()
    }

    fn offsets(&self) -> Option<Offsets> {
        let time = self.array("in.q").unwrap().shape[1];
        self.offsets.as_ref().map(|offsets| Offsets::new(offsets, time).unwrap())
    }

    fn expected(&self, names: &[&str]) -> Vec<(String, Array)> {
        names.iter().map(|name| (name.to_string(), self.array(name).unwrap().clone())).collect()
    }

    fn limits(&self) -> (f64, f64) {
        if self.dtype == DType::F64 { (1e-10, 1e-10) } else { (1e-5, 1e-4) }
    }
}

#[test]
fn titans_with_a_matrix() {
    let memory = DeepMemory { depth: 1, residual: false, chunk: 1, ..DeepMemory::default() };
    for dtype in [DType::F64, DType::F32] {
        cases("titans_linear", dtype, |label, case| {
            let [q, k, v] = ["in.q", "in.k", "in.v"].map(|name| case.leaf::<4>(name));
            let [rate, momentum, alpha] = ["in.theta", "in.eta", "in.alpha"].map(|name| case.leaf::<3>(name));
            let (m, s) = (case.state("M"), case.state("S"));
            let tokens = DeepTokens {
                q: q.clone().mul_scalar(case.scale),
                k: k.clone(),
                v: v.clone(),
                rate: Some(DeepGate::Heads(rate.clone())),
                momentum: Some(DeepGate::Heads(momentum.clone())),
                decay: Some(DeepGate::Heads(alpha.clone())),
                threshold: None,
            };
            let mut state = DeepState::new(vec![m.clone()]);
            state.momentum = Some(vec![s.clone()]);
            let offsets = case.offsets();
            let (o, state) = deep_memory(&memory, tokens, None, state, offsets.as_ref(), Path::Auto).unwrap();
            let (after_m, after_s) = (state.current[0].clone(), state.momentum.unwrap()[0].clone());
            let found = vec![
                ("out.o".to_string(), read(&o)),
                ("final.M".to_string(), read(&after_m)),
                ("final.S".to_string(), read(&after_s)),
            ];
            let (forward, gradient) = case.limits();
            assert_same(label, &found, &case.expected(&["out.o", "final.M", "final.S"]), forward);

            let up = |name: &str| case.tensor::<4>(case.array(name).unwrap());
            let loss = (o * up("up.o")).sum() + (after_m * up("up.M")).sum() + (after_s * up("up.S")).sum();
            let grads = loss.backward();
            let four = |name: &str, x: &Tensor<4>| (name.to_string(), read(&x.grad(&grads).unwrap()));
            let three = |name: &str, x: &Tensor<3>| (name.to_string(), read(&x.grad(&grads).unwrap()));
            let found = vec![
                four("grad.v", &v),
                four("grad.q", &q),
                four("grad.k", &k),
                three("grad.theta", &rate),
                three("grad.eta", &momentum),
                three("grad.alpha", &alpha),
                four("grad.M", &m),
                four("grad.S", &s),
            ];
            let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
            assert_same(label, &found, &case.expected(&names), gradient);
        });
    }
}

/// The fixture adds the normalised value to what the layer returns, the memory to its input: the layer's own values
/// are compared, behind the same LayerNorm.
#[test]
fn ttt_linear() {
    let memory =
        DeepMemory { depth: 1, bias: true, chunk: 16, rate: RateOf::Reading, ..DeepMemory::default() };
    for dtype in [DType::F64, DType::F32] {
        cases("ttt_linear", dtype, |label, case| {
            let q = case.leaf::<4>("in.q").mul_scalar(case.scale);
            let rate = case.leaf::<4>("in.eta").squeeze_dim::<3>(3);
            let weight = Tensor::cat(vec![case.state("W"), case.state("bias")], 2);
            let norm = DeepNorm { weight: case.leaf("in.ln_w"), bias: case.leaf("in.ln_b") };
            let tokens = DeepTokens {
                q: q.clone(),
                k: case.leaf("in.k"),
                v: case.leaf("in.v"),
                rate: Some(DeepGate::Heads(rate)),
                momentum: None,
                decay: None,
                threshold: None,
            };
            let state = DeepState::new(vec![weight]);
            let offsets = case.offsets();
            let (o, state) =
                deep_memory(&memory, tokens, Some(&norm), state, offsets.as_ref(), Path::Auto).unwrap();
            let after = state.current[0].clone();
            let key = after.dims()[2] - 1;
            let found = vec![
                ("o".to_string(), read(&(o - q))),
                ("final.W".to_string(), read(&after.clone().narrow(2, 0, key))),
                ("final.bias".to_string(), read(&after.narrow(2, key, 1))),
            ];
            let layer = case.array("out.o_pre").unwrap();
            let mut normalised = layer.clone();
            let size = *layer.shape.last().unwrap();
            let (w, b) = (&case.array("in.ln_w").unwrap().values, &case.array("in.ln_b").unwrap().values);
            for (at, row) in normalised.values.chunks_mut(size).enumerate() {
                let mean = row.iter().sum::<f64>() / size as f64;
                let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / size as f64;
                let head = at % (w.len() / size) * size;
                for (i, x) in row.iter_mut().enumerate() {
                    *x = (*x - mean) / (variance + 1e-6).sqrt() * w[head + i] + b[head + i];
                }
            }
            let mut expected = vec![("o".to_string(), normalised)];
            expected.extend(case.expected(&["final.W", "final.bias"]));
            assert_same(label, &found, &expected, case.limits().0);
        });
    }
}
