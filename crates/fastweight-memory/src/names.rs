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

/// A deserializer's message in the words of a recipe's author: `invalid type: string "x", expected usize` becomes
/// `found the text "x", expected a whole number of 0 or more`.
pub fn types_in_words(message: &str) -> String {
    // Of JSON a message ends with its place.
    match message.rfind(" at line ") {
        Some(place) => plain_words(&message[..place]) + &message[place..],
        None => plain_words(message),
    }
}

fn plain_words(message: &str) -> String {
    for (theirs, ours) in [
        ("unknown field ", "unknown key "),
        ("unknown variant ", "unknown name "),
        ("duplicate field ", "duplicate key "),
    ] {
        if let Some(rest) = message.strip_prefix(theirs) {
            return format!("{ours}{rest}");
        }
    }
    if let Some(field) = message.strip_prefix("missing field ") {
        return format!("{field} is missing");
    }
    let Some((found, expected)) = message.rsplit_once(", expected ") else { return message.into() };
    let (found, example) = if let Some(length) = found.strip_prefix("invalid length ") {
        (format!("a list of {length}"), None)
    } else if let Some(("invalid type" | "invalid value", found)) = found.split_once(": ") {
        found_in_words(found)
    } else {
        return message.into();
    };
    let expected = expected_in_words(expected);
    match example {
        Some(example) if expected == "a list" => {
            format!("found {found}, expected a list, such as [{example}]")
        }
        _ => format!("found {found}, expected {expected}"),
    }
}

/// What came, and how it stands in a recipe if it is one value.
fn found_in_words(found: &str) -> (String, Option<&str>) {
    for kind in ["boolean ", "integer ", "floating point "] {
        if let Some(value) = found.strip_prefix(kind) {
            return (value.to_owned(), Some(value.trim_matches('`')));
        }
    }
    if let Some(text) = found.strip_prefix("string ") {
        return (format!("the text {text}"), Some(text));
    }
    let words = match found {
        "sequence" => "a list",
        "map" => "a table",
        "unit value" | "null" | "Option value" => "nothing",
        "unit variant" => "a name alone",
        "newtype variant" | "tuple variant" | "struct variant" => "a table",
        other => other,
    };
    (words.into(), None)
}

/// What belongs there.
fn expected_in_words(expected: &str) -> String {
    let end = expected.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(expected.len());
    let number = match &expected[..end] {
        "usize" | "u64" | "u32" | "u16" | "u8" => Some("a whole number of 0 or more"),
        "isize" | "i64" | "i32" | "i16" | "i8" => Some("a whole number"),
        "f64" | "f32" => Some("a number"),
        _ => None,
    };
    if let Some(words) = number {
        return format!("{words}{}", &expected[end..]);
    }
    match expected {
        "a boolean" => "true or false",
        "a string" | "str" => "text",
        "path string" => "a path",
        "a sequence" => "a list",
        "a map" => "a table",
        "string or table" | "variant identifier" => "a name",
        _ if expected.starts_with("struct ") => "a table",
        _ if expected.starts_with("enum ") || expected.ends_with(" variant") => "a name",
        other => other,
    }
    .into()
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
}
