//! Gradients as plain numbers by parameter name.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Gradients as Graph, Tensor, TensorData};
use fastweight_memory::parameters::PathTracker;

use crate::error::TrainError;

/// One gradient a parameter, in the order of the module's fields (embedding first, head last).
#[derive(Debug, Default)]
pub struct Gradients {
    entries: Vec<(String, TensorData)>,
}

impl Gradients {
    /// Takes the gradients of `module`'s parameters out of a backward pass.
    pub fn take<M: Module>(module: &M, graph: Graph) -> Self {
        struct Taker(PathTracker, Graph, Gradients);
        impl ModuleVisitor for Taker {
            fn enter_module(&mut self, name: &str, container: &str) {
                self.0.enter(name, container);
            }
            fn exit_module(&mut self, _name: &str, container: &str) {
                self.0.exit(container);
            }
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if let Some(grad) = param.val().grad_remove(&mut self.1) {
                    self.2.entries.push((self.0.name(), grad.into_data()));
                }
            }
        }
        let mut taker = Taker(PathTracker::default(), graph, Gradients::default());
        module.visit(&mut taker);
        taker.2
    }

    /// Adds `other`, the gradients of another part of the same batch.
    ///
    /// # Errors
    /// Gradients that are not float32.
    pub fn add(&mut self, other: Gradients) -> Result<(), TrainError> {
        if self.entries.is_empty() {
            *self = other;
            return Ok(());
        }
        for (name, data) in other.entries {
            match self.entries.iter_mut().find(|(known, _)| *known == name) {
                Some((_, sum)) => {
                    let addend = values(&name, &data)?;
                    let sum =
                        sum.as_mut_slice::<f32>().map_err(|reason| TrainError::device(&name, reason))?;
                    sum.iter_mut().zip(addend).for_each(|(sum, addend)| *sum += addend);
                }
                None => self.entries.push((name, data)),
            }
        }
        Ok(())
    }

    /// The gradient of `name`, if the parameter took part.
    ///
    /// # Errors
    /// A gradient that is not float32.
    pub fn get(&self, name: &str) -> Result<Option<&[f32]>, TrainError> {
        match self.entries.iter().find(|(known, _)| known == name) {
            Some((name, data)) => values(name, data).map(Some),
            None => Ok(None),
        }
    }

    /// The Euclidean norm of all gradients together, summed in float64.
    ///
    /// # Errors
    /// Gradients that are not float32.
    pub fn norm(&self) -> Result<f64, TrainError> {
        let mut total = 0.0;
        for (name, data) in &self.entries {
            total += squares(values(name, data)?);
        }
        Ok(total.sqrt())
    }

    /// The parameter nearest the loss whose gradient is not finite: gradients flow from the head back to the
    /// embedding, so the cause lies there.
    pub fn last_non_finite(&self) -> Option<&str> {
        let broken =
            |data: &TensorData| data.as_slice::<f32>().is_ok_and(|v| v.iter().any(|x| !x.is_finite()));
        self.entries.iter().rev().find(|(_, data)| broken(data)).map(|(name, _)| name.as_str())
    }
}

fn values<'a>(name: &str, data: &'a TensorData) -> Result<&'a [f32], TrainError> {
    data.as_slice::<f32>().map_err(|reason| TrainError::device(name, reason))
}

/// Sum of squares in float64, in eight interleaved sums so that it vectorises; the order is fixed.
fn squares(values: &[f32]) -> f64 {
    let mut sums = [0.0f64; 8];
    let chunks = values.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    for chunk in chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(x) * f64::from(x);
        }
    }
    sums.iter().sum::<f64>() + rest
}
