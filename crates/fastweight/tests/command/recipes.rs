//! Recipes small enough for a test.

/// Two models on recall, two seeds; `steps` steps each.
pub fn recall(steps: usize) -> String {
    format!(
        r#"
name = "tiny"

[task]
kind = "recall"
vocab = 16
length = 16
pairs = 2

[train]
steps = {steps}
batch = 4
learning_rate = 3e-3
eval_every = 4
eval_batches = 1
seeds = [1, 2]
checkpoint_every = 3

[model]
width = 16
layers = 1
heads = 2
mlp_hidden = 32

[[models]]
name = "attention"
mixers = ["softmax_attention"]

[[models]]
name = "delta"
mixers = ["delta_net"]

[compare.quick]
steps = 2
seeds = [7]
"#
    )
}

/// One model on a text; `steps` steps.
pub fn text(steps: usize) -> String {
    format!(
        r#"
name = "letters"

[task]
kind = "text"
context = 16
held_out = 0.1

[train]
steps = {steps}
batch = 4
learning_rate = 1e-2
warmup = 0.1
eval_every = 20
checkpoint_every = 5

[model]
width = 32
layers = 1
heads = 2
mlp_hidden = 32
mixers = ["gated_delta_net"]
"#
    )
}

/// Recall and parity, two models, one seed; `steps` steps each.
pub fn tasks(steps: usize) -> String {
    let (task, rest) = ("[task]\nkind = \"recall\"", "[[tasks]]\nkind = \"recall\"");
    let parity = "\n[[tasks]]\nkind = \"formal_language\"\nlanguage = \"parity\"\nlongest = 8\n\n[train]";
    recall(steps).replacen(task, rest, 1).replacen("\n[train]", parity, 1).replacen(
        "seeds = [1, 2]",
        "seeds = [1]",
        1,
    )
}
