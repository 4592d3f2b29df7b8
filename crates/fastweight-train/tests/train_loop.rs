//! The training loop: determinism, accumulation, optimizer, schedule, and what stops it.

mod common;

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorData};
use common::{device, losses, open, recall, weights};
use fastweight_memory::parameters::{self, ParameterGroup};
use fastweight_memory::{ChannelMixerConfig, MixerConfig};
use fastweight_models::LanguageModel;
use fastweight_train::gradients::Gradients;
use fastweight_train::optimizer::{AdamW, AdamWOptions};
use fastweight_train::recipe::Warmup;
use fastweight_train::schedule::Schedule;
use fastweight_train::trainer::{Moment, Position};
use fastweight_train::{TrainError, Trainer, evaluate};

#[test]
fn the_same_seed_gives_the_same_bits_and_another_seed_does_not() {
    for mixer in ["softmax_attention", "gated_delta_net"] {
        let recipe = recall("steps = 6\nbatch = 3\naccumulate = 2", &[mixer]);
        let (task, model) = open(&recipe);
        let train = |seed| {
            let mut trainer = Trainer::new(&task, &recipe.train, &model, seed, &device()).unwrap();
            (losses(&mut trainer, 6), weights(trainer.model()))
        };
        let first = train(5);
        assert_eq!(first, train(5), "{mixer}");
        assert_ne!(first.0, train(6).0, "{mixer}");
    }
}

#[test]
fn every_mixer_stays_finite_and_learns_for_thirty_steps() {
    for mixer in MixerConfig::NAMES {
        let recipe = recall("steps = 30\nbatch = 4\nwarmup = 0", &[mixer]);
        let (task, model) = open(&recipe);
        let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
        let losses: Vec<f64> = (0..30).map(|_| trainer.step().unwrap()).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()), "{mixer}: {losses:?}");
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        assert!(mean(&losses[25..]) < mean(&losses[..5]), "{mixer}: {losses:?}");
        for (name, data) in parameters::export(trainer.model()) {
            assert!(data.iter::<f32>().all(f32::is_finite), "{mixer}: {name}");
        }
    }
}

#[test]
fn every_channel_mixer_stays_finite_and_learns_for_thirty_steps() {
    for name in ChannelMixerConfig::NAMES {
        let recipe = recall("steps = 30\nbatch = 4\nwarmup = 0", &["gated_delta_net"]);
        let (task, mut model) = open(&recipe);
        model.config.channel_mixers = vec![ChannelMixerConfig::by_name(name).unwrap()];
        let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
        let losses: Vec<f64> = (0..30).map(|_| trainer.step().unwrap()).collect();
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        assert!(mean(&losses[25..]) < mean(&losses[..5]), "{name}: {losses:?}");
        for (parameter, data) in parameters::export(trainer.model()) {
            assert!(data.iter::<f32>().all(f32::is_finite), "{name}: {parameter}");
        }
    }
}

#[test]
fn accumulated_batches_equal_one_large_batch() {
    let small = recall("steps = 3\nbatch = 2\naccumulate = 4\nclip = 0.5", &["delta_net"]);
    let large = recall("steps = 3\nbatch = 8\nclip = 0.5", &["delta_net"]);
    let (task, model) = open(&small);
    let mut a = Trainer::new(&task, &small.train, &model, 1, &device()).unwrap();
    let mut b = Trainer::new(&task, &large.train, &model, 1, &device()).unwrap();
    for step in 0..3 {
        let (a, b) = (a.step().unwrap(), b.step().unwrap());
        assert!((a - b).abs() < 1e-5 * b.abs(), "step {step}: {a} against {b}");
    }
    assert_eq!(a.position().tokens, b.position().tokens);
    for ((name, a), (_, b)) in parameters::export(a.model()).into_iter().zip(parameters::export(b.model())) {
        // Adam divides by the root of the second moment, which magnifies rounding where a gradient is near zero.
        let far = a.iter::<f32>().zip(b.iter::<f32>()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 2e-3, "{name}: {far}");
    }
}

/// Gradients of the mean square of a linear map, and the same for burn's optimizers.
fn square_gradients(module: &burn::nn::Linear) -> (Gradients, GradientsParams) {
    let loss = || module.forward(Tensor::<2>::ones([2, 5], &device().autodiff())).square().mean();
    (Gradients::take(module, loss().backward()), GradientsParams::from_grads(loss().backward(), module))
}

#[test]
fn adamw_is_burns_on_matrices_and_leaves_vectors_undecayed() {
    let options = AdamWOptions { betas: [0.9, 0.95], epsilon: 1e-8, weight_decay: 0.3 };
    let burn = |decay: f32| {
        let config = AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.95).with_epsilon(1e-8);
        config.with_weight_decay(decay).build()
    };
    let start = LinearConfig::new(5, 3).init(&device().autodiff());
    let mut ours = start.clone();
    let mut optimizer = AdamW::new(options);
    let (mut weight, mut bias) = (start.weight.val().inner(), start.bias.clone().unwrap().val().inner());
    let (mut weight_state, mut bias_state) = (None, None);
    for step in 0..5 {
        let (gradients, theirs) = square_gradients(&ours);
        let rate = 0.01 * f64::from(step + 1);
        (weight, weight_state) =
            burn(0.3).step(rate, weight, theirs.get::<2>(ours.weight.id).unwrap(), weight_state);
        let id = ours.bias.as_ref().unwrap().id;
        (bias, bias_state) = burn(0.0).step(rate, bias, theirs.get::<1>(id).unwrap(), bias_state);
        ours = optimizer.step(ours, &gradients, rate, 1.0).unwrap();
        let close = |a: TensorData, b: TensorData| {
            a.iter::<f32>().zip(b.iter::<f32>()).all(|(a, b)| (a - b).abs() < 1e-6)
        };
        assert!(close(ours.weight.val().into_data(), weight.to_data()), "weight after step {step}");
        assert!(
            close(ours.bias.clone().unwrap().val().into_data(), bias.to_data()),
            "bias after step {step}"
        );
    }
    assert!(ours.weight.val().is_require_grad());
}

#[test]
fn only_matrices_decay() {
    let recipe = recall("steps = 1\nbatch = 1", &["gated_delta_net"]);
    let (_, model) = open(&recipe);
    let built = model.config.init(1, &device()).unwrap();
    let decaying = built.parameters().into_iter().filter(|p| p.group == ParameterGroup::Decay);
    for parameter in decaying {
        assert_eq!(parameter.shape.len(), 2, "{}", parameter.name);
        for word in ["norm", "bias", "embedding", "a_log", "dt_bias"] {
            assert!(!parameter.name.contains(word), "{}", parameter.name);
        }
    }
}

#[test]
fn clipping_scales_all_gradients_to_one_global_norm() {
    let module = LinearConfig::new(5, 3).init(&device().autodiff());
    let (gradients, theirs) = square_gradients(&module);
    let mut squares = 0.0;
    for data in [
        theirs.get::<2>(module.weight.id).unwrap().into_data(),
        theirs.get::<1>(module.bias.as_ref().unwrap().id).unwrap().into_data(),
    ] {
        squares += data.iter::<f32>().map(|x| f64::from(x).powi(2)).sum::<f64>();
    }
    assert!((gradients.norm().unwrap() - squares.sqrt()).abs() < 1e-12);

    // With SGD-like moments (beta 0) and a huge epsilon, the step is proportional to the scaled gradient.
    let options = AdamWOptions { betas: [0.0, 0.0], epsilon: 1e6, weight_decay: 0.0 };
    let moved = |scale: f32| {
        let after = AdamW::new(options).step(module.clone(), &gradients, 1e6, scale).unwrap();
        (module.weight.val() - after.weight.val()).into_data().iter::<f32>().collect::<Vec<_>>()
    };
    for (half, whole) in moved(0.5).iter().zip(moved(1.0)) {
        assert!((2.0 * half - whole).abs() < 1e-4 * whole.abs().max(1e-3), "{half} {whole}");
    }
}

#[test]
fn the_learning_rate_warms_up_and_then_follows_a_cosine() {
    let steps = Schedule { peak: 2.0, min: 0.1, warmup: Warmup::Steps(10) };
    let at = |step: usize| steps.at(step, step as f64 / 100.0);
    for (step, expected) in [(0, 0.2), (4, 1.0), (9, 2.0), (10, 2.0), (55, 1.1), (100, 0.2)] {
        assert!((at(step) - expected).abs() < 1e-9, "step {step}: {}", at(step));
    }
    let share = Schedule { warmup: Warmup::Fraction(0.1), ..steps };
    for (fraction, expected) in [(0.05, 1.0), (0.1, 2.0), (0.55, 1.1), (1.0, 0.2)] {
        assert!((share.at(7, fraction) - expected).abs() < 1e-9, "{fraction}: {}", share.at(7, fraction));
    }
    assert!(share.at(0, 0.0) > 0.0, "the first step moves");
    let none = Schedule { warmup: Warmup::Steps(0), ..steps };
    assert_eq!(none.at(0, 0.0), 2.0);
}

#[test]
fn a_budget_in_tokens_is_rounded_up_to_whole_steps_and_the_loss_falls() {
    let recipe = recall("tokens = 30000\nbatch = 16\neval_every = 60", &["softmax_attention"]);
    let (task, model) = open(&recipe);
    let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
    assert_eq!(trainer.steps(), Some(118));
    let mut seen = Vec::new();
    trainer
        .run(&mut |trainer, moment| {
            match moment {
                Moment::Step => seen.push(trainer.position().losses.last().unwrap().1),
                Moment::Evaluated => assert!([60, 118].contains(&trainer.position().step)),
                Moment::Settled => {}
            }
            Ok(())
        })
        .unwrap();
    assert_eq!((seen.len(), trainer.position().tokens), (118, 118 * 256));
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    assert!(mean(&seen[108..]) < mean(&seen[..10]) - 0.3, "{seen:?}");
    assert!(trainer.is_finished() && trainer.seconds_left() == 0.0);
}

#[test]
fn a_reached_target_ends_the_training() {
    let recipe = recall("steps = 50\nbatch = 1\neval_every = 5\ntarget = 0.0", &["linear_attention"]);
    let (task, model) = open(&recipe);
    let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
    trainer.run(&mut |_, _| Ok(())).unwrap();
    assert_eq!(trainer.position().step, 5);
    assert!(trainer.reached_target() && trainer.fraction() < 1.0);
}

/// A trainer whose parameter `name` holds `value` everywhere.
fn with_parameter<'a>(trainer: &mut Trainer<'a>, name: &str, value: f32) {
    let spoil = |model: LanguageModel| {
        let known: Vec<_> = parameters::export(&model).into_iter().collect();
        let replaced = parameters::import(model, |info| {
            let (_, data) = known.iter().find(|(known, _)| *known == info.name)?;
            let size = data.shape().num_elements();
            let spoiled = || TensorData::new(vec![value; size], data.shape().to_vec());
            Some(if info.name == name { spoiled() } else { data.clone() })
        });
        Ok(replaced?)
    };
    trainer.resume(spoil, Vec::new(), Position::default()).unwrap();
}

#[test]
fn values_that_are_not_finite_stop_training_and_the_place_is_named() {
    let recipe = recall("steps = 5\nbatch = 2", &["delta_net"]);
    let (task, model) = open(&recipe);
    let cases = [
        ("blocks.1.mlp.up.weight", f32::NAN, "the loss", "the parameter blocks.1.mlp.up.weight"),
        ("blocks.0.mlp.down.weight", 3e38, "the loss", "the output of the MLP of layer 0"),
        ("blocks.1.mixer.o.weight", 3e38, "the loss", "layer 1"),
    ];
    for (name, value, what, place) in cases {
        let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
        let known = trainer.model().parameters();
        assert!(known.iter().any(|p| p.name == name), "{name} is not in {known:?}");
        with_parameter(&mut trainer, name, value);
        let before = weights(trainer.model());
        let error = trainer.step().unwrap_err();
        let TrainError::NonFinite { step: Some(1), what: found, .. } = &error else {
            panic!("{name}: {error}")
        };
        let message = error.to_string();
        assert!(*found == what && message.contains(place), "{name}: {message}");
        assert_eq!(before, weights(trainer.model()), "nothing was updated");
    }
}

#[test]
fn a_gate_that_is_not_a_number_is_a_divergence() {
    for mixer in ["gated_delta_net", "mamba2"] {
        let recipe = recall("steps = 5\nbatch = 2", &[mixer]);
        let (task, model) = open(&recipe);
        for (name, value) in [("embedding.weight", f32::NAN), ("blocks.0.mlp.down.weight", 3e38)] {
            let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
            with_parameter(&mut trainer, name, value);
            let error = trainer.step().unwrap_err();
            assert!(matches!(error, TrainError::NonFinite { step: Some(1), .. }), "{mixer}: {error}");
            let place = if value.is_nan() { name } else { "layer" };
            assert!(error.to_string().contains(place) && !error.is_input(), "{mixer}: {error}");
            let error = trainer.evaluate(1).unwrap_err();
            assert!(matches!(error, TrainError::NonFinite { step: Some(0), .. }), "{mixer}: {error}");
            let error = evaluate::score(&trainer.model().valid(), &task, 1).unwrap_err();
            assert!(matches!(error, TrainError::NonFinite { step: None, .. }), "{mixer}: {error}");
        }
    }
}

#[test]
fn a_score_of_a_model_with_outputs_that_are_not_finite_is_an_error() {
    let recipe = recall("steps = 5\nbatch = 2", &["delta_net"]);
    let (task, model) = open(&recipe);
    let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
    with_parameter(&mut trainer, "norm.weight", f32::NAN);
    let error = trainer.evaluate(1).unwrap_err().to_string();
    assert!(error.contains("a logit is not finite") && error.contains("norm.weight"), "{error}");
    assert!(trainer.position().scores.is_empty());
}

#[test]
fn an_update_that_is_not_finite_is_not_taken() {
    let recipe = recall("steps = 5\nbatch = 2\nwarmup = 0", &["delta_net"]);
    let (task, mut model) = open(&recipe);
    model.learning_rate = 1e39;
    let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
    let before = weights(trainer.model());
    let error = trainer.step().unwrap_err();
    assert!(matches!(error, TrainError::NonFinite { step: Some(1), .. }), "{error}");
    assert!(error.to_string().contains("an updated weight"), "{error}");
    assert_eq!((before, 0), (weights(trainer.model()), trainer.position().step));
}

#[test]
fn a_gradient_that_is_not_finite_names_the_parameter_nearest_the_loss() {
    #[derive(Module, Debug)]
    struct Chain {
        early: Param<Tensor<1>>,
        middle: Param<Tensor<1>>,
        late: Param<Tensor<1>>,
    }
    let device = device().autodiff();
    let chain = Chain {
        early: Param::from_tensor(Tensor::from_data([1.0f32], &device)),
        middle: Param::from_tensor(Tensor::from_data([0.0f32], &device)),
        late: Param::from_tensor(Tensor::from_data([1.0f32], &device)),
    };
    // The root has an infinite slope at zero, so `middle` and what lies before it have broken gradients.
    let root = (chain.early.val() * chain.middle.val()).sqrt();
    let gradients = Gradients::take(&chain, (root + chain.late.val()).sum().backward());
    assert_eq!(gradients.last_non_finite(), Some("middle"));
    assert!(!gradients.norm().unwrap().is_finite());
}
