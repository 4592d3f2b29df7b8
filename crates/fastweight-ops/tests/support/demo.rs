//! The numbers of `seed_demo.json`, which can be checked by hand.

use fastweight_ops::kernel::Dims;
use fastweight_ops::{linear, normalised_linear};
use serde_json::Value;

use crate::Report;
use crate::support::{Array, Form, Operator, Problem, relative_rms, run};

/// A matrix of the file, or a list as a matrix of one row.
fn matrix(value: &Value) -> Result<Array, String> {
    let rows: Vec<&Vec<Value>> = match value.as_array() {
        Some(list) if list.iter().all(Value::is_number) => vec![list],
        Some(list) => list.iter().filter_map(Value::as_array).collect(),
        None => return Err(format!("expected a list of numbers, found {value}")),
    };
    let values: Vec<f64> = rows.iter().flat_map(|row| row.iter().filter_map(Value::as_f64)).collect();
    Ok(Array::new(&[rows.len(), values.len() / rows.len().max(1)], values))
}

pub(crate) fn check(report: &mut Report, demo: &Value) -> Result<(), String> {
    attention(report, demo)?;
    delta_memory(report, &demo["delta_memory"])
}

fn judge(report: &mut Report, label: &str, found: &[f64], expected: &[f64], limit: f64) {
    let label = format!("seed_demo {label}");
    if !report.selected(&label) {
        return;
    }
    let error = relative_rms(found, expected);
    let verdict =
        if error <= limit { Ok(()) } else { Err(format!("found {found:?}, expected {expected:?}")) };
    report.line(&label, &format!("forward {error:.1e}"), verdict);
}

fn attention(report: &mut Report, demo: &Value) -> Result<(), String> {
    let (mut problem, expected) = (
        Problem {
            operator: Operator::NormalisedLinear,
            inputs: Default::default(),
            up: Default::default(),
            scale: 1.0,
            window: None,
            offsets: None,
        },
        ["elu1_explicit", "elu1_recurrent", "softmax"].map(|name| matrix(&demo[name])),
    );
    let [explicit, recurrent, softmax] = expected;
    for name in ["q", "k", "v"] {
        let Array { shape, values } = matrix(&demo[name])?;
        problem.inputs.insert(name.into(), Array::new(&[1, shape[0], 1, shape[1]], values));
    }
    let [time, key, value] = [problem.time(), problem.shape("q")[3], problem.shape("v")[3]];
    let dims = Dims { batch: 1, time, heads: 1, key, value, scale: 1.0, offsets: None };
    let [q, k, v] = ["q", "k", "v"].map(|name| problem.inputs[name].values.as_slice());
    let inputs = normalised_linear::reference::Inputs { dims: &dims, q, k, v, gate: None, initial: None };
    let found = normalised_linear::reference::forward_explicit(&inputs);
    judge(report, "elu1 explicit, reference f64", &found, &explicit?.values, 1e-10);

    let (recurrent, softmax) = (recurrent?.values, softmax?.values);
    let elu1 = problem.clone().with_states();
    let softmax_problem =
        Problem { operator: Operator::Softmax, scale: 1.0 / (key as f64).sqrt(), ..problem };
    for (label, problem, expected) in [("elu1", elu1, recurrent), ("softmax", softmax_problem, softmax)] {
        for form in Form::ALL {
            let label = format!("{label}, {}", form.name());
            let found = run(&problem, form).map_err(|error| error.to_string())?;
            let limit = if form.is_f64() { 1e-10 } else { 1e-5 };
            judge(report, &label, &found.outputs["o"].values, &expected, limit);
        }
    }
    Ok(())
}

/// One write of the 2x2 memory: key, value, decay alpha, strength beta.
type Write = ([f64; 2], [f64; 2], f64, f64);

/// What a 2x2 delta memory returns for `query` after the writes `(key, value, alpha, beta)`.
fn read_after(writes: &[Write], query: [f64; 2], form: Form) -> Result<Vec<f64>, String> {
    let time = writes.len();
    let mut q = vec![0.0; 2 * (time - 1)];
    q.extend(query);
    let column = |of: fn(&Write) -> Vec<f64>| writes.iter().flat_map(of).collect();
    let inputs = [
        ("q", Array::new(&[1, time, 1, 2], q)),
        ("k", Array::new(&[1, time, 1, 2], column(|w| w.0.to_vec()))),
        ("v", Array::new(&[1, time, 1, 2], column(|w| w.1.to_vec()))),
        ("g", Array::new(&[1, time, 1], column(|w| vec![w.2.ln()]))),
        ("beta", Array::new(&[1, time, 1], column(|w| vec![w.3]))),
    ];
    let inputs = inputs.map(|(name, array)| (name.to_owned(), array)).into();
    let operator = Operator::GatedDelta;
    let problem =
        Problem { operator, inputs, up: Default::default(), scale: 1.0, window: None, offsets: None };
    let outcome = run(&problem.with_states(), form).map_err(|error| error.to_string())?;
    Ok(outcome.outputs["o"].values[2 * (time - 1)..].to_vec())
}

fn delta_memory(report: &mut Report, memory: &Value) -> Result<(), String> {
    const E1: [f64; 2] = [1.0, 0.0];
    const E2: [f64; 2] = [0.0, 1.0];
    let crosstalk = |rho: f64| [(E1, E1, 1.0, 1.0), ([rho, (1.0 - rho * rho).sqrt()], E2, 1.0, 1.0)];
    let mut reads = vec![
        ("same_key_twice_delta_read", vec![(E1, E1, 1.0, 1.0), (E1, E2, 1.0, 1.0)], E1, None),
        ("half_beta_read", vec![(E1, E1, 1.0, 0.5), (E1, E2, 1.0, 0.5)], E1, None),
        ("gated_unrelated_key_read", vec![(E2, E2, 1.0, 1.0), (E1, E1, 0.8, 1.0)], E2, None),
        ("no_forgetting_read", vec![(E2, E2, 1.0, 1.0), (E1, E1, 1.0, 1.0)], E2, None),
    ];
    let by_rho = memory["crosstalk_old_key_read"]["value_by_rho"].as_object();
    for (rho, value) in by_rho.into_iter().flatten() {
        let number: f64 = rho.parse().map_err(|_| format!("rho {rho} is no number"))?;
        reads.push(("crosstalk_old_key_read", crosstalk(number).to_vec(), E1, Some((rho, value))));
    }
    for (name, writes, query, rho) in reads {
        let expected = matrix(rho.map_or(&memory[name]["value"], |(_, value)| value))?.values;
        let suffix = rho.map_or(String::new(), |(rho, _)| format!(" {rho}"));
        for form in Form::ALL {
            let limit = if form.is_f64() { 1e-10 } else { 1e-5 };
            let found = read_after(&writes, query, form)?;
            judge(report, &format!("{name}{suffix}, {}", form.name()), &found, &expected, limit);
        }
    }
    additive(report, memory)
}

/// The additive memory of the same two writes, divided by the sum of the keys.
fn additive(report: &mut Report, memory: &Value) -> Result<(), String> {
    let dims = Dims { batch: 1, time: 2, heads: 1, key: 2, value: 2, scale: 1.0, offsets: None };
    let (k, v) = ([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]);
    let gate = linear::reference::Gate::None;
    let inputs =
        linear::reference::Inputs { dims: &dims, scale: 1.0, q: &k, k: &k, v: &v, gate, initial: None };
    let normaliser = k[0] + k[2];
    let found: Vec<f64> = linear::reference::forward(&inputs).o[2..].iter().map(|o| o / normaliser).collect();
    let expected = matrix(&memory["same_key_twice_additive_read"]["value"])?.values;
    judge(report, "same_key_twice_additive_read, reference f64", &found, &expected, 1e-10);
    Ok(())
}
