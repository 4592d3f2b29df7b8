//! Which combinations of the four choices have a learning-retaining step, and why the others have none.

use std::fmt::Write;

use super::{Bias, Learner, Memory, Retention};
use crate::MemoryError;

/// All architectures.
pub const MEMORIES: [Memory; 3] = [Memory::Vector, Memory::Matrix, Memory::Mlp];
/// All attentional biases.
pub const BIASES: [Bias; 4] = [Bias::DotProduct, Bias::Squared, Bias::Huber, Bias::Lp];
/// All retentions.
pub const RETENTIONS: [Retention; 8] = [
    Retention::None,
    Retention::ScalarDecay,
    Retention::ChannelDecay,
    Retention::Directed,
    Retention::ElasticNet,
    Retention::Lq,
    Retention::Kl,
    Retention::Bregman,
];
/// All learners.
pub const LEARNERS: [Learner; 4] =
    [Learner::Gradient, Learner::Momentum, Learner::Proximal, Learner::NewtonSchulz];

/// One combination of the four choices.
pub type Cell = (Memory, Bias, Retention, Learner);

/// Every combination, in the order of the documentation.
pub fn cells() -> impl Iterator<Item = Cell> {
    MEMORIES.into_iter().flat_map(|memory| {
        RETENTIONS.into_iter().flat_map(move |retention| {
            BIASES.into_iter().flat_map(move |bias| {
                LEARNERS.into_iter().map(move |learner| (memory, bias, retention, learner))
            })
        })
    })
}

const VECTOR_KL: &str = "KL retention keeps each value's row over the keys positive with sum one, and in a vector memory each value has a \
     single key: its row is the constant 1 and nothing can be learned; use memory = \"matrix\"";
const VECTOR_NEWTON: &str = "Newton-Schulz makes a matrix of momentum orthogonal and a vector memory has no such matrix; use \
     learner = \"momentum\" or memory = \"matrix\"";
const MLP_DIRECTED: &str = "directed retention forgets along the key, which is the input of an MLP's first layer only; use \
     retention = \"scalar_decay\" or memory = \"matrix\"";
const MLP_BREGMAN: &str = "the losses of an MLP are not convex in its weights, so the Bregman divergence of their sum is no distance; \
     use memory = \"matrix\"";
const MLP_PROXIMAL: &str = "the reading of an MLP is not linear in its weights, so no bias, not even the dot product, has an exact step in \
     closed form; use learner = \"gradient\" or memory = \"matrix\"";
const NEWTON_ELASTIC: &str = "Newton-Schulz is the step of a linear loss in a ball of the spectral norm; with an l1 term that problem has \
     no closed form; use learner = \"momentum\" or a decay";
const NEWTON_MIRROR: &str = "Newton-Schulz returns a direction in the space of the weights (the spectral norm is its own geometry), while \
     this retention adds gradients in its dual space; use learner = \"momentum\" or a decay";
const BREGMAN_LEARNER: &str = "with the Bregman divergence of the history a step is follow-the-regularised-leader, an exact minimiser over all \
     losses so far; use learner = \"proximal\"";
const BREGMAN_BIAS: &str = "the minimiser over all losses so far has a fixed-size closed form only for linear and quadratic losses; use \
     bias = \"squared\" or \"dot_product\"";
const PROXIMAL_LP: &str = "the exact step of an l_p loss solves e + s p sign(e)|e|^(p-1) = e0, which has no closed form for a general p; \
     use learner = \"gradient\"";
const PROXIMAL_HUBER_VECTOR: &str = "the Huber loss couples all channels through |e| and a vector memory scales each by its own key, so the exact \
     step is the root of an equation without closed form; use learner = \"gradient\" or memory = \"matrix\"";
const PROXIMAL_ELASTIC: &str = "the exact step of this loss with an l1 term is a lasso problem that couples all keys, without closed form; use \
     learner = \"gradient\"";
const PROXIMAL_MIRROR: &str = "the exact step of a loss that is not linear under this retention is the root of a nonlinear equation that couples all weights, \
     without closed form; use learner = \"gradient\"";

/// Why a combination has no learning-retaining step; none when it is sound.
pub fn unsound(memory: Memory, bias: Bias, retention: Retention, learner: Learner) -> Option<&'static str> {
    use {Learner as L, Memory as M, Retention as R};
    match (memory, retention, learner) {
        (M::Vector, R::Kl, _) => return Some(VECTOR_KL),
        (M::Vector, _, L::NewtonSchulz) => return Some(VECTOR_NEWTON),
        (M::Mlp, R::Directed, _) => return Some(MLP_DIRECTED),
        (M::Mlp, R::Bregman, _) => return Some(MLP_BREGMAN),
        (M::Mlp, _, L::Proximal) => return Some(MLP_PROXIMAL),
        (_, R::ElasticNet, L::NewtonSchulz) => return Some(NEWTON_ELASTIC),
        (_, R::Lq | R::Kl, L::NewtonSchulz) => return Some(NEWTON_MIRROR),
        (_, R::Bregman, L::Gradient | L::Momentum | L::NewtonSchulz) => return Some(BREGMAN_LEARNER),
        _ => {}
    }
    if learner != L::Proximal || bias == Bias::DotProduct {
        return None;
    }
    match (memory, bias, retention) {
        (_, Bias::Huber | Bias::Lp, R::Bregman) => Some(BREGMAN_BIAS),
        (_, Bias::Lp, _) => Some(PROXIMAL_LP),
        (M::Vector, Bias::Huber, _) => Some(PROXIMAL_HUBER_VECTOR),
        (M::Vector, Bias::Squared, R::ElasticNet) => None,
        (_, _, R::ElasticNet) => Some(PROXIMAL_ELASTIC),
        (_, _, R::Lq | R::Kl) => Some(PROXIMAL_MIRROR),
        _ => None,
    }
}

/// [`unsound`] as an error.
///
/// # Errors
/// [`MemoryError::Unsound`] with the reason.
pub fn check(memory: Memory, bias: Bias, retention: Retention, learner: Learner) -> Result<(), MemoryError> {
    match unsound(memory, bias, retention, learner) {
        Some(reason) => {
            let [memory, bias, retention, learner] =
                [memory.name(), bias.name(), retention.name(), learner.name()];
            Err(MemoryError::Unsound { memory, bias, retention, learner, reason })
        }
        None => Ok(()),
    }
}

/// The whole matrix as Markdown: one table an architecture, a row a retention, a column a bias, with the letters of
/// the sound learners and the numbers of the reasons of the unsound ones.
pub fn markdown() -> String {
    let mut reasons: Vec<&'static str> = Vec::new();
    let mut text = String::new();
    let sound = cells().filter(|(m, b, r, l)| unsound(*m, *b, *r, *l).is_none()).count();
    let _ = writeln!(
        text,
        "{sound} of the {} combinations are sound. In a field, `G` gradient, `M` momentum, `P` exact proximal step and\n\
         `N` Newton-Schulz are sound; a letter with a number is not, for the reason of that number.\n",
        cells().count()
    );
    for memory in MEMORIES {
        let _ = writeln!(text, "### memory = \"{}\"\n", memory.name());
        let _ = writeln!(text, "| retention | {} |", BIASES.map(Bias::name).join(" | "));
        let _ = writeln!(text, "|---|{}", "---|".repeat(BIASES.len()));
        for retention in RETENTIONS {
            let field = |bias: Bias| {
                LEARNERS.map(|learner| match unsound(memory, bias, retention, learner) {
                    None => learner.letter().to_owned(),
                    Some(reason) => {
                        let known = reasons.iter().position(|r| *r == reason).unwrap_or_else(|| {
                            reasons.push(reason);
                            reasons.len() - 1
                        });
                        format!("~~{}~~{}", learner.letter(), known + 1)
                    }
                })
            };
            let fields = BIASES.map(field).map(|field| field.join(" "));
            let _ = writeln!(text, "| {} | {} |", retention.name(), fields.join(" | "));
        }
        text.push('\n');
    }
    text.push_str("Reasons:\n\n");
    for (number, reason) in reasons.iter().enumerate() {
        let _ = writeln!(text, "{}. {reason}.", number + 1);
    }
    text
}
