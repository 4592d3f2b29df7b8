//! Formula of the mixture of memories.

use serde_json::Value;

use super::{
    H, K, Plain, Rows, TTT_EPS, dot, forget, head, projections, read, scaled, sigmoid, standardise, unit,
    write,
};

/// A shared memory and the best `top_k` of the others, head by head and memory by memory.
pub fn mixture_of_memories(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let [q, k, v] = projections(p, ["q", "k", "v"], x, false);
    let number = |name: &str| options[name].as_u64().unwrap() as usize;
    let (memories, top_k, chunk) = (number("memories"), number("top_k"), number("chunk"));
    let (matrices, values) = (H * (1 + memories), v[0].len() / H);
    // Weight of each memory, none where it is not chosen.
    let route = |x: &Vec<f64>| -> Vec<Option<f64>> {
        let scores = p.linear("router", x);
        let mut order: Vec<usize> = (0..memories).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        let sum: f64 = order[..top_k].iter().map(|i| scores[*i].exp()).sum();
        let parallel = |i: usize| order[..top_k].contains(&i).then(|| scores[i].exp() / sum);
        std::iter::once(Some(1.0)).chain((0..memories).map(parallel)).collect()
    };
    let routes: Vec<Vec<Option<f64>>> = x.iter().map(route).collect();
    let mut readings: Rows = vec![vec![0.0; H * values]; x.len()];
    for (at, (m, h)) in (0..=memories).flat_map(|m| (0..H).map(move |h| (m, h))).enumerate() {
        let [scale, shift] = ["ln_weight", "ln_bias"].map(|name| head(&p.0[name], matrices, at));
        let mut memory: Rows =
            head(&p.0["start"], matrices, at).chunks(values).map(<[f64]>::to_vec).collect();
        let mut start = memory.clone();
        for t in 0..x.len() {
            if t % chunk == 0 {
                start = memory.clone();
            }
            let Some(weight) = routes[t][m] else { continue };
            let (q, k) = (unit(head(&q[t], H, h)), unit(head(&k[t], H, h)));
            let target = head(&v[t], H, h);
            // The gradient of 1/2 |scale * standardised + shift - v|^2.
            let (normal, deviation) = standardise(&read(&start, &k), TTT_EPS);
            let slope: Vec<f64> =
                (0..values).map(|j| (scale[j] * normal[j] + shift[j] - target[j]) * scale[j]).collect();
            let mean = slope.iter().sum::<f64>() / values as f64;
            let along = dot(&slope, &normal) / values as f64;
            let u: Vec<f64> =
                (0..values).map(|j| (slope[j] - mean - normal[j] * along) / deviation).collect();
            let eta = options["eta_max"].as_f64().unwrap() * sigmoid(p.linear("eta", &x[t])[at]);
            forget(&mut memory, &[1.0 - sigmoid(p.linear("alpha", &x[t])[at] - 4.0); K]);
            write(&mut memory, &k, &scaled(&u, -eta));
            let normal = standardise(&read(&memory, &q), TTT_EPS).0;
            for j in 0..values {
                let key = if options["add_key"] == true { k[j] } else { 0.0 };
                readings[t][h * values + j] += weight * (scale[j] * normal[j] + shift[j] + key);
            }
        }
    }
    let output = |(reading, x): (Vec<f64>, &Vec<f64>)| {
        let gate = p.linear("gate", x).into_iter().zip(&p.0["gate.bias"]).map(|(g, b)| sigmoid(g + b));
        let gated: Vec<f64> = reading.iter().zip(gate).map(|(y, g)| y * g).collect();
        p.linear("o", &gated)
    };
    readings.into_iter().zip(x).map(output).collect()
}
