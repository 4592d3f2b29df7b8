//! Every form of every operator against the fixtures.
//!
//! Reads the folder named by `FASTWEIGHT_FIXTURES` (the one that holds `ops/`, or `ops` itself), else the
//! project's copy. Cases come from `manifest.json`; operators that do not exist yet are listed as skipped.
//! Arguments after `--` select the lines that contain them.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use support::{Array, Arrays, Form, Operator, Outcome, Problem, error_against, rms, run};

/// Largest relative RMS error of outputs and final states, and of gradients.
fn tolerances(form: Form) -> (f64, f64) {
    if form.is_f64() { (1e-10, 1e-10) } else { (1e-5, 1e-4) }
}

fn project_copy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/ops")
}

fn folder() -> Result<PathBuf, String> {
    let Some(named) = std::env::var_os("FASTWEIGHT_FIXTURES") else { return Ok(project_copy()) };
    let named = PathBuf::from(named);
    // Cargo runs tests in the crate's folder; a relative name may also be meant from the workspace.
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let places = [named.clone(), workspace.join(&named)];
    let mut folders = places.into_iter().flat_map(|place| [place.join("ops"), place]);
    folders.find(|folder| folder.join("manifest.json").is_file()).ok_or_else(|| {
        format!("FASTWEIGHT_FIXTURES is {named:?}, but neither it nor its ops/ holds manifest.json")
    })
}

fn read_json(path: &Path) -> Result<Value, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path:?}: {e}"))?;
    serde_json::from_str(&text).map_err(|e| format!("{path:?}: {e}"))
}

fn read_tensors(path: &Path) -> Result<Arrays, String> {
    let bytes = std::fs::read(path).map_err(|e| format!("{path:?}: {e}"))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| format!("{path:?}: {e}"))?;
    let array = |(name, view): (String, safetensors::tensor::TensorView)| {
        let data = view.data();
        let values: Vec<f64> = match view.dtype() {
            Dtype::F32 => data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
            Dtype::F64 => data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            other => return Err(format!("{path:?}: {name} is {other:?}, expected F32 or F64")),
        };
        Ok((name, Array::new(view.shape(), values)))
    };
    file.tensors().into_iter().map(array).collect()
}

/// A case of the manifest with its arrays.
struct Case {
    problem: Problem,
    arrays: Arrays,
    extreme: bool,
}

fn read_case(folder: &Path, entry: &Value, operator: Operator) -> Result<Case, String> {
    let file = entry["file"].as_str().ok_or("the manifest names no file")?;
    let mut arrays = read_tensors(&folder.join(file))?;
    for tensor in entry["tensors"].as_array().into_iter().flatten() {
        let name = tensor["name"].as_str().unwrap_or_default();
        if !arrays.contains_key(name) {
            return Err(format!("{file} lacks {name}, which the manifest lists"));
        }
    }
    // RWKV-7 calls its query a receptance.
    for prefix in ["in", "grad"] {
        if let Some(array) = arrays.remove(&format!("{prefix}.r")) {
            arrays.insert(format!("{prefix}.q"), array);
        }
    }
    let group = |prefixes: &[&str]| -> Arrays {
        let strip = |name: &str| prefixes.iter().find_map(|p| name.strip_prefix(p).map(str::to_owned));
        arrays.iter().filter_map(|(name, array)| Some((strip(name)?, array.clone()))).collect()
    };
    let offsets = entry["cu_seqlens"].as_array();
    let offsets = offsets.map(|list| list.iter().filter_map(|n| Some(n.as_u64()? as usize)).collect());
    let problem = Problem {
        operator,
        inputs: group(&["in.", "init."]),
        up: group(&["up."]),
        scale: entry["scale"].as_f64().ok_or("the manifest gives no scale")?,
        window: None,
        offsets,
    };
    let extreme = entry["extreme"].as_bool().unwrap_or(false);
    Ok(Case { problem: problem.with_states(), arrays, extreme })
}

/// Largest forward and gradient error of a form, with the tensors they belong to.
struct Errors {
    forward: (f64, String),
    gradient: Option<(f64, String)>,
}

fn compare(case: &Case, outcome: &Outcome) -> Errors {
    let worst = |prefixes: &[&str], found: &Arrays, yardstick: Option<f64>| {
        let mut worst = (0.0, String::from("nothing to compare"));
        let mut any = false;
        for (name, expected) in &case.arrays {
            let Some(short) = prefixes.iter().find_map(|p| name.strip_prefix(p)) else { continue };
            if short == "o_pre" {
                continue; // TTT's reading before its normalisation, which no form returns
            }
            let yardstick = yardstick.unwrap_or_else(|| rms(&expected.values));
            let error = match found.get(short) {
                Some(array) if array.shape == expected.shape => {
                    error_against(&array.values, &expected.values, yardstick)
                }
                _ => f64::INFINITY,
            };
            if !any || error > worst.0 {
                worst = (error, name.clone());
            }
            any = true;
        }
        if any { worst } else { (f64::INFINITY, worst.1) }
    };
    let yardstick = case.extreme.then(|| case.arrays.get("grad.v").map_or(0.0, |v| rms(&v.values)));
    Errors {
        forward: worst(&["out.", "final."], &outcome.outputs, None),
        gradient: (!outcome.grads.is_empty()).then(|| worst(&["grad."], &outcome.grads, yardstick)),
    }
}

#[derive(Default)]
struct Report {
    filters: Vec<String>,
    passed: usize,
    failed: Vec<String>,
    ignored: usize,
    filtered: usize,
}

impl Report {
    fn selected(&mut self, label: &str) -> bool {
        let selected = self.filters.is_empty() || self.filters.iter().any(|f| label.contains(f.as_str()));
        self.filtered += usize::from(!selected);
        selected
    }

    fn line(&mut self, label: &str, figures: &str, verdict: Result<(), String>) {
        match verdict {
            Ok(()) => {
                self.passed += 1;
                println!("{label:<66} {figures} ... ok");
            }
            Err(reason) => {
                println!("{label:<66} {figures} ... FAILED: {reason}");
                self.failed.push(label.to_owned());
            }
        }
    }

    fn finish(self) -> ExitCode {
        if !self.failed.is_empty() {
            println!("\nfailures:\n    {}", self.failed.join("\n    "));
        }
        println!(
            "\ntest result: {}. {} passed; {} failed; {} ignored; 0 measured; {} filtered out",
            if self.failed.is_empty() { "ok" } else { "FAILED" },
            self.passed,
            self.failed.len(),
            self.ignored,
            self.filtered
        );
        if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

fn check_form(report: &mut Report, label: &str, case: &Case, form: Form) {
    let outcome = match catch_unwind(AssertUnwindSafe(|| run(&case.problem, form))) {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => return report.line(label, "", Err(error.to_string())),
        Err(_) => return report.line(label, "", Err("it panicked".into())),
    };
    let Errors { forward, gradient } = compare(case, &outcome);
    let (forward_limit, gradient_limit) = tolerances(form);
    let above = |error: &(f64, String), limit: f64| {
        let fine = error.0 <= limit;
        if fine { Ok(()) } else { Err(format!("{} is off by {:.2e}, allowed {limit:.0e}", error.1, error.0)) }
    };
    let mut verdict = above(&forward, forward_limit);
    let mut figures = format!("forward {:.1e}", forward.0);
    match &gradient {
        Some(gradient) => {
            figures += &format!("  gradient {:.1e}", gradient.0);
            verdict = verdict.and(above(gradient, gradient_limit));
        }
        None if form == Form::Steps => figures += "  gradient none   ",
        None => verdict = verdict.and(Err("no gradients came".into())),
    }
    report.line(label, &figures, verdict);
}

fn check_cases(report: &mut Report, folder: &Path) -> Result<(), String> {
    let manifest = read_json(&folder.join("manifest.json"))?;
    let cases = manifest["cases"].as_array().ok_or("manifest.json has no list of cases")?;
    let mut seen = BTreeSet::new();
    let mut skipped: BTreeMap<&str, usize> = BTreeMap::new();
    for entry in cases {
        let name = entry["operator"].as_str().unwrap_or("unnamed");
        let Some(operator) = Operator::by_name(name) else {
            *skipped.entry(name).or_default() += 1;
            continue;
        };
        seen.insert(operator);
        let label = format!("{name} {}", entry["case"].as_str().unwrap_or("unnamed"));
        let case = match read_case(folder, entry, operator) {
            Ok(case) => case,
            Err(reason) => {
                report.line(&label, "", Err(reason));
                continue;
            }
        };
        for form in Form::ALL {
            let label = format!("{label}, {}", form.name());
            if report.selected(&label) {
                check_form(report, &label, &case, form);
            }
        }
    }
    let expected = Operator::ALL.into_iter().filter(|operator| operator.has_fixtures());
    for operator in expected.filter(|operator| !seen.contains(operator)) {
        report.line(
            operator.name(),
            "",
            Err("the operator exists but the manifest has no case of it".into()),
        );
    }
    for (name, count) in skipped {
        println!("{name}: skipped, the operator does not exist yet ({count} cases)");
        report.ignored += count;
    }
    Ok(())
}

fn main() -> ExitCode {
    let mut report = Report::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--list" => return ExitCode::SUCCESS,
            "--test-threads" | "--skip" | "--color" | "--format" | "-Z" => drop(arguments.next()),
            flag if flag.starts_with('-') => {}
            _ => report.filters.push(argument),
        }
    }
    let checked = folder().and_then(|folder| {
        println!("\nfixtures of {}", folder.display());
        check_cases(&mut report, &folder)?;
        let demo = [folder, project_copy()].map(|folder| folder.join("seed_demo.json"));
        let demo = demo.into_iter().find(|path| path.is_file()).ok_or("seed_demo.json is nowhere")?;
        demo::check(&mut report, &read_json(&demo)?)
    });
    if let Err(reason) = checked {
        report.line("fixtures", "", Err(reason));
    }
    report.finish()
}

#[path = "support/demo.rs"]
mod demo;
