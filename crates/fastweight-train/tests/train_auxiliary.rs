//! What a model adds to its training loss: load-balance losses and the cost of pondering.

mod common;

use common::{device, open, weights};
use fastweight_train::evaluate::routing;
use fastweight_train::{Recipe, Trainer};

fn recipe(train: &str, model: &str) -> Recipe {
    let text = format!(
        "name = \"test\"\n[task]\nkind = \"recall\"\nvocab = 32\nlength = 16\npairs = 2\n\
         [train]\nlearning_rate = 1e-2\nsteps = 4\nbatch = 2\nwarmup = 0\n{train}\n\
         [model]\nname = \"one\"\nwidth = 16\nlayers = 1\nheads = 2\n{model}\n"
    );
    Recipe::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// The reported loss of the first step, and the weights after it.
fn first_step(recipe: &Recipe) -> (f64, Vec<(String, Vec<u32>)>) {
    let (task, model) = open(recipe);
    let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
    (trainer.step().unwrap(), weights(trainer.model()))
}

#[test]
fn it_is_trained_on_and_not_reported() {
    let mixture = "mixers = [\"mixture_of_memories\"]";
    let halting = |cost: f64| {
        format!(
            "mixers = [\"softmax_attention\"]\nrounds = 3\nhalting = {{ threshold = 0.9, ponder_cost = {cost:?} }}"
        )
    };
    // A part of the batch weighs what it weighs, with the losses of its own.
    for accumulate in [1, 2] {
        let parts = format!("accumulate = {accumulate}");
        let pairs = [
            [
                recipe(&format!("{parts}\nbalance = 0.0"), mixture),
                recipe(&format!("{parts}\nbalance = 3.0"), mixture),
            ],
            [recipe(&parts, &halting(0.0)), recipe(&parts, &halting(3.0))],
        ];
        for (trained, pair) in ["router.weight", "halt.bias"].into_iter().zip(pairs) {
            let [without, with] = pair.map(|recipe| first_step(&recipe));
            assert_eq!(without.0, with.0, "{trained}");
            let of = |weights: &[(String, Vec<u32>)]| {
                weights
                    .iter()
                    .find(|(name, _)| name.ends_with(trained))
                    .map(|(_, bits)| bits.clone())
                    .unwrap()
            };
            assert_ne!(of(&without.1), of(&with.1), "{trained}");
        }
    }
    assert_eq!(recipe("", mixture).train.balance, 0.01);
}

#[test]
fn a_model_of_several_rounds_learns() {
    let recipe = recipe("", "mixers = [\"softmax_attention\"]\nrounds = 3\nhalting = {}");
    let (task, model) = open(&recipe);
    assert_eq!((model.config.rounds, model.config.halting.as_ref().unwrap().threshold), (3, 0.99));
    let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
    let losses: Vec<f64> = (0..30).map(|_| trainer.step().unwrap()).collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    assert!(mean(&losses[25..]) < mean(&losses[..5]), "{losses:?}");
}

#[test]
fn an_evaluation_shows_which_memories_read_and_how_many_rounds_tokens_take() {
    let shown = |recipe: &Recipe| {
        let (task, model) = open(recipe);
        routing(&model.config.init(1, &device()).unwrap(), &task).unwrap()
    };
    assert_eq!(shown(&recipe("", "mixers = [\"softmax_attention\"]")), None);

    let mixture =
        "mixers = [\"softmax_attention\", { kind = \"mixture_of_memories\", memories = 3, top_k = 2 }]";
    let text = recipe("", mixture).source.replace("layers = 1", "layers = 4\nrounds = 2");
    let shown_of_mixture = shown(&Recipe::parse(&text).unwrap()).unwrap();
    let layers: Vec<usize> = shown_of_mixture.loads.iter().map(|load| load.layer).collect();
    assert_eq!(layers, [1, 3, 1, 3], "round by round");
    for load in &shown_of_mixture.loads {
        assert_eq!(load.share.len(), 3);
        assert!((load.share.iter().sum::<f32>() - 2.0).abs() < 1e-4, "every token has two: {load:?}");
        assert!((0.9..=1.5).contains(&load.balance), "{load:?}");
    }
    assert_eq!(shown_of_mixture.mean_rounds, None);

    let halting = |threshold: f64| {
        let halting = format!("halting = {{ threshold = {threshold:?} }}");
        let model = format!("mixers = [\"softmax_attention\"]\nrounds = 3\n{halting}");
        shown(&recipe("", &model)).unwrap().mean_rounds.unwrap()
    };
    // Halting probabilities begin near sigmoid(1) = 0.73.
    assert!((halting(0.01) - 1.0).abs() < 0.01, "{}", halting(0.01));
    assert!((halting(1.0) - 2.0).abs() < 0.1, "{}", halting(1.0));
}
