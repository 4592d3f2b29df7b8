//! scratch
use burn::tensor::Device;
use fastweight_train::progress::Event;
use fastweight_train::{Recipe, compare, report, run};
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let mut recipe = Recipe::load(args[2].as_ref()).unwrap_or_else(|e| panic!("{e}"));
    let folder: std::path::PathBuf = args[3].clone().into();
    let data = args.get(4).filter(|a| *a != "--quick").map(Into::into);
    if args.iter().any(|a| a == "--quick") {
        recipe = recipe.quick().unwrap_or_else(|e| panic!("{e}"));
    }
    let start = std::time::Instant::now();
    let mut on = |e: Event| match e {
        Event::Step(p) if p.step % 100 == 0 => println!(
            "  {} seed {} step {}/{:?} loss {:.4} lr {:.5} {:.0} tok/s left {:.0}s all {:.0}s",
            p.model,
            p.seed,
            p.step,
            p.steps,
            p.loss,
            p.learning_rate,
            p.tokens_per_s,
            p.seconds_left,
            p.seconds_left_in_all
        ),
        Event::Step(_) => {}
        Event::Evaluated(p) => println!(
            "{} seed {} step {} score {:.4} ({:.1}s)",
            p.model,
            p.seed,
            p.step,
            p.score.unwrap_or(0.0),
            start.elapsed().as_secs_f64()
        ),
        other => println!("{other:?}"),
    };
    match args[1].as_str() {
        "compare" => {
            let c = compare::compare(
                &recipe,
                &compare::Options { folder: folder.clone(), data, restart: false },
                &Device::flex(),
                &mut on,
            )
            .unwrap_or_else(|e| panic!("{e}"));
            for e in &c.entries {
                println!("{}", e.line());
            }
            for r in &c.rows {
                println!("{r:?}");
            }
            report::write(&c, &folder.join("report.html")).unwrap_or_else(|e| panic!("{e}"));
        }
        _ => println!(
            "{:?}",
            run::train(&recipe, &run::Options { folder, data, restart: false }, &Device::flex(), &mut on)
                .unwrap_or_else(|e| panic!("{e}"))
        ),
    }
    println!("total {:.1}s", start.elapsed().as_secs_f64());
}
