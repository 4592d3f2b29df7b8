//! Parts of a problem along its batch, its time or its heads, and the outcome put together again.

use std::ops::Range;

use super::ttt::STATES as TTT_STATES;
use super::{Array, Arrays, Problem, STATES};

/// Along which axis a problem is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Rows of the batch (of states: sequences).
    Batch,
    /// Tokens; states have no such axis.
    Time,
    /// Heads.
    Heads,
}

/// Parameters that every token shares: gradients of parts add up.
fn is_shared(name: &str) -> bool {
    matches!(name, "ln_w" | "ln_b" | "b_head" | "d_head")
}

/// Whether a named array has a part for each token.
pub fn is_per_token(name: &str, array: &Array) -> bool {
    axis_of(name, array, Axis::Time).is_some()
}

/// The axis of a named array, absent where the array has none.
fn axis_of(name: &str, array: &Array, axis: Axis) -> Option<usize> {
    let rank = array.shape.len();
    // The steps of DeltaProduct lie between time and heads.
    let steps = rank == 5 || (name == "beta" && rank == 4);
    let state = STATES.contains(&name) || TTT_STATES.contains(&name);
    let shared = is_shared(name);
    let cache = matches!(name, "k_cache" | "v_cache");
    match axis {
        Axis::Batch => (!shared).then_some(0),
        Axis::Time => (!state && !cache && !shared).then_some(1),
        Axis::Heads if shared => Some(0),
        Axis::Heads if name == "position" => None,
        Axis::Heads => Some(if state { 1 } else { 2 + usize::from(steps) }),
    }
}

impl Array {
    pub fn slice(&self, axis: usize, range: Range<usize>) -> Self {
        let inner: usize = self.shape[axis + 1..].iter().product();
        let outer: usize = self.shape[..axis].iter().product();
        let block = self.shape[axis] * inner;
        let mut values = Vec::new();
        for i in 0..outer {
            values.extend(&self.values[i * block + range.start * inner..i * block + range.end * inner]);
        }
        let mut shape = self.shape.clone();
        shape[axis] = range.len();
        Self::new(&shape, values)
    }

    pub fn concatenate(parts: &[Self], axis: usize) -> Self {
        let first = &parts[0];
        let outer: usize = first.shape[..axis].iter().product();
        let mut values = Vec::new();
        for i in 0..outer {
            for part in parts {
                let block = part.values.len() / outer.max(1);
                values.extend(&part.values[i * block..(i + 1) * block]);
            }
        }
        let mut shape = first.shape.clone();
        shape[axis] = parts.iter().map(|part| part.shape[axis]).sum();
        Self::new(&shape, values)
    }

    pub fn add(&self, other: &Self) -> Self {
        Self::new(&self.shape, self.values.iter().zip(&other.values).map(|(a, b)| a + b).collect())
    }
}

fn sum(parts: &[Array]) -> Array {
    parts[1..].iter().fold(parts[0].clone(), |sum, part| sum.add(part))
}

pub fn slice(arrays: &Arrays, axis: Axis, range: Range<usize>) -> Arrays {
    let cut = |(name, array): (&String, &Array)| {
        let at = axis_of(name, array, axis);
        let array = at.map_or_else(|| array.clone(), |at| array.slice(at, range.clone()));
        (name.clone(), array)
    };
    arrays.iter().map(cut).collect()
}

/// Joins what [`slice`] cut; of arrays without the axis, shared ones add up, others come from the last part.
pub fn concatenate(parts: &[Arrays], axis: Axis) -> Arrays {
    let join = |name: &String| {
        let all: Vec<Array> = parts.iter().filter_map(|part| part.get(name).cloned()).collect();
        let joined = match axis_of(name, &all[0], axis) {
            Some(at) => Array::concatenate(&all, at),
            None if is_shared(name) => sum(&all),
            None => all[all.len() - 1].clone(),
        };
        (name.clone(), joined)
    };
    parts[0].keys().map(join).collect()
}

/// The part of a problem without documents.
pub fn part(problem: &Problem, axis: Axis, range: Range<usize>) -> Problem {
    Problem {
        inputs: slice(&problem.inputs, axis, range.clone()),
        up: slice(&problem.up, axis, range),
        ..problem.clone()
    }
}

/// Each document of a packed problem as a problem of its own.
pub fn documents(problem: &Problem) -> Vec<Problem> {
    let offsets = problem.offsets.clone().expect("a packed problem");
    let tokens_of = |arrays: &Arrays, n: usize| -> Arrays {
        let tokens = slice(arrays, Axis::Time, offsets[n]..offsets[n + 1]);
        let own = |(name, array): (String, Array)| {
            let state = !is_per_token(&name, &array) && !is_shared(&name);
            let array = if state { array.slice(0, n..n + 1) } else { array };
            (name, array)
        };
        tokens.into_iter().map(own).collect()
    };
    let document = |n: usize| Problem {
        inputs: tokens_of(&problem.inputs, n),
        up: tokens_of(&problem.up, n),
        offsets: None,
        ..problem.clone()
    };
    (0..offsets.len() - 1).map(document).collect()
}

/// Joins outcomes of documents: tokens along time, states along their first axis.
pub fn concatenate_documents(parts: &[Arrays]) -> Arrays {
    let join = |name: &String| {
        let all: Vec<Array> = parts.iter().map(|part| part[name].clone()).collect();
        if is_shared(name) {
            return (name.clone(), sum(&all));
        }
        let axis = axis_of(name, &all[0], Axis::Time).unwrap_or(0);
        (name.clone(), Array::concatenate(&all, axis))
    };
    parts[0].keys().map(join).collect()
}
