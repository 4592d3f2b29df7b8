//! Names of a module's parameters.
//!
//! A parameter's name is its path through the module's fields, `blocks.0.mixer.q.weight`; the variant of an
//! enum module (which mixer it is) is no part of the path.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorData};

use crate::MemoryError;

/// Whether AdamW shrinks a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterGroup {
    /// Weight decay applies: the matrices of linear maps.
    Decay,
    /// No weight decay: norms, biases, embeddings, gate parameters (`a_log`, `dt_bias`, `d_skip`) and short
    /// convolutions.
    NoDecay,
}

/// One trained parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Path through the module's fields.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Whether weight decay applies.
    pub group: ParameterGroup,
    /// Its identity in optimizers and gradients.
    pub id: ParamId,
}

/// Follows a traversal and knows the name of the parameter it stands at.
///
/// Call [`PathTracker::enter`] and [`PathTracker::exit`] from the methods of the same names of a
/// `ModuleVisitor` or `ModuleMapper`.
#[derive(Debug, Clone, Default)]
pub struct PathTracker(Vec<String>);

impl PathTracker {
    /// The traversal goes into a field.
    pub fn enter(&mut self, name: &str, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.push(name.to_owned());
        }
    }

    /// The traversal leaves a field.
    pub fn exit(&mut self, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.pop();
        }
    }

    /// The name of the parameter where the traversal stands.
    pub fn name(&self) -> String {
        self.0.join(".")
    }
}

/// The group of a parameter, from its name and rank.
pub fn group_of(name: &str, rank: usize) -> ParameterGroup {
    let mut parts = name.rsplit('.');
    let (leaf, parent) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    let vector = matches!(
        leaf,
        "conv"
            | "embedding"
            | "table"
            | "persistent"
            | "ln_weight"
            | "ln_bias"
            | "start_bias"
            | "token_table"
    );
    if rank < 2 || vector || parent == "embedding" { ParameterGroup::NoDecay } else { ParameterGroup::Decay }
}

/// Every float parameter of a module, in the order of its fields.
pub fn list<M: Module>(module: &M) -> Vec<ParameterInfo> {
    struct Lister(PathTracker, Vec<ParameterInfo>);
    impl ModuleVisitor for Lister {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            self.0.exit(container);
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let name = self.0.name();
            let group = group_of(&name, D);
            self.1.push(ParameterInfo { shape: param.lazy_shape().to_vec(), group, id: param.id, name });
        }
    }
    let mut lister = Lister(PathTracker::default(), Vec::new());
    module.visit(&mut lister);
    lister.1
}

/// Names and values of every float parameter, in the order of [`list`].
pub fn export<M: Module>(module: &M) -> Vec<(String, TensorData)> {
    struct Exporter(PathTracker, Vec<(String, TensorData)>);
    impl ModuleVisitor for Exporter {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            self.0.exit(container);
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push((self.0.name(), param.val().into_data()));
        }
    }
    let mut exporter = Exporter(PathTracker::default(), Vec::new());
    module.visit(&mut exporter);
    exporter.1
}

/// Replaces every float parameter by the value `source` gives for it; identities and the wish for gradients stay.
///
/// # Errors
/// [`MemoryError::Parameter`] when `source` has no value for a parameter or one of another shape. The module is
/// consumed; nothing is half loaded.
pub fn import<M: Module>(
    module: M,
    source: impl FnMut(&ParameterInfo) -> Option<TensorData>,
) -> Result<M, MemoryError> {
    struct Importer<F> {
        path: PathTracker,
        source: F,
        error: Option<MemoryError>,
    }
    impl<F: FnMut(&ParameterInfo) -> Option<TensorData>> ModuleMapper for Importer<F> {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.enter(name, container);
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            self.path.exit(container);
        }
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let name = self.path.name();
            let shape = param.lazy_shape().to_vec();
            let group = group_of(&name, D);
            let info = ParameterInfo { name, shape, group, id: param.id };
            let reason = match (self.source)(&info) {
                Some(data) if data.shape().to_vec() == info.shape => {
                    return replace(param, info.id, data);
                }
                Some(data) => {
                    format!("its shape is {:?}, expected {:?}", data.shape().to_vec(), info.shape)
                }
                None => format!("it is missing; a tensor of shape {:?} was expected", info.shape),
            };
            self.error.get_or_insert(MemoryError::Parameter { name: info.name, reason });
            param
        }
    }
    let mut importer = Importer { path: PathTracker::default(), source, error: None };
    let module = module.map(&mut importer);
    importer.error.map_or(Ok(module), Err)
}

/// The parameter with a new identity and value, on its device; the old value is never computed.
pub(crate) fn replace<const D: usize>(
    param: Param<Tensor<D>>,
    id: ParamId,
    data: TensorData,
) -> Param<Tensor<D>> {
    let device = param.lazy_device();
    Param::initialized(id, Tensor::from_data(data, &device)).set_require_grad(true)
}
