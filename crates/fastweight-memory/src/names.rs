//! Suggestions for misspelt names.

/// The candidate closest to `name` by edit distance, if it is close enough to be a likely misspelling
/// (at most a third of its letters differ).
pub fn closest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&name.to_lowercase(), candidate), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.len().div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// `unknown WHAT "name"; did you mean "closest"?`, or the list of known names when none is close.
pub fn unknown(what: &str, name: &str, known: &[&str]) -> String {
    match closest(name, known.iter().copied()) {
        Some(close) => format!("unknown {what} {name:?}; did you mean {close:?}?"),
        None => format!("unknown {what} {name:?}; known are {}", known.join(", ")),
    }
}

/// A message of a deserializer with the types of this language in words a recipe's author uses: `expected usize` becomes
/// `expected a whole number of 0 or more`.
pub fn types_in_words(message: &str) -> String {
    let words = |name: &str| match name {
        "usize" | "u64" | "u32" => Some("a whole number of 0 or more"),
        "f64" | "f32" => Some("a number"),
        _ => None,
    };
    let Some((before, expected)) = message.split_once("expected ") else { return message.into() };
    let end = expected.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(expected.len());
    match words(&expected[..end]) {
        Some(words) => format!("{before}expected {words}{}", &expected[end..]),
        None => message.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelling_finds_its_name_and_nonsense_finds_none() {
        let known = ["delta_net", "gated_delta_net", "retnet"];
        assert_eq!(closest("delta-net", known), Some("delta_net"));
        assert_eq!(closest("Gated_DeltaNet", known), Some("gated_delta_net"));
        assert_eq!(closest("xyz", known), None);
        assert!(unknown("mixer", "xyz", &known).contains("delta_net, gated_delta_net, retnet"));
    }

    #[test]
    fn a_type_is_named_in_words() {
        let message = "invalid value: integer `-1`, expected usize at line 1";
        assert_eq!(
            types_in_words(message),
            "invalid value: integer `-1`, expected a whole number of 0 or more at line 1"
        );
        assert_eq!(
            types_in_words("invalid type: string \"x\", expected f64"),
            "invalid type: string \"x\", expected a number"
        );
        for other in ["expected usizes", "expected a boolean", "unknown field `usize`"] {
            assert_eq!(types_in_words(other), other);
        }
    }
}
