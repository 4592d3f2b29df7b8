//! Small recipes and readers shared by the tests.

#![allow(dead_code)]

use burn::tensor::Device;
use fastweight_memory::parameters;
use fastweight_train::recipe::ResolvedModel;
use fastweight_train::{Recipe, Task, Trainer};

/// A recall recipe with `train` lines added and the mixers given.
pub fn recall(train: &str, mixers: &[&str]) -> Recipe {
    let models: String =
        mixers.iter().map(|m| format!("[[models]]\nname = \"{m}\"\nmixers = [\"{m}\"]\n")).collect();
    let text = format!(
        "name = \"test\"\n[task]\nkind = \"recall\"\nvocab = 32\nlength = 16\npairs = 2\n\
         [train]\nlearning_rate = 1e-2\n{train}\n[model]\nwidth = 16\nlayers = 2\nheads = 2\n{models}"
    );
    Recipe::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// A text recipe.
pub fn text(train: &str, mixer: &str) -> Recipe {
    let text = format!(
        "name = \"test\"\n[task]\nkind = \"text\"\ncontext = 32\nheld_out = 0.2\n\
         [train]\nlearning_rate = 1e-2\n{train}\n\
         [model]\nname = \"{mixer}\"\nmixers = [\"{mixer}\"]\nwidth = 16\nlayers = 1\nheads = 2\n"
    );
    Recipe::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// Some text in a file.
pub fn text_file(folder: &std::path::Path) -> std::path::PathBuf {
    let path = folder.join("text.txt");
    let text: String = (0..300).map(|n| format!("{n} sheep, and then {} more; ", n * 7 % 13)).collect();
    std::fs::write(&path, text).unwrap();
    path
}

/// The task and first model of a recall recipe.
pub fn open(recipe: &Recipe) -> (Task, ResolvedModel) {
    let task = Task::open(&recipe.task, None).unwrap();
    let model = recipe.resolve_first(task.vocab()).unwrap();
    (task, model)
}

/// The losses of `steps` steps.
pub fn losses(trainer: &mut Trainer, steps: usize) -> Vec<u64> {
    (0..steps).map(|_| trainer.step().unwrap().to_bits()).collect()
}

/// Every parameter as bits.
pub fn weights(model: &fastweight_models::LanguageModel) -> Vec<(String, Vec<u32>)> {
    let bits = |data: burn::tensor::TensorData| data.iter::<f32>().map(f32::to_bits).collect();
    parameters::export(model).into_iter().map(|(name, data)| (name, bits(data))).collect()
}

/// The CPU.
pub fn device() -> Device {
    Device::flex()
}
