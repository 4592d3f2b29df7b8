//! Arguments that do not fit TTT-Linear, in sequences and in steps.

use burn::tensor::{DType, Device, Tensor};
use fastweight_ops::ttt::{TttOptions, TttState, ttt_linear, ttt_linear_step};
use fastweight_ops::{Offsets, OpError};

#[test]
fn arguments_that_do_not_fit_are_named() {
    fn ones<const D: usize>(shape: [usize; D]) -> Tensor<D> {
        Tensor::ones(shape, &Device::flex())
    }
    fn argument(error: OpError) -> &'static str {
        match error {
            OpError::Shape { argument, .. } | OpError::Value { argument, .. } => argument,
            OpError::PackedBatch { .. } => "offsets",
            error => panic!("{error}"),
        }
    }
    struct Call {
        v: [usize; 4],
        eta: [usize; 3],
        ln_w: [usize; 2],
        ln_b: [usize; 2],
        state: Option<TttState>,
        options: TttOptions,
    }
    let fine = || Call {
        v: [2, 5, 3, 4],
        eta: [2, 5, 3],
        ln_w: [3, 4],
        ln_b: [3, 4],
        state: None,
        options: TttOptions::default(),
    };
    let sequence = |call: Call| {
        let (q, k) = (ones([2, 5, 3, 4]), ones([2, 5, 3, 4]));
        let Call { v, eta, ln_w, ln_b, state, options } = call;
        ttt_linear(q, k, ones(v), ones(eta), ones(ln_w), ones(ln_b), state, &options)
            .map(drop)
            .map_err(argument)
    };
    let step = |call: Call| {
        let (q, k) = (ones([2, 3, 4]), ones([2, 3, 4]));
        let Call { v, eta, ln_w, ln_b, state, options } = call;
        let state = state.unwrap_or_else(|| TttState::zeros(2, 3, 4, &Device::flex()));
        let (v, eta) = (ones([v[0], v[2], v[3]]), ones([eta[0], eta[2]]));
        ttt_linear_step(q, k, v, eta, ones(ln_w), ones(ln_b), state, &options).map(drop).map_err(argument)
    };
    let state = || TttState::zeros(2, 3, 4, &Device::flex());
    let at = |position: &[usize]| Some(TttState { position: position.to_vec(), ..state() });
    for call in [sequence, step] as [fn(Call) -> Result<(), &'static str>; 2] {
        assert_eq!(call(fine()), Ok(()));
        assert_eq!(call(Call { state: at(&[15, 0]), ..fine() }), Ok(()));
        assert_eq!(call(Call { v: [2, 5, 3, 6], ..fine() }), Err("v"));
        assert_eq!(call(Call { eta: [2, 5, 1], ..fine() }), Err("eta"));
        assert_eq!(call(Call { ln_w: [1, 4], ..fine() }), Err("ln_w"));
        assert_eq!(call(Call { ln_b: [3, 1], ..fine() }), Err("ln_b"));
        assert_eq!(call(Call { state: at(&[16, 0]), ..fine() }), Err("initial position"));
        assert_eq!(call(Call { state: at(&[1]), ..fine() }), Err("initial position"));
        let other = TttState::zeros(1, 3, 4, &Device::flex());
        assert_eq!(call(Call { state: Some(other), ..fine() }), Err("initial weights"));
        let other = TttState { rate: ones([2, 1]), ..state() };
        assert_eq!(call(Call { state: Some(other), ..fine() }), Err("initial rate"));
        let other = TttState { gathered_bias: ones([2, 3, 5]), ..state() };
        assert_eq!(call(Call { state: Some(other), ..fine() }), Err("initial gathered_bias"));
        let none = TttOptions { mini_batch: 0, ..TttOptions::default() };
        assert_eq!(call(Call { options: none, ..fine() }), Err("mini_batch"));
        let scale = TttOptions { scale: Some(f32::NAN), ..TttOptions::default() };
        assert_eq!(call(Call { options: scale, ..fine() }), Err("scale"));
    }
    let offsets = Offsets::new(&[0, 2, 5], 5).ok();
    let options = TttOptions { offsets, ..TttOptions::default() };
    assert_eq!(sequence(Call { options, ..fine() }), Err("offsets"));
    let (q, v) = (ones([1, 2, 1, 4]), ones([1, 2, 1, 5]));
    let norm = || ones([1, 4]);
    let error =
        ttt_linear(q.clone(), q.clone(), v, ones([1, 2, 1]), norm(), norm(), None, &TttOptions::default());
    let message = error.map(drop).unwrap_err().to_string();
    assert!(message.contains("values as wide as the keys, 4"), "{message}");
    let q = q.cast(DType::F64);
    let error =
        ttt_linear(q.clone(), q.clone(), q, ones([1, 2, 1]), norm(), norm(), None, &TttOptions::default());
    assert_eq!(error.map(drop).map_err(argument), Err("eta"));
}
