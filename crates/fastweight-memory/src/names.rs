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
