//! Text files, tokenizers, streaming decoding, training crops and held-out windows.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use fastweight_tasks::text::{HELD_OUT, TextDataset, TextSource, Tokenizer, bits_per_byte};
use fastweight_tasks::{IGNORE, TaskError, TokenBatch};
use serde_json::json;

fn source(text: &str) -> TextSource {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    fs::write(&path, text).unwrap();
    TextSource::open(&path).unwrap()
}

/// The 256 byte characters of a byte-level vocabulary, in byte order.
fn byte_level_alphabet() -> Vec<char> {
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut next = 256;
    (0..256)
        .map(|b| {
            let code = if printable(b) { b } else { next };
            next += u32::from(!printable(b));
            char::from_u32(code).unwrap()
        })
        .collect()
}

fn open_tokenizer(definition: serde_json::Value) -> Result<Tokenizer, TaskError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, definition.to_string()).unwrap();
    Tokenizer::open(&path)
}

/// Byte-level BPE: one id a byte, and one merge, "th" = 256. It asks for truncation and padding.
fn byte_level() -> Tokenizer {
    let mut vocab: serde_json::Map<String, serde_json::Value> =
        byte_level_alphabet().iter().enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    vocab.insert("th".into(), json!(256));
    let part =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    open_tokenizer(json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "!"},
        "added_tokens": [], "normalizer": null, "pre_tokenizer": part, "post_processor": null, "decoder": part,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": [["t", "h"]]}
    }))
    .unwrap()
}

/// Words marked by a leading "\u{2581}", everything else as byte tokens `<0xNN>`.
fn byte_fallback() -> Tokenizer {
    let mut vocab: serde_json::Map<String, serde_json::Value> =
        (0..256).map(|b| (format!("<0x{b:02X}>"), json!(b))).collect();
    for (i, token) in ["\u{2581}", "a", "b", "\u{2581}a"].iter().enumerate() {
        vocab.insert((*token).into(), json!(256 + i));
    }
    open_tokenizer(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "post_processor": null,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": [["\u{2581}", "a"]]}
    }))
    .unwrap()
}

#[test]
fn a_folder_is_read_in_the_order_of_its_paths() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("b")).unwrap();
    for (name, text) in [
        ("c.txt", "five"),
        ("b/2.txt", "four"),
        ("b/1.txt", "three"),
        ("a.txt", "one"),
        ("b/0.txt", ""),
        (".x", "no"),
    ] {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let source = TextSource::open(folder.path()).unwrap();
    assert_eq!(source.text(), "onethreefourfive");
    let documents: Vec<_> = source
        .documents()
        .iter()
        .map(|d| (d.path.strip_prefix(folder.path()).unwrap().to_str().unwrap(), d.bytes.clone()))
        .collect();
    assert_eq!(documents, [("a.txt", 0..3), ("b/1.txt", 3..8), ("b/2.txt", 8..12), ("c.txt", 12..16)]);
}

#[test]
fn unreadable_sources_say_why_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let message = |path: &Path| TextSource::open(path).unwrap_err().to_string();
    assert!(message(&path).contains("cannot read"));
    assert!(message(folder.path()).contains("holds no text"));
    fs::write(&path, "").unwrap();
    assert!(message(&path).contains("holds no text"));
    assert!(message(folder.path()).contains("holds no text"));
    fs::write(&path, b"one\ntwo \xe9t\xe9").unwrap();
    for opened in [path.as_path(), folder.path()] {
        let error = TextSource::open(opened).unwrap_err();
        assert!(matches!(error, TaskError::NotUtf8 { offset: 8, line: 2, byte: 0xe9, .. }), "{error}");
        assert!(error.to_string().contains("byte 0xe9 at offset 8 (line 2)"), "{error}");
    }
    fs::write(&path, b"cut \xf0\x9f").unwrap();
    assert!(matches!(TextSource::open(&path).unwrap_err(), TaskError::NotUtf8 { offset: 4, .. }));
    #[cfg(unix)]
    assert!(message(Path::new("/dev/null")).contains("neither a file nor a folder"));
}

#[test]
fn the_byte_tokenizer_is_its_own_inverse() {
    let text = "plain, \u{e9}t\u{e9}, \u{1f600}\n";
    let ids = Tokenizer::Byte.encode(text).unwrap();
    assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(Tokenizer::Byte.decode(&ids).unwrap(), text);
    assert_eq!(Tokenizer::Byte.vocab_size(), 256);
    assert!(matches!(Tokenizer::Byte.decode(&[256]), Err(TaskError::UnknownToken { id: 256, vocab: 256 })));
}

#[test]
fn a_hugging_face_tokenizer_encodes_whole_texts() {
    let tokenizer = byte_level();
    assert_eq!(tokenizer.vocab_size(), 257);
    let text = "the other \u{1f600} thing";
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(ids.len(), text.len() - 3, "no truncation, no padding, three merges");
    assert_eq!(ids[0], 256);
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    assert!(matches!(tokenizer.decode(&[257]), Err(TaskError::UnknownToken { id: 257, vocab: 257 })));
}

#[test]
fn a_broken_tokenizer_file_is_named() {
    assert!(
        Tokenizer::open(Path::new("no/such/file"))
            .unwrap_err()
            .to_string()
            .contains("cannot read no/such/file")
    );
    let message = open_tokenizer(json!({"model": 1})).unwrap_err().to_string();
    assert!(message.contains("is not a Hugging Face tokenizer.json"), "{message}");
}

/// Streams `text` and checks that every piece is whole; returns the number of pieces that were not empty.
fn stream(tokenizer: &Tokenizer, text: &str) -> usize {
    let mut decoder = tokenizer.stream_decoder();
    let pieces: Vec<String> =
        tokenizer.encode(text).unwrap().into_iter().map(|id| decoder.push(id).unwrap()).collect();
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
    assert_eq!(pieces.concat(), text);
    assert_eq!(decoder.finish().unwrap(), "");
    pieces.iter().filter(|piece| !piece.is_empty()).count()
}

#[test]
fn streamed_text_equals_the_text_with_no_broken_character() {
    for tokenizer in [Tokenizer::Byte, byte_level(), byte_fallback()] {
        for text in [
            "a b a",
            "\u{1f600}",
            "a\u{1f600}b \u{1f600}\u{1f601} a",
            "\u{e9}\u{4f60}\u{597d} a\u{20ac}",
            "  a",
        ] {
            let pieces = stream(&tokenizer, text);
            assert!(pieces <= text.chars().count());
        }
        assert_eq!(stream(&tokenizer, "ab\u{1f600}"), 3, "what is certain is shown at once");
    }
}

#[test]
fn a_character_cut_at_any_byte_is_held_back_until_it_is_whole() {
    let emoji = "\u{1f600}".as_bytes();
    for tokenizer in [Tokenizer::Byte, byte_level(), byte_fallback()] {
        for cut in 1..=emoji.len() {
            let mut decoder = tokenizer.stream_decoder();
            let pieces: Vec<String> =
                emoji[..cut].iter().map(|&b| decoder.push(u32::from(b)).unwrap()).collect();
            assert!(pieces[..cut.min(3)].iter().all(String::is_empty), "{pieces:?}");
            let rest = decoder.finish().unwrap();
            if cut == emoji.len() {
                assert_eq!((pieces[3].as_str(), rest.as_str()), ("\u{1f600}", ""));
            } else {
                assert!(!rest.is_empty() && rest.chars().all(|c| c == '\u{fffd}'), "{rest:?}");
            }
        }
    }
}

#[test]
fn invalid_bytes_do_not_stop_the_stream() {
    let bytes = b"a\xf0\x9fb\xff\xffc";
    for (tokenizer, expected) in
        [(Tokenizer::Byte, "a\u{fffd}b\u{fffd}\u{fffd}c"), (byte_level(), "a\u{fffd}b\u{fffd}\u{fffd}c")]
    {
        let mut decoder = tokenizer.stream_decoder();
        let mut text: String = bytes.iter().map(|&b| decoder.push(u32::from(b)).unwrap()).collect();
        assert!(text.ends_with('c'));
        text += &decoder.finish().unwrap();
        assert_eq!(text, expected);
    }
    let tokenizer = byte_fallback();
    let mut decoder = tokenizer.stream_decoder();
    let ids = [0xe4, 0xbd, 0xa0, 0xf0, 257];
    let pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    assert_eq!(pieces, ["", "", "\u{4f60}", "", "\u{fffd}a"], "what was shown is not shown again");
}

#[test]
fn an_unknown_token_is_dropped_and_the_stream_goes_on() {
    for tokenizer in [Tokenizer::Byte, byte_level()] {
        let mut decoder = tokenizer.stream_decoder();
        assert!(decoder.push(9999).is_err());
        assert_eq!(decoder.push(u32::from(b'a')).unwrap(), "a");
    }
}

#[test]
fn the_end_is_held_out_at_a_character_boundary() {
    let dataset = TextDataset::new(&source(&"ab".repeat(500)), &Tokenizer::Byte, HELD_OUT).unwrap();
    assert_eq!((dataset.train_bytes(), dataset.held_out_bytes()), (950, 50));
    for ascii in 0..4 {
        let text = "x".repeat(ascii) + &"\u{1f600}".repeat(50);
        let dataset = TextDataset::new(&source(&text), &Tokenizer::Byte, HELD_OUT).unwrap();
        assert_eq!(dataset.train_bytes() + dataset.held_out_bytes(), text.len());
        assert_eq!((dataset.train_bytes() - ascii) % 4, 0);
        assert!(
            dataset.held_out_bytes() >= text.len() / 20 && dataset.held_out_bytes() < text.len() / 20 + 5
        );
    }
}

/// A text of `n` two-byte characters, all different, so that a token says where it stands.
fn distinct(n: u32) -> (TextSource, Vec<u32>) {
    let text: String = (0..n).map(|i| char::from_u32(0x100 + i).unwrap()).collect();
    let ids = Tokenizer::Byte.encode(&text).unwrap();
    (source(&text), ids)
}

#[test]
fn training_crops_are_pure_shifted_by_one_and_never_held_out() {
    let (source, ids) = distinct(200);
    let dataset = TextDataset::new(&source, &Tokenizer::Byte, 0.25).unwrap();
    assert_eq!(dataset.train_tokens(), &ids[..300]);
    assert_eq!(dataset.held_out_tokens(), &ids[300..]);
    let mut starts = HashSet::new();
    for index in 0..40 {
        let batch = dataset.train_batch(5, index, 16, 100).unwrap();
        assert_eq!((batch.batch, batch.time, batch.scored()), (16, 100, 1600));
        for (tokens, targets) in batch.rows() {
            let start = (0..200).find(|&s| ids[s..s + 100] == *tokens).expect("a crop of the training part");
            assert!(
                targets.iter().zip(&dataset.train_tokens()[start + 1..]).all(|(&t, &id)| t == i64::from(id))
            );
            starts.insert(start);
        }
    }
    assert!(starts.contains(&0) && starts.contains(&199) && starts.len() > 150, "{}", starts.len());

    let base = dataset.train_batch(5, 0, 16, 100).unwrap();
    assert_eq!(base, dataset.train_batch(5, 0, 16, 100).unwrap());
    assert_ne!(base, dataset.train_batch(5, 1, 16, 100).unwrap());
    assert_ne!(base, dataset.train_batch(6, 0, 16, 100).unwrap());
    let halves = [0, 1].map(|i| dataset.train_batch(5, i, 8, 100).unwrap().tokens).concat();
    assert_eq!(base.tokens, halves, "crops do not depend on the batch size");
}

#[test]
fn every_held_out_token_is_a_target_exactly_once() {
    let (source, ids) = distinct(200);
    let dataset = TextDataset::new(&source, &Tokenizer::Byte, 0.25).unwrap();
    for context in [1, 7, 10, 99, 100] {
        for batch in [1, 3, 64] {
            let batches: Vec<TokenBatch> =
                (0..).map_while(|i| dataset.held_out_batch(i, batch, context).unwrap()).collect();
            assert_eq!(batches.iter().map(|b| b.batch).sum::<usize>(), dataset.held_out_windows(context));
            let mut place = 300;
            for (tokens, targets) in batches.iter().flat_map(TokenBatch::rows) {
                assert_eq!((tokens.len(), targets.len()), (context, context));
                for (&token, &target) in tokens.iter().zip(targets).filter(|(_, target)| **target != IGNORE) {
                    assert_eq!((token, target), (ids[place - 1], i64::from(ids[place])));
                    place += 1;
                }
                let scored = targets.iter().take_while(|&&target| target != IGNORE).count();
                assert!(targets[scored..].iter().all(|&target| target == IGNORE), "padding is at the end");
            }
            assert_eq!(place, 400);
        }
    }
}

#[test]
fn documents_are_encoded_apart_and_their_offsets_kept() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("1"), "that").unwrap();
    fs::write(folder.path().join("2"), "hat, the other thing").unwrap();
    let source = TextSource::open(folder.path()).unwrap();
    let dataset = TextDataset::new(&source, &byte_level(), 0.25).unwrap();
    assert_eq!((dataset.train_bytes(), dataset.held_out_bytes()), (18, 6));
    assert_eq!(dataset.train_offsets(), [0, 3, 15]);
    assert_eq!(dataset.held_out_offsets(), [0, 5]);
    assert_eq!(dataset.train_tokens().len(), 15);
    assert_eq!(dataset.held_out_tokens().len(), 5);
}

#[test]
fn bits_per_byte_are_exact() {
    let ln2 = std::f64::consts::LN_2;
    assert_eq!(bits_per_byte(8.0 * ln2, 100, 100), 8.0);
    assert_eq!(bits_per_byte(6.0 * ln2, 100, 300), 2.0);
    let dataset = TextDataset::new(&source(&"th".repeat(40)), &byte_level(), 0.25).unwrap();
    assert_eq!(dataset.held_out_bits_per_byte(4.0 * ln2), 2.0, "one token is two bytes");
}

#[test]
fn short_texts_and_zero_sizes_say_what_to_change() {
    let dataset = TextDataset::new(&source(&"a".repeat(100)), &Tokenizer::Byte, 0.2).unwrap();
    dataset.require_context(20).unwrap();
    assert_eq!(dataset.train_batch(0, 0, 1, 20).unwrap().time, 20);
    for (error, words) in [
        (
            dataset.train_batch(0, 0, 1, 80).unwrap_err(),
            "the training part of the text has 80 tokens, fewer than the 81",
        ),
        (
            dataset.require_context(21).unwrap_err(),
            "the held-out part of the text has 20 tokens, fewer than the 21",
        ),
        (dataset.held_out_batch(0, 1, 21).unwrap_err(), "held-out part"),
        (dataset.require_context(usize::MAX).unwrap_err(), "smaller context"),
        (dataset.train_batch(0, 0, 0, 8).unwrap_err(), "batch is 0"),
        (dataset.train_batch(0, 0, 1, 0).unwrap_err(), "context is 0"),
        (
            TextDataset::new(&source("a"), &Tokenizer::Byte, 0.05).unwrap_err(),
            "training part of the text has 0 tokens",
        ),
        (
            TextDataset::new(&source("abc"), &Tokenizer::Byte, 1.0).unwrap_err(),
            "held_out is 1, expected a share",
        ),
        (TextDataset::new(&source("abc"), &Tokenizer::Byte, f64::NAN).unwrap_err(), "held_out is NaN"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn a_tokenizer_that_loses_text_is_seen() {
    let exact = |text: &str, tokenizer: &Tokenizer| {
        let whole = TextDataset::held_out(&source(text), tokenizer, 1).unwrap();
        assert!(whole.train_tokens().is_empty());
        assert_eq!(whole.held_out_bytes(), text.len());
        whole.is_exact()
    };
    let text = "the other \u{1f600} thing  twice\n";
    assert!(exact(text, &Tokenizer::Byte));
    assert!(exact(text, &byte_level()));
    let words = |pre_tokenizer: serde_json::Value| {
        let definition = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"the": 0, "other": 1, "?": 2}, "unk_token": "?"}});
        open_tokenizer(definition).unwrap()
    };
    let split = words(json!({"type": "WhitespaceSplit"}));
    assert!(exact("the other the", &split));
    assert!(!exact("the other thing", &split), "an unknown word");
    assert!(!exact("the  other", &split), "two spaces");
    assert!(matches!(
        TextDataset::held_out(&source("abc"), &Tokenizer::Byte, 4).unwrap_err(),
        TaskError::TooShort { tokens: 3, needed: 4, .. }
    ));
}

#[test]
fn a_tokenizer_has_the_same_tokens_every_time_and_says_which_ids_it_has() {
    let bpe = |dropout: serde_json::Value, vocab: serde_json::Value| {
        open_tokenizer(json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "dropout": dropout, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                "merges": [["a", "b"]]}}))
    };
    let whole = || json!({"a": 0, "b": 1, "ab": 2});
    let dropping = bpe(json!(0.5), whole()).unwrap();
    for _ in 0..50 {
        assert_eq!(dropping.encode("ababab").unwrap(), [2, 2, 2]);
    }
    assert_eq!(dropping.known(), None);
    assert_eq!(Tokenizer::Byte.known(), None);
    let holes = bpe(json!(null), json!({"a": 0, "b": 1, "ab": 4})).unwrap();
    assert_eq!(holes.known(), Some(vec![true, true, false, false, true]));
    let error = bpe(json!(null), json!({"a": 0, "b": 1, "ab": 2_000_000_000})).unwrap_err();
    assert!(error.to_string().contains("largest token id is 2000000000"), "{error}");
}
