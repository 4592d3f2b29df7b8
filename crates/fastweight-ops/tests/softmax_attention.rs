//! Softmax attention: fused and composed against the float64 loop, with every gradient.

mod comparing;

use burn::tensor::{Device, Tensor};
use comparing::{assert_close, numbers, strided, tensor, values, widen};
use fastweight_ops::kernel::{InstructionSet, with_instruction_set};
use fastweight_ops::softmax::reference::{self, Inputs};
use fastweight_ops::softmax::{KvCache, Sizes, SoftmaxOptions, softmax_attention};
use fastweight_ops::{Offsets, Path};

/// One call, its inputs made from the sizes.
#[derive(Clone)]
struct Case {
    sizes: Sizes,
    window: Option<usize>,
    spread: f32,
}

impl Case {
    fn new([batch, time, heads, groups, key, value]: [usize; 6]) -> Self {
        let scale = 1.0 / (key as f32).sqrt();
        let sizes = Sizes {
            batch,
            time,
            heads,
            groups,
            key,
            value,
            scale,
            window: usize::MAX,
            offsets: None,
            cache: (0, vec![0; batch]),
        };
        Self { sizes, window: None, spread: 3.0 }
    }

    fn window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self.sizes.window = window;
        self
    }

    fn packed(mut self, lengths: &[usize]) -> Self {
        self.sizes.offsets = Some(Offsets::from_lengths(lengths));
        self.sizes.cache = (0, vec![0; lengths.len()]);
        self
    }

    fn cache(mut self, held: usize, lengths: &[usize]) -> Self {
        self.sizes.cache = (held, lengths.to_vec());
        self
    }

    fn shapes(&self) -> Vec<[usize; 4]> {
        let Sizes { batch, time, heads, groups, key, value, .. } = self.sizes;
        let mut shapes =
            vec![[batch, time, heads, key], [batch, time, groups, key], [batch, time, groups, value]];
        let (held, lengths) = &self.sizes.cache;
        if *held > 0 {
            shapes.push([lengths.len(), *held, groups, key]);
            shapes.push([lengths.len(), *held, groups, value]);
        }
        shapes
    }

    fn inputs(&self) -> Vec<Vec<f32>> {
        let random = |(seed, shape): (usize, &[usize; 4])| {
            let spread = if seed == 0 { self.spread } else { 1.0 };
            numbers(seed as u64 + 1, shape.iter().product()).into_iter().map(|x| x * spread).collect()
        };
        self.shapes().iter().enumerate().map(random).collect()
    }

    fn grad(&self) -> Vec<f32> {
        numbers(77, self.sizes.batch * self.sizes.time * self.sizes.heads * self.sizes.value)
    }

    fn options(&self, path: Path) -> SoftmaxOptions {
        SoftmaxOptions { scale: None, window: self.window, offsets: self.sizes.offsets.clone(), path }
    }

    /// The output, then every gradient, through the public function.
    fn run(&self, path: Path, lay_out: fn(Tensor<4>) -> Tensor<4>) -> Vec<Vec<f32>> {
        let device = Device::flex().autodiff();
        let leaves: Vec<Tensor<4>> = self
            .inputs()
            .iter()
            .zip(self.shapes())
            .map(|(x, shape)| tensor(x, shape, &device).require_grad())
            .collect();
        let mut used = leaves.iter().cloned().map(lay_out);
        let mut next = || used.next().unwrap();
        let (q, k, v) = (next(), next(), next());
        let (held, lengths) = &self.sizes.cache;
        let cache = (*held > 0).then(|| KvCache { k: next(), v: next(), lengths: Some(lengths.clone()) });
        let o = softmax_attention(q, k, v, cache, &self.options(path)).unwrap();
        let up = tensor(&self.grad(), o.dims(), &device);
        let grads = (lay_out(o.clone()) * up).sum().backward();
        let mut all = vec![values(o)];
        all.extend(leaves.iter().map(|leaf| values(leaf.grad(&grads).unwrap())));
        all
    }

    fn expected(&self) -> Vec<Vec<f64>> {
        let inputs: Vec<Vec<f64>> = self.inputs().iter().map(|x| widen(x)).collect();
        let x = Inputs {
            sizes: &self.sizes,
            scale: 1.0 / (self.sizes.key as f64).sqrt(),
            q: &inputs[0],
            k: &inputs[1],
            v: &inputs[2],
            cache: inputs.get(3).map(|k| (&k[..], &inputs[4][..])),
        };
        let grads = reference::backward(&x, &widen(&self.grad()));
        let mut all = vec![reference::forward(&x), grads.q, grads.k, grads.v];
        if x.cache.is_some() {
            all.extend([grads.k_cache, grads.v_cache]);
        }
        all
    }

    fn check(&self) {
        let expected = self.expected();
        for path in [Path::Fused, Path::Composed] {
            for (i, (found, expected)) in self.run(path, |x| x).iter().zip(&expected).enumerate() {
                let tolerance = if i == 0 { 1e-5 } else { 1e-4 };
                assert_close(&format!("{:?} {path:?} tensor {i}", self.sizes), found, expected, tolerance);
            }
        }
    }
}

#[test]
fn any_time_and_head_size() {
    for time in [1, 2, 31, 33, 64, 65, 100] {
        for (key, value) in [(20, 12), (60, 60), (64, 64), (16, 100), (128, 65), (1, 1)] {
            Case::new([2, time, 2, 2, key, value]).check();
        }
    }
}

#[test]
fn grouped_heads() {
    for (heads, groups) in [(4, 2), (6, 2), (4, 1), (5, 5)] {
        for time in [1, 7, 40, 70] {
            Case::new([2, time, heads, groups, 24, 20]).check();
        }
    }
}

#[test]
fn a_window_hides_older_tokens() {
    for window in [1, 2, 17, 32, 64, 99, 100, 500] {
        Case::new([1, 100, 2, 1, 20, 24]).window(window).check();
        Case::new([2, 150, 1, 1, 16, 16]).window(window).check();
    }
}

#[test]
fn a_cache_comes_before_token_zero() {
    for (held, lengths) in [(17, [17, 17]), (40, [0, 40]), (70, [70, 33]), (5, [2, 1])] {
        for time in [1, 3, 33, 100] {
            Case::new([2, time, 4, 2, 20, 12]).cache(held, &lengths).check();
            Case::new([2, time, 2, 2, 32, 32]).cache(held, &lengths).window(13).check();
        }
    }
}

#[test]
fn packed_documents_do_not_see_each_other() {
    for lengths in [&[1, 96, 63][..], &[160], &[0, 70, 0, 90], &[30, 2, 1, 127]] {
        let time = lengths.iter().sum();
        Case::new([1, time, 4, 2, 20, 12]).packed(lengths).check();
        Case::new([1, time, 2, 1, 16, 16]).packed(lengths).window(9).check();
        let cached: Vec<usize> = (0..lengths.len()).map(|i| i * 5 % 12).collect();
        Case::new([1, time, 2, 2, 16, 20]).packed(lengths).cache(11, &cached).check();
    }
}

#[test]
fn large_scores_stay_finite() {
    let mut case = Case::new([1, 80, 2, 2, 32, 32]);
    case.spread = 300.0;
    let expected = case.expected();
    let found = case.run(Path::Fused, |x| x);
    assert!(found.iter().flatten().all(|x| x.is_finite()));
    assert_close("output", &found[0], &expected[0], 1e-4);
}

#[test]
fn every_instruction_set_agrees_and_runs_repeat() {
    for case in [
        Case::new([2, 100, 4, 2, 20, 72]).cache(9, &[9, 4]).window(40),
        Case::new([1, 300, 1, 1, 64, 64]),
        Case::new([3, 1, 4, 2, 60, 100]).cache(50, &[50, 3, 20]),
    ] {
        let expected = case.expected();
        for set in InstructionSet::available() {
            let found = with_instruction_set(set, || case.run(Path::Fused, |x| x));
            assert_eq!(found, with_instruction_set(set, || case.run(Path::Fused, |x| x)), "{set:?}");
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(&format!("{set:?}"), found, expected, 1e-5);
            }
        }
    }
}

#[test]
fn strided_inputs_and_gradients() {
    let case = Case::new([2, 70, 4, 2, 20, 12]).cache(9, &[9, 4]);
    assert_eq!(case.run(Path::Fused, strided), case.run(Path::Fused, |x| x));
}

#[test]
fn a_sequence_cut_by_the_cache_continues() {
    let [time, heads, groups, key, value] = [90, 4, 2, 20, 24];
    for window in [None, Some(20), Some(1)] {
        let device = Device::flex();
        let options = SoftmaxOptions { window, ..SoftmaxOptions::default() };
        let q: Tensor<4> = tensor(&numbers(1, 2 * time * heads * key), [2, time, heads, key], &device);
        let k: Tensor<4> = tensor(&numbers(2, 2 * time * groups * key), [2, time, groups, key], &device);
        let v: Tensor<4> = tensor(&numbers(3, 2 * time * groups * value), [2, time, groups, value], &device);
        let whole = softmax_attention(q.clone(), k.clone(), v.clone(), None, &options).unwrap();
        let mut cache: Option<KvCache> = None;
        let mut outputs = Vec::new();
        let mut start = 0;
        for tokens in [33, 1, 1, 40, 15] {
            let cut = |x: &Tensor<4>| x.clone().narrow(1, start, tokens);
            outputs.push(softmax_attention(cut(&q), cut(&k), cut(&v), cache.clone(), &options).unwrap());
            start += tokens;
            // A window needs no more than its last `window - 1` entries; positions count from those kept.
            let kept = window.map_or(start, |window| start.min(window - 1));
            let held = |x: &Tensor<4>| x.clone().narrow(1, start - kept, kept);
            cache = (kept > 0).then(|| KvCache { k: held(&k), v: held(&v), lengths: None });
        }
        assert_close("cut", &values(Tensor::cat(outputs, 1)), &widen(&values(whole)), 1e-6);
    }
}

#[test]
fn wrong_arguments_are_named() {
    let device = Device::flex();
    let x = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &device);
    let call =
        |q, k, v, cache: Option<(Tensor<4>, Tensor<4>, Option<Vec<usize>>)>, options: SoftmaxOptions| {
            let cache = cache.map(|(k, v, lengths)| KvCache { k, v, lengths });
            softmax_attention(q, k, v, cache, &options).unwrap_err().to_string()
        };
    let (q, k, v) = (x([2, 5, 4, 8]), x([2, 5, 2, 8]), x([2, 5, 2, 6]));
    let options = SoftmaxOptions::default;
    let says = |message: String, word: &str| assert!(message.contains(word), "{message}");
    says(call(q.clone(), x([2, 4, 2, 8]), v.clone(), None, options()), "k has shape");
    says(call(q.clone(), k.clone(), x([2, 5, 1, 6]), None, options()), "v has shape");
    says(call(q.clone(), x([2, 5, 3, 8]), x([2, 5, 3, 6]), None, options()), "multiple");
    says(
        call(q.clone(), k.clone(), v.clone(), Some((x([2, 7, 2, 8]), x([2, 6, 2, 6]), None)), options()),
        "cache.v",
    );
    let cache = |lengths: &[usize]| Some((x([2, 7, 2, 8]), x([2, 7, 2, 6]), Some(lengths.to_vec())));
    says(call(q.clone(), k.clone(), v.clone(), cache(&[1]), options()), "cache.lengths");
    says(call(q.clone(), k.clone(), v.clone(), cache(&[1, 8]), options()), "cache.lengths");
    says(
        call(q.clone(), k.clone(), v.clone(), None, SoftmaxOptions { window: Some(0), ..options() }),
        "window",
    );
    let offsets = Some(Offsets::from_lengths(&[5]));
    says(call(q, k, v, None, SoftmaxOptions { offsets, ..options() }), "rows");
}
