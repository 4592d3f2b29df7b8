//! AdamW in one pass over memory.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use fastweight_memory::parameters::{ParameterGroup, PathTracker, group_of};
use rayon::prelude::*;

use crate::error::TrainError;
use crate::gradients::Gradients;

/// Elements a thread updates at a time; small enough to stay in the cache, large enough to be worth a task.
const CHUNK: usize = 1 << 14;

/// Constants of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Decay rates of the first and second moment.
    pub betas: [f32; 2],
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay of parameters in [`ParameterGroup::Decay`]: `p <- p (1 - rate weight_decay)`.
    pub weight_decay: f32,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        AdamWOptions { betas: [0.9, 0.95], epsilon: 1e-8, weight_decay: 0.1 }
    }
}

/// AdamW (Loshchilov and Hutter 2019), with bias correction; norms, biases, embeddings and gates do not decay.
///
/// burn's AdamW makes some fifteen passes over memory for each parameter, and its record names the moments by run-specific
/// parameter ids; this one makes one pass, on host memory (which is the tensor's own memory on flex), and names them by
/// parameter.
#[derive(Debug, Clone)]
pub struct AdamW {
    options: AdamWOptions,
    steps: u64,
    moments: BTreeMap<String, Moments>,
}

#[derive(Debug, Clone)]
struct Moments {
    shape: Vec<usize>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl AdamW {
    /// An optimizer that has seen nothing yet.
    pub fn new(options: AdamWOptions) -> Self {
        AdamW { options, steps: 0, moments: BTreeMap::new() }
    }

    /// Moves `module`'s parameters one step of `rate` along `gradients` times `scale` (the clipping factor).
    ///
    /// Parameters without a gradient stay as they are.
    ///
    /// # Errors
    /// A parameter's values cannot be read or do not have their gradient's size, or an updated value or moment is not
    /// finite; the moments are then of no use.
    pub fn step<M: Module>(
        &mut self,
        module: M,
        gradients: &Gradients,
        rate: f64,
        scale: f32,
    ) -> Result<M, TrainError> {
        self.steps += 1;
        let mut mapper =
            Updater { path: PathTracker::default(), optimizer: self, gradients, rate, scale, error: None };
        let module = module.map(&mut mapper);
        match mapper.error {
            None => Ok(module),
            Some(error) => Err(error),
        }
    }

    /// Both moments of every parameter, as `first.NAME` and `second.NAME`.
    pub fn export(&self) -> Vec<(String, TensorData)> {
        let entry = |kind, name: &str, values: &[f32], shape: &[usize]| {
            (format!("{kind}.{name}"), TensorData::new(values.to_vec(), shape.to_vec()))
        };
        let both = |(name, m): (&String, &Moments)| {
            [entry("first", name, &m.first, &m.shape), entry("second", name, &m.second, &m.shape)]
        };
        self.moments.iter().flat_map(both).collect()
    }

    /// The optimizer after `steps` steps that ended with the moments of [`AdamW::export`].
    ///
    /// # Errors
    /// A moment is not float32, or only one of the two came.
    pub fn import(
        options: AdamWOptions,
        steps: u64,
        entries: Vec<(String, TensorData)>,
    ) -> Result<Self, TrainError> {
        let mut moments: BTreeMap<String, Moments> = BTreeMap::new();
        for (full, data) in entries {
            let values = data.try_to_vec::<f32>().map_err(|reason| TrainError::device(&full, reason))?;
            let (kind, name) = full.split_once('.').unwrap_or(("", &full));
            let empty = || Moments { shape: data.shape().to_vec(), first: vec![], second: vec![] };
            let entry = moments.entry(name.to_string()).or_insert_with(empty);
            match kind {
                "first" => entry.first = values,
                "second" => entry.second = values,
                _ => {
                    return Err(TrainError::device(
                        &full,
                        "expected a name that begins with `first.` or `second.`",
                    ));
                }
            }
        }
        match moments.iter().find(|(_, m)| m.first.len() != m.second.len()) {
            Some((name, _)) => {
                Err(TrainError::device(name, "the optimizer's file has only one of its two moments"))
            }
            None => Ok(AdamW { options, steps, moments }),
        }
    }

    fn update(
        &mut self,
        name: &str,
        data: &mut TensorData,
        gradient: &[f32],
        rate: f64,
        scale: f32,
    ) -> Result<(), TrainError> {
        let shape = data.shape().to_vec();
        let values = data.as_mut_slice::<f32>().map_err(|reason| TrainError::device(name, reason))?;
        let size = values.len();
        let fresh = || Moments { shape: shape.clone(), first: vec![0.0; size], second: vec![0.0; size] };
        let moments = self.moments.entry(name.to_string()).or_insert_with(fresh);
        if moments.first.len() != size || gradient.len() != size {
            return Err(TrainError::device(name, "the gradient or the optimizer's moment has another size"));
        }
        let AdamWOptions { betas: [beta1, beta2], epsilon, weight_decay } = self.options;
        let correction = |beta: f32| 1.0 - f64::from(beta).powf(self.steps as f64);
        let root2 = (1.0 / correction(beta2)).sqrt() as f32;
        let size1 = (rate / correction(beta1)) as f32;
        let keep = match group_of(name, shape.len()) {
            ParameterGroup::Decay => (1.0 - rate * f64::from(weight_decay)) as f32,
            ParameterGroup::NoDecay => 1.0,
        };
        let chunks = values
            .par_chunks_mut(CHUNK)
            .zip(moments.first.par_chunks_mut(CHUNK))
            .zip(moments.second.par_chunks_mut(CHUNK))
            .zip(gradient.par_chunks(CHUNK));
        let finite = chunks.map(|(((values, first), second), gradient)| {
            let mut finite = true;
            for (((p, m), v), g) in values.iter_mut().zip(first).zip(second).zip(gradient) {
                let g = g * scale;
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                *p = *p * keep - size1 * *m / (v.sqrt() * root2 + epsilon);
                finite &= p.is_finite() & m.is_finite() & v.is_finite();
            }
            finite
        });
        if finite.reduce(|| true, |a, b| a & b) {
            return Ok(());
        }
        Err(TrainError::NonFinite {
            step: Some(self.steps as usize),
            what: "an updated weight or its moment",
            place: format!("the parameter {name}"),
        })
    }
}

struct Updater<'a> {
    path: PathTracker,
    optimizer: &'a mut AdamW,
    gradients: &'a Gradients,
    rate: f64,
    scale: f32,
    error: Option<TrainError>,
}

impl ModuleMapper for Updater<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.path.name();
        let gradient = match self.gradients.get(&name) {
            Ok(Some(gradient)) => gradient,
            Ok(None) => return param,
            Err(error) => {
                self.error.get_or_insert(error);
                return param;
            }
        };
        let (id, tensor, mapper) = param.consume();
        let (device, tracked) = (tensor.device(), tensor.is_require_grad());
        let mut data = tensor.without_autodiff().into_data();
        if let Err(error) = self.optimizer.update(&name, &mut data, gradient, self.rate, self.scale) {
            self.error.get_or_insert(error);
        }
        let tensor = Tensor::from_data(data, &device);
        Param::from_mapped_value(id, if tracked { tensor.require_grad() } else { tensor }, mapper)
    }
}
