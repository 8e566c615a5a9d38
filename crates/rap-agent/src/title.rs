//! Titles of threads that nobody named: the beginning of the first message.

use rap_protocol::visible;

/// Maximum length of a title that is made from a text, in characters.
pub const MADE_TITLE_CHARS: usize = 60;
/// Length of the beginning of a text that a title is made from, in bytes.
const READ_BYTES: usize = 1024;

/// Returns a title made from a text: its first line that is not blank, on one line, with hidden characters made visible,
/// and cut between two words. `None` if the text is blank.
pub fn title_of(text: &str) -> Option<String> {
    let text = &text[..text.floor_char_boundary(READ_BYTES)];
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    let line = visible::text(line).split_whitespace().collect::<Vec<_>>().join(" ");
    let Some((end, _)) = line.char_indices().nth(MADE_TITLE_CHARS) else { return Some(line) };
    // One character is left for the ellipsis. A long first word is cut.
    let last = line[..end].char_indices().next_back().map_or(0, |(at, _)| at);
    let kept = line[..last].rfind(' ').filter(|at| *at > last / 2).unwrap_or(last);
    Some(format!("{}…", line[..kept].trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_is_the_beginning_of_a_text() {
        let long = "Compare the prices of the three suppliers and tell me which of them is the cheapest";
        let word = "x".repeat(100);
        let table = [
            ("Good morning", Some("Good morning")),
            ("\n \n  Good   morning\t!\nsecond line", Some("Good morning !")),
            ("", None),
            (" \n\t", None),
            ("red\u{1b}[2J", Some("red\\u{1b}[2J")),
            (long, Some("Compare the prices of the three suppliers and tell me…")),
            (&word, Some(&*format!("{}…", "x".repeat(MADE_TITLE_CHARS - 1)))),
        ];
        for (text, expected) in table {
            assert_eq!(title_of(text).as_deref(), expected, "{text:?}");
        }
        let hostile = "\u{202e}\u{0}é".repeat(10_000);
        assert!(title_of(&hostile).unwrap().chars().count() <= MADE_TITLE_CHARS);
    }
}
