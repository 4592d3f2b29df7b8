//! One operator as another one with other inputs: values, states, and gradients by the chain rule.

use proptest::prelude::*;

use crate::agreement::sizes;
use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Array, Arrays, Form, Operator, Outcome, Problem};
use crate::{assert_same, cases, compute};

fn gates() -> impl Strategy<Value = Gates> {
    prop::sample::select(vec![Gates::Absent, Gates::Weak, Gates::Strong, Gates::Mixed, Gates::Twenty])
}

/// Every number of `x [.., H]` repeated along a new last axis.
fn spread(x: &Array, size: usize) -> Array {
    let mut shape = x.shape.clone();
    shape.push(size);
    Array::new(&shape, x.values.iter().flat_map(|&x| std::iter::repeat_n(x, size)).collect())
}

/// Sums over the last axis.
fn sums(x: &Array) -> Array {
    let (shape, size) = (&x.shape[..x.shape.len() - 1], x.shape[x.shape.len() - 1]);
    Array::new(shape, x.values.chunks(size).map(|row| row.iter().sum()).collect())
}

/// Number by number in full float64.
fn combine(x: &Array, y: &Array, to: impl Fn(f64, f64) -> f64) -> Array {
    Array::new(&x.shape, x.values.iter().zip(&y.values).map(|(&x, &y)| to(x, y)).collect())
}

fn times(x: &Array, y: &Array) -> Array {
    combine(x, y, |x, y| x * y)
}

fn rename(arrays: &mut Arrays, from: &str, to: &str) {
    if let Some(array) = arrays.remove(from) {
        arrays.insert(to.to_owned(), array);
    }
}

fn with(problem: &Problem, operator: Operator, inputs: Vec<(&str, Array)>) -> Problem {
    let mut arrays = problem.inputs.clone();
    arrays.extend(inputs.into_iter().map(|(name, array)| (name.to_owned(), array)));
    Problem { operator, inputs: arrays, ..problem.clone() }
}

/// `found`, whose gradients `chain` turns into those of the other operator, against `expected`.
fn assert_equal(
    label: &str,
    forms: &[Form],
    [expected, found]: [&Problem; 2],
    chain: impl Fn(&Arrays) -> Vec<(&'static str, Array)>,
) {
    for &form in forms {
        let expected = compute(expected, form);
        let Outcome { outputs, mut grads } = compute(found, form);
        if !grads.is_empty() {
            let chained = chain(&grads);
            grads.extend(chained.into_iter().map(|(name, array)| (name.to_owned(), array)));
            grads.retain(|name, _| expected.grads.contains_key(name));
        }
        let label = format!("{label}, {}", form.name());
        assert_same(&label, &Outcome { outputs, grads }, &expected, form.is_f64());
    }
}

/// Where the inputs of one are products of those of the other: rounding to float32 would tell them apart.
const DOUBLE: [Form; 2] = [Form::Reference, Form::Composed64];

proptest! {
    #![proptest_config(cases(10))]

    #[test]
    fn equal_channels_are_a_gate_for_the_head(sizes in sizes(80), gates in gates(), seed in any::<u64>()) {
        let pairs = [(Operator::ScalarGatedLinear, Operator::Gla), (Operator::GatedDelta, Operator::Kda)];
        for (scalar, channels) in pairs {
            let mut one = problem(scalar, &sizes, gates, seed);
            let numbers = [sizes.batch, sizes.time, sizes.heads];
            one.inputs.entry("g".into()).or_insert_with(|| Array::zeros(&numbers));
            let each = with(&one, channels, vec![("g", spread(&one.inputs["g"], sizes.key))]);
            let label = format!("{channels:?} {gates:?} {sizes:?}");
            assert_equal(&label, &Form::ALL, [&one, &each], |grads| vec![("g", sums(&grads["g"]))]);
        }
    }

    #[test]
    fn without_decay_channel_gates_vanish(sizes in sizes(80), seed in any::<u64>()) {
        for (plain, gated) in [(Operator::Linear, Operator::Gla), (Operator::Delta, Operator::Kda)] {
            let plain = problem(plain, &sizes, Gates::Absent, seed);
            let zero = Array::zeros(plain.shape("k"));
            let gated = with(&plain, gated, vec![("g", zero)]);
            assert_equal(&format!("{gated:?} {sizes:?}"), &Form::ALL, [&plain, &gated], |_| vec![]);
        }
    }

    #[test]
    fn gla_is_dplr_that_reads_nothing(sizes in sizes(80), gates in gates(), seed in any::<u64>()) {
        let gla = problem(Operator::Gla, &sizes, gates, seed);
        let nothing = || Array::zeros(gla.shape("k"));
        let inputs = vec![("w", gla.inputs["g"].clone()), ("a", nothing()), ("b", gla.inputs["k"].clone())];
        let mut dplr = with(&gla, Operator::Dplr, inputs);
        dplr.inputs.remove("g");
        let chain = |grads: &Arrays| vec![("g", grads["w"].clone())];
        assert_equal(&format!("{gates:?} {sizes:?}"), &Form::ALL, [&gla, &dplr], chain);
    }

    /// `a = k exp(g)`, `b = -beta k`, `v -> beta v`.
    #[test]
    fn kda_is_a_case_of_dplr(sizes in sizes(80), gates in gates(), seed in any::<u64>()) {
        let kda = problem(Operator::Kda, &sizes, gates, seed);
        let [k, v, g, beta] = ["k", "v", "g", "beta"].map(|name| kda.inputs[name].clone());
        let decay = combine(&g, &g, |g, _| g.exp());
        let (beta_k, beta_v) = (spread(&beta, sizes.key), spread(&beta, sizes.value));
        let inputs = vec![
            ("w", g.clone()),
            ("a", times(&k, &decay)),
            ("b", combine(&k, &beta_k, |k, beta| -beta * k)),
            ("v", times(&v, &beta_v)),
        ];
        // What the delta rule writes, `beta k v`, is `k (beta v)` here.
        let mut dplr = with(&kda, Operator::Dplr, inputs);
        dplr.inputs.retain(|name, _| !matches!(name.as_str(), "g" | "beta"));
        let chain = |grads: &Arrays| {
            let through_a = times(&grads["a"], &decay);
            let through_b = times(&grads["b"], &beta_k);
            let dk = grads["k"].add(&combine(&through_a, &through_b, |a, b| a - b));
            let beta_of_b = sums(&times(&grads["b"], &k));
            let beta_of_v = sums(&times(&grads["v"], &v));
            vec![
                ("k", dk),
                ("v", times(&grads["v"], &beta_v)),
                ("g", grads["w"].add(&times(&through_a, &k))),
                ("beta", combine(&beta_of_v, &beta_of_b, |v, b| v - b)),
            ]
        };
        assert_equal(&format!("{gates:?} {sizes:?}"), &DOUBLE, [&kda, &dplr], chain);
    }

    /// Without momentum the error is still read before the decay: `a = k`, `b = -theta k`, `v -> theta v`, and the
    /// decay `1 - alpha` of every channel.
    #[test]
    fn titans_without_momentum_is_a_case_of_dplr(sizes in sizes(80), gates in gates(), seed in any::<u64>()) {
        let mut titans = problem(Operator::Titans, &sizes, gates, seed);
        titans.inputs.insert("eta".into(), Array::zeros(&[sizes.batch, sizes.time, sizes.heads]));
        titans.inputs.get_mut("S").expect("momentum").values.fill(0.0);
        titans.up.remove("S");
        let [k, v, theta, alpha] = ["k", "v", "theta", "alpha"].map(|name| titans.inputs[name].clone());
        let theta_k = spread(&theta, sizes.key);
        let log_decay = combine(&alpha, &alpha, |alpha, _| (-alpha).ln_1p());
        let inputs = vec![
            ("w", spread(&log_decay, sizes.key)),
            ("a", k.clone()),
            ("b", combine(&k, &theta_k, |k, theta| -theta * k)),
            ("v", times(&v, &spread(&theta, sizes.value))),
            ("S", titans.inputs["M"].clone()),
        ];
        let mut dplr = with(&titans, Operator::Dplr, inputs);
        rename(&mut dplr.up, "M", "S");
        dplr.inputs.retain(|name, _| !matches!(name.as_str(), "M" | "theta" | "eta" | "alpha"));
        for form in DOUBLE {
            let (mut expected, mut found) = (compute(&titans, form), compute(&dplr, form));
            rename(&mut found.outputs, "S", "M");
            expected.outputs.remove("S");
            let through_b = times(&found.grads["b"], &theta_k);
            let both = found.grads["k"].add(&found.grads["a"]);
            let grads = [
                ("q", found.grads["q"].clone()),
                ("k", combine(&both, &through_b, |both, b| both - b)),
                ("v", times(&found.grads["v"], &spread(&theta, sizes.value))),
                ("M", found.grads["S"].clone()),
            ];
            found.grads = grads.map(|(name, array)| (name.to_owned(), array)).into();
            expected.grads.retain(|name, _| found.grads.contains_key(name));
            assert_same(&format!("{gates:?} {sizes:?} {}", form.name()), &found, &expected, true);
        }
    }

    /// Nothing forgotten and no momentum is the plain delta rule.
    #[test]
    fn titans_without_momentum_and_forgetting_is_the_delta_rule(sizes in sizes(80), seed in any::<u64>()) {
        let delta = problem(Operator::Delta, &sizes, Gates::Absent, seed);
        let none = || Array::zeros(&[sizes.batch, sizes.time, sizes.heads]);
        let (beta, memory) = (delta.inputs["beta"].clone(), delta.inputs["S"].clone());
        let momentum = Array::zeros(&memory.shape);
        let inputs = vec![("theta", beta), ("eta", none()), ("alpha", none()), ("M", memory), ("S", momentum)];
        let mut titans = with(&delta, Operator::Titans, inputs);
        titans.inputs.remove("beta");
        rename(&mut titans.up, "S", "M");
        for form in Form::ALL {
            let (expected, mut found) = (compute(&delta, form), compute(&titans, form));
            rename(&mut found.outputs, "M", "S");
            rename(&mut found.grads, "M", "S");
            rename(&mut found.grads, "theta", "beta");
            found.grads.retain(|name, _| expected.grads.contains_key(name));
            assert_same(&format!("{sizes:?} {}", form.name()), &found, &expected, form.is_f64());
        }
    }

    /// Gates spread over the columns take the same steps: the same bits, but for the sums over columns in their gradients.
    #[test]
    fn equal_columns_are_titans_with_a_gate_for_the_head(
        sizes in sizes(80), gates in gates(), seed in any::<u64>()
    ) {
        let one = problem(Operator::Titans, &sizes, gates, seed);
        let names = ["theta", "eta", "alpha"];
        let inputs = names.map(|name| (name, spread(&one.inputs[name], sizes.value)));
        let each = with(&one, Operator::TitansChannels, inputs.into());
        let chain = |grads: &Arrays| names.map(|name| (name, sums(&grads[name]))).into();
        assert_equal(&format!("{gates:?} {sizes:?}"), &Form::ALL, [&one, &each], chain);
        for form in [Form::Fused, Form::Steps] {
            let [mut one, mut each] = [&one, &each].map(|problem| compute(problem, form));
            for grads in [&mut one.grads, &mut each.grads] {
                grads.retain(|name, _| !names.contains(&name.as_str()));
            }
            assert_eq!(one.outputs, each.outputs, "{sizes:?} {}", form.name());
            assert_eq!(one.grads, each.grads, "{sizes:?} {}", form.name());
        }
    }

    /// A column is a memory of one value with gates for its head; keys and queries get the sum of the columns' gradients.
    #[test]
    fn each_column_of_titans_is_a_memory_of_its_own(sizes in sizes(40), seed in any::<u64>()) {
        let whole = problem(Operator::TitansChannels, &sizes, Gates::Weak, seed);
        let by_column = ["v", "theta", "eta", "alpha", "S", "M", "o"];
        let column = |(name, array): (&String, &Array), j: usize| {
            let gate = ["theta", "eta", "alpha"].contains(&name.as_str());
            let array = if by_column.contains(&name.as_str()) { array.slice(3, j..j + 1) } else { array.clone() };
            (name.clone(), if gate { sums(&array) } else { array })
        };
        for form in [Form::Reference, Form::Composed64] {
            let found = compute(&whole, form);
            let columns: Vec<Outcome> = (0..sizes.value).map(|j| {
                let of = |arrays: &Arrays| arrays.iter().map(|named| column(named, j)).collect::<Arrays>();
                let (inputs, up) = (of(&whole.inputs), of(&whole.up));
                let alone = compute(&Problem { operator: Operator::Titans, inputs, up, ..whole.clone() }, form);
                let mut mine = found.clone();
                mine.outputs = of(&found.outputs);
                mine.grads = of(&found.grads);
                for name in ["q", "k"] {
                    mine.grads.insert(name.into(), alone.grads[name].clone());
                }
                assert_same(&format!("{sizes:?} column {j} {}", form.name()), &mine, &alone, true);
                alone
            }).collect();
            for name in ["q", "k"] {
                let first = columns[0].grads[name].clone();
                let sum = columns[1..].iter().fold(first, |sum, column| sum.add(&column.grads[name]));
                crate::close(&found.grads[name].values, &sum.values, 1e-10);
            }
        }
    }

    /// The same recurrence in other letters, memory and momentum in each other's place, signs and logs aside.
    #[test]
    fn titans_is_the_momentum_delta_rule_that_reads_with_its_key(sizes in sizes(80), seed in any::<u64>()) {
        let titans = problem(Operator::Titans, &sizes, Gates::Weak, seed);
        let [theta, eta, alpha] = ["theta", "eta", "alpha"].map(|name| titans.inputs[name].clone());
        let swapped = |arrays: &Arrays| -> Arrays {
            let swap = |name: &str| match name {
                "S" => "M".to_owned(),
                "M" => "S".to_owned(),
                name => name.to_owned(),
            };
            arrays.iter().map(|(name, array)| (swap(name), array.clone())).collect()
        };
        let each = |x: &Array, to: fn(f64) -> f64| combine(x, x, |x, _| to(x));
        let mut other = Problem {
            operator: Operator::MomentumDelta,
            inputs: swapped(&titans.inputs),
            up: swapped(&titans.up),
            ..titans.clone()
        };
        other.inputs.retain(|name, _| !matches!(name.as_str(), "theta" | "eta" | "alpha"));
        let inputs = [
            ("p", titans.inputs["k"].clone()),
            ("log_alpha", each(&alpha, |alpha| (-alpha).ln_1p())),
            ("log_mu", each(&eta, f64::ln)),
            ("beta", each(&theta, |_| -1.0)),
            ("eta", each(&theta, |theta| -theta)),
        ];
        other.inputs.extend(inputs.map(|(name, array)| (name.to_owned(), array)));
        for form in DOUBLE {
            let (expected, found) = (compute(&titans, form), compute(&other, form));
            let mut grads = swapped(&found.grads);
            let by_log = |name: &str, factor: &Array| combine(&found.grads[name], factor, |g, x| g / x);
            let chained = [
                ("k", found.grads["k"].add(&found.grads["p"])),
                ("theta", each(&found.grads["eta"], |g| -g)),
                ("eta", by_log("log_mu", &eta)),
                ("alpha", by_log("log_alpha", &each(&alpha, |alpha| alpha - 1.0))),
            ];
            grads.extend(chained.map(|(name, array)| (name.to_owned(), array)));
            grads.retain(|name, _| expected.grads.contains_key(name));
            let found = Outcome { outputs: swapped(&found.outputs), grads };
            assert_same(&format!("{sizes:?} {}", form.name()), &found, &expected, true);
        }
    }
}

/// Documents without a token keep their state, whatever the operator.
#[test]
fn empty_documents_keep_their_states() {
    for operator in Operator::ALL.into_iter().filter(|&operator| operator != Operator::Softmax) {
        let sizes = Sizes { offsets: Some(vec![0, 0, 9, 9, 20, 20]), ..Sizes::of(1, 20, 2, 5, 3) };
        let problem = problem(operator, &sizes, Gates::Weak, 8);
        for form in Form::ALL {
            let found = compute(&problem, form);
            for name in crate::support::STATES {
                let Some(state) = found.outputs.get(name) else { continue };
                for document in [0, 2, 4] {
                    let range = document..document + 1;
                    let [after, before] = [state, &problem.inputs[name]].map(|x| x.slice(0, range.clone()));
                    assert_eq!(after, before, "{operator:?} {name} {}", form.name());
                }
            }
        }
    }
}
