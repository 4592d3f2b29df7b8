//! The nearest known name to a mistyped one.

/// The known name most like `name`, when one is like it at all.
pub(crate) fn closest(name: &str, known: impl IntoIterator<Item = String>) -> Option<String> {
    let name = name.to_lowercase();
    known
        .into_iter()
        .map(|candidate| (strsim::normalized_damerau_levenshtein(&name, &candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.5)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}
