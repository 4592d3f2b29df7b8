//! `fastweight bench`.

use crate::support::run;

const SMALL: [&str; 15] = [
    "bench",
    "--batch",
    "1",
    "--time",
    "8",
    "--heads",
    "2",
    "--key",
    "5",
    "--value",
    "3",
    "--sessions",
    "2",
    "--spend",
    "0",
];

#[test]
fn every_operator_has_three_figures() {
    let mut args = SMALL.to_vec();
    args.extend(["--json", "--quiet"]);
    let rows = run(&args).ok().json();
    let operators = [
        "softmax",
        "linear",
        "normalised_linear",
        "delta",
        "gla",
        "kda",
        "dplr",
        "comba",
        "delta_product",
        "titans",
        "ttt_linear",
        "deep_memory",
        "short_convolution",
    ];
    for operator in operators {
        assert!(rows.iter().any(|row| row["operator"] == operator), "{operator} is missing");
    }
    for row in &rows {
        for figure in ["forward_ms", "forward_backward_ms", "step_ms", "state_copy_ms"] {
            assert!(row[figure].as_f64().is_some_and(|ms| ms >= 0.0), "{figure} of {row}");
        }
        for figure in ["forward_ratio", "forward_backward_ratio"] {
            assert!(row[figure].as_f64().is_some_and(|ratio| ratio > 0.0), "{figure} of {row}");
        }
        assert!(row["instruction_set"].is_string(), "{row}");
    }
    let strong = rows.iter().filter(|row| row["gate"] == "strong").count();
    assert_eq!((rows.len(), strong), (26, 9));
}

#[test]
fn the_table_names_the_shape_and_only_the_operators_asked_for() {
    let mut args = SMALL.to_vec();
    args.push("delta");
    let table = run(&args).ok().stdout;
    assert!(table.contains("delta rule, strong gate") && table.contains("key 5, value 3"), "{table}");
    assert!(table.contains("×: times the gated delta rule"), "{table}");
    assert!(!table.contains("softmax"), "{table}");
}

#[test]
fn sizes_that_no_memory_holds_are_refused() {
    run(&["bench", "--time", "9223372036854775807"]).refused(2, &["9223372036854775807", "smaller sizes"]);
    run(&["bench", "--key", "2097152", "--value", "2097152"]).refused(2, &["2097152", "smaller sizes"]);
    run(&["bench", "--spend", "18446744073709551615"]).refused(2, &["--spend", "0..=600000"]);
    run(&["bench", "--time", "0"]).refused(2, &["--time", "expected a whole number in 1..="]);
}
