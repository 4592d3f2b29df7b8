//! Formulas of layers that have a token loop only.

use super::{H, K, Plain, Rows, V, difference, head, read, sigmoid, write};

/// One vector of cells, rewritten by every token.
pub fn lstm(p: &Plain, x: &Rows) -> Rows {
    let cells = p.0["forget_gate.input_transform.bias"].len();
    let (mut hidden, mut cell) = (vec![0.0; cells], vec![0.0; cells]);
    let token = |x: &Vec<f64>| {
        let gate = |name: &str| -> Vec<f64> {
            let input = p.linear(&format!("{name}.input_transform"), x);
            let recurrent = p.linear(&format!("{name}.hidden_transform"), &hidden);
            let bias = &p.0[&format!("{name}.input_transform.bias")];
            (0..cells).map(|c| input[c] + recurrent[c] + bias[c]).collect()
        };
        let [i, f, o, g] = ["input_gate", "forget_gate", "output_gate", "cell_gate"].map(gate);
        for c in 0..cells {
            cell[c] = sigmoid(f[c]) * cell[c] + sigmoid(i[c]) * g[c].tanh();
            hidden[c] = sigmoid(o[c]) * cell[c].tanh();
        }
        p.linear("o", &hidden)
    };
    x.iter().map(token).collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let sum: f64 = x.iter().map(|x| x.exp()).sum();
    x.iter().map(|x| x.exp() / sum).collect()
}

/// One matrix a head, `K` rows of `y, q, k, beta`.
pub fn srwm(p: &Plain, x: &Rows) -> Rows {
    let columns = V + 2 * K + 4;
    let start =
        |h: usize| -> Rows { head(&p.0["start"], H, h).chunks(columns).map(<[f64]>::to_vec).collect() };
    let mut matrices: Vec<Rows> = (0..H).map(start).collect();
    let token = |x: &Vec<f64>| {
        let inputs = p.linear("x", x);
        let heads = matrices.iter_mut().enumerate();
        let readings = heads.flat_map(|(h, w)| {
            let z = read(w, &softmax(head(&inputs, H, h)));
            let (q, k) = (softmax(&z[V..V + K]), softmax(&z[V + K..V + 2 * K]));
            let error = difference(&read(w, &q), &read(w, &k));
            let rate = |c: usize| match c {
                c if c < V => z[V + 2 * K],
                c if c < V + K => z[V + 2 * K + 1],
                c if c < V + 2 * K => z[V + 2 * K + 2],
                _ => z[V + 2 * K + 3],
            };
            let u: Vec<f64> = (0..columns).map(|c| sigmoid(rate(c)) * error[c]).collect();
            write(w, &k, &u);
            z[..V].to_vec()
        });
        let readings: Vec<f64> = readings.collect();
        p.linear("o", &readings)
    };
    x.iter().map(token).collect()
}
