//! Values of arguments, with messages for a person.

use std::ops::RangeInclusive;
use std::path::Path;

use crate::error::CommandError;

/// A parser of whole numbers in `range`.
pub fn whole<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| format!("expected a whole number in {}..={}", range.start(), range.end()))
    }
}

/// Refuses a folder of results whose place a file has.
///
/// # Errors
/// [`CommandError::Input`] names the file.
pub fn refuse_file(folder: &Path) -> Result<(), CommandError> {
    match folder.ancestors().find(|path| path.exists()) {
        Some(path) if !path.is_dir() => Err(CommandError::input(format_args!(
            "could not create the folder {}: {} is a file, give a folder with --out",
            folder.display(),
            path.display()
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_stay_in_their_range() {
        let parse = whole::<u64>(1..=9);
        assert_eq!((parse("1"), parse("9")), (Ok(1), Ok(9)));
        for text in ["0", "10", "-1", "", "x", "1.5", "99999999999999999999"] {
            assert_eq!(parse(text), Err("expected a whole number in 1..=9".into()), "{text}");
        }
    }
}
