//! Suggestions for misspelt keys and names, by edit distance.

use strsim::levenshtein;

/// Returns the known word closest to `word`: one within a few edits, or one that begins with `word`.
pub(crate) fn closest(word: &str, known: &[&'static str]) -> Option<&'static str> {
    let word = word.to_lowercase().replace('-', "_");
    let few = match word.len() {
        0..=4 => 1,
        5..=8 => 2,
        _ => 3,
    };
    let off = |known: &&'static str| (levenshtein(&word, known), *known);
    let closest = known.iter().map(off).min().filter(|(distance, _)| *distance <= few);
    let longer = || known.iter().copied().find(|known| word.len() >= 3 && known.starts_with(&word));
    closest.map(|(_, known)| known).or_else(longer)
}

/// Returns the known names closest to `word`, or that begin with it; at most three.
pub(crate) fn similar<'a>(word: &str, known: &[&'a str]) -> Vec<&'a str> {
    let few = (word.chars().count() / 3).clamp(1, 3);
    let off = |known: &&'a str| {
        let distance = if !word.is_empty() && known.starts_with(word) { 0 } else { levenshtein(word, known) };
        (distance, *known)
    };
    let mut close: Vec<_> = known.iter().map(off).filter(|(distance, _)| *distance <= few).collect();
    close.sort_unstable();
    let closest = close.first().map(|(distance, _)| *distance);
    let as_close = close.iter().take_while(|(distance, _)| Some(*distance) == closest);
    as_close.take(3).map(|(_, known)| *known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 6] = ["listen", "public_url", "tokens", "url", "hold_max", "turns_per_wake"];

    #[test]
    fn a_misspelt_key_finds_the_closest_one() {
        let table = [
            ("listn", "listen"),
            ("Listen", "listen"),
            ("public-url", "public_url"),
            ("token", "tokens"),
            ("uri", "url"),
            ("hold_maxx", "hold_max"),
            ("turns", "turns_per_wake"),
        ];
        for (word, expected) in table {
            assert_eq!(closest(word, &KNOWN), Some(expected), "{word}");
        }
    }

    #[test]
    fn an_unrelated_word_finds_none() {
        for word in ["", "x", "port", "service_host", "port_7420_tcp", "banana"] {
            assert_eq!(closest(word, &KNOWN), None, "{word}");
        }
    }

    #[test]
    fn similar_names_are_found() {
        let known = ["bread", "broad", "cake", "thread-1", "thread-2"];
        for (word, expected) in [
            ("bred", &["bread"][..]),
            ("thread", &["thread-1", "thread-2"]),
            ("thread-3", &["thread-1", "thread-2"]),
            ("", &[]),
            ("soup", &[]),
        ] {
            assert_eq!(similar(word, &known), expected, "{word}");
        }
    }
}
