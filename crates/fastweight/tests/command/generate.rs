//! `fastweight generate` and `fastweight eval` on models of text.

use std::io::Read;
use std::process::Stdio;

use crate::recipes;
use crate::support::{Folder, command, run, run_with_input};

/// A run in `folder` trained on `text`.
fn trained(folder: &Folder, text: &str, steps: usize) -> String {
    let recipe = folder.write("text.toml", recipes::text(steps));
    let data = folder.write("data.txt", text);
    let out = folder.arg("run");
    run(&["train", &recipe, "--data", &data, "--out", &out, "--quiet"]).ok();
    out
}

#[test]
fn the_same_seed_gives_the_same_text_in_two_processes() {
    let folder = Folder::new();
    let out = trained(&folder, &"to be or not to be that is the question ".repeat(40), 5);
    let args = ["generate", &out, "--prompt", "to be", "--tokens", "60", "--temperature", "1", "--seed"];
    let text = |seed: &str| run(&[&args[..], &[seed]].concat()).ok().stdout;
    let first = text("3");
    assert_eq!(first, text("3"));
    assert_ne!(first, text("4"));

    folder.write("prompt.txt", "to be");
    let file = folder.arg("prompt.txt");
    let rest = ["--tokens", "60", "--temperature", "1", "--seed", "3"];
    let from_file = run(&[&["generate", &out, "--prompt-file", &file][..], &rest].concat()).ok();
    assert_eq!(from_file.stdout, first, "a prompt file is the same as a prompt");
    let piped = run_with_input(&[&["generate", &out][..], &rest].concat(), b"to be").ok();
    assert_eq!(piped.stdout, first, "so is standard input");
    let json = run(&[&args[..], &["3", "--json"]].concat()).ok().json();
    assert_eq!(json[0]["text"].as_str().expect("a text"), first.trim_end_matches('\n'));
    assert_eq!((&json[0]["tokens"], &json[0]["seed"]), (&60.into(), &3.into()));
}

#[test]
fn four_byte_characters_come_out_whole_while_streaming() {
    let folder = Folder::new();
    let out = trained(&folder, &"🦀".repeat(400), 80);
    let args = ["generate", &out, "--prompt", "🦀", "--temperature", "0", "--tokens", "81"];
    let mut child = command(&args).stdout(Stdio::piped()).spawn().expect("the command starts");
    let mut stdout = child.stdout.take().expect("a pipe");
    let (mut buffer, mut text) = (vec![0; 1 << 16], String::new());
    loop {
        let count = stdout.read(&mut buffer).expect("a pipe can be read");
        if count == 0 {
            break;
        }
        text.push_str(std::str::from_utf8(&buffer[..count]).expect("no write cuts a character"));
    }
    assert!(child.wait().expect("a child").success());
    let whole = text.strip_prefix(&"🦀".repeat(20)).expect("twenty whole characters");
    assert_eq!(whole, "\u{FFFD}\n", "the character that the last token began is marked");
}

#[test]
fn a_reader_that_leaves_is_not_an_error() {
    let folder = Folder::new();
    let out = trained(&folder, &"abc ".repeat(200), 2);
    let args = ["generate", &out, "--prompt", "a", "--tokens", "100000"];
    let mut child =
        command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut one = [0];
    stdout.read_exact(&mut one).expect("text streams before the end");
    drop(stdout);
    let output = child.wait_with_output().expect("the command ends");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn eval_scores_the_run_on_its_own_and_on_other_text() {
    let folder = Folder::new();
    let out = trained(&folder, &"abcdefgh".repeat(60), 60);
    let own = run(&["eval", &out, "--json", "--quiet"]).ok().json();
    let score = own[0]["score"].as_f64().expect("a score");
    assert_eq!(own[0]["metric"], "bits_per_byte");
    let other = folder.write("other.txt", "hgfedcba".repeat(60));
    let worse = run(&["eval", &out, "--data", &other, "--json", "--quiet"]).ok().json();
    assert!(worse[0]["score"].as_f64().expect("a score") > score, "{own:?} {worse:?}");
    let text = run(&["eval", &out]).ok();
    assert!(text.stdout.contains("bits per byte"), "{}", text.stdout);
    run(&["eval", &out, "small_t64_n9"]).refused(2, &["small_t64_n9", "small_t64_n"]);
    let recall = folder.write("recall.toml", recipes::recall(2));
    for task in ["t64_n4", &recall] {
        run(&["eval", &out, task]).refused(2, &["trained on text", "is recall", task]);
    }
}

#[test]
fn prompts_and_options_that_do_not_fit_are_refused() {
    let folder = Folder::new();
    let out = trained(&folder, &"abc ".repeat(200), 2);
    let latin = folder.write("latin.txt", b"caf\xe9 au lait");
    let cases: [(&[&str], &[&str]); 10] = [
        (&["--prompt", ""], &["empty"]),
        (&["--prompt-file", &latin], &["not UTF-8", "offset 3"]),
        (&["--prompt-file", &out], &["could not read", &out]),
        (&["--prompt-file", "missing.txt"], &["could not read", "missing.txt"]),
        (&["--prompt", "a", "--temperature=-1"], &["temperature", "-1"]),
        (&["--prompt", "a", "--temperature", "-1"], &["temperature", "-1", "expected"]),
        (&["--prompt", "a", "--tokens", "-1"], &["--tokens", "'-1'", "expected a whole number"]),
        (&["--prompt", "a", "--seed", "-1"], &["--seed", "'-1'", "0..=18446744073709551615"]),
        (&["--prompt", "a", "--top-p", "1.5"], &["top-p", "1.5"]),
        (&["--prompt", "a", "--prompt-file", "b"], &["cannot be used with"]),
    ];
    for (extra, words) in cases {
        run(&[&["generate", &out][..], extra].concat()).refused(2, words);
    }
    run_with_input(&["generate", &out], b"").refused(2, &["empty"]);
}

#[test]
fn a_model_of_recall_has_no_text() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(1));
    let out = folder.arg("run");
    run(&["train", &recipe, "--out", &out, "--quiet"]).ok();
    run(&["generate", &out, "--prompt", "a"]).refused(2, &["recall", "text"]);
    let scored = run(&["eval", &out, "--json", "--batches", "1"]).ok().json();
    assert_eq!(scored[0]["metric"], "accuracy");
    assert!(scored[0]["by_pairs"].as_array().is_some_and(|pairs| !pairs.is_empty()));
}
