//! Makes characters visible that would hide, reorder or forge what a person reads.
//!
//! Text of tools, models and other people is shown only after [`text`], wherever people read it. Shown as `\u{202e}` are
//! control characters, controls of the writing direction, characters that have no glyph, tag characters, and line
//! separators. Line feeds and tabs stay, and a carriage return before a line feed is left out.
//!
//! Two kinds of characters without a glyph stay where writing needs them:
//!
//! - a joiner (U+200C, U+200D) between two emoji, or between two letters of scripts whose letters join;
//! - one variation selector (U+FE00 to U+FE0F, and the Mongolian ones) after a character that has a glyph.

use std::borrow::Cow;
use std::fmt::Write;

/// Characters without a glyph: `Default_Ignorable_Code_Point` of Unicode without joiners and variation selectors, then
/// line separators and interlinear annotations.
const HIDDEN: [(char, char); 18] = [
    ('\u{ad}', '\u{ad}'),
    ('\u{34f}', '\u{34f}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{115f}', '\u{1160}'),
    ('\u{17b4}', '\u{17b5}'),
    ('\u{180e}', '\u{180e}'),
    ('\u{200b}', '\u{200b}'),
    ('\u{200e}', '\u{200f}'),
    ('\u{2028}', '\u{2029}'),
    ('\u{202a}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{3164}', '\u{3164}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{ffa0}', '\u{ffa0}'),
    ('\u{fff0}', '\u{fffb}'),
    ('\u{1bca0}', '\u{1bca3}'),
    ('\u{1d173}', '\u{1d17a}'),
    ('\u{e0000}', '\u{e0fff}'),
];

/// Returns the text with its hidden characters made visible. A text without any is returned unchanged, so it makes no
/// difference if this is done twice.
pub fn text(text: &str) -> Cow<'_, str> {
    escape(text, |out, c| write!(out, "{}", c.escape_unicode()))
}

/// Returns a JSON document with its hidden characters escaped as JSON does it. The document keeps its meaning.
pub fn json(document: &str) -> Cow<'_, str> {
    escape(document, |out, c| {
        c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))
    })
}

fn escape(text: &str, write: impl Fn(&mut String, char) -> std::fmt::Result) -> Cow<'_, str> {
    // Most texts are ASCII without control characters.
    if text.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\n' | b'\t')) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let (mut before, mut rest) = (None, text.chars());
    while let Some(c) = rest.next() {
        let after = rest.clone().next();
        if is_hidden(before, c, after) {
            write(&mut out, c).expect("bug: writing to a string does not fail");
        } else if (c, after) != ('\r', Some('\n')) {
            out.push(c);
        }
        before = Some(c);
    }
    Cow::Owned(out)
}

fn is_hidden(before: Option<char>, c: char, after: Option<char>) -> bool {
    match c {
        ' '..='~' | '\n' | '\t' => false,
        '\r' => after != Some('\n'),
        '\u{200c}' | '\u{200d}' => {
            let joined = before.and_then(joining);
            joined.is_none() || joined != after.and_then(joining)
        }
        _ if is_variation_selector(c) => before.is_none_or(|before| !has_glyph(before)),
        _ => c.is_control() || is_listed(c),
    }
}

fn is_listed(c: char) -> bool {
    HIDDEN.iter().any(|(first, last)| (*first..=*last).contains(&c))
}

fn is_variation_selector(c: char) -> bool {
    matches!(c, '\u{fe00}'..='\u{fe0f}' | '\u{180b}'..='\u{180d}' | '\u{180f}')
}

fn has_glyph(c: char) -> bool {
    let hidden = c.is_control() || is_listed(c) || is_variation_selector(c);
    !hidden && !c.is_whitespace() && !matches!(c, '\u{200c}' | '\u{200d}')
}

#[derive(PartialEq)]
enum Joining {
    Emoji,
    Letter,
}

/// Returns what a joiner can join to the character: emoji, or letters of the scripts from Arabic to Myanmar, Khmer and
/// Mongolian. A joiner between letters of other scripts, Latin among them, only hides something.
fn joining(c: char) -> Option<Joining> {
    match c {
        '\u{fe0f}'
        | '\u{2190}'..='\u{21ff}'
        | '\u{2300}'..='\u{23ff}'
        | '\u{25a0}'..='\u{27bf}'
        | '\u{2b00}'..='\u{2bff}'
        | '\u{1f000}'..='\u{1faff}' => Some(Joining::Emoji),
        '\u{600}'..='\u{109f}'
        | '\u{1780}'..='\u{18af}'
        | '\u{fb50}'..='\u{fdff}'
        | '\u{fe70}'..='\u{fefc}'
            if has_glyph(c) =>
        {
            Some(Joining::Letter)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_shown_as_escapes() {
        let hidden = [
            0x00..=0x08,
            0x0b..=0x1f,
            0x7f..=0x9f,
            0xad..=0xad,
            0x34f..=0x34f,
            0x61c..=0x61c,
            0x115f..=0x1160,
            0x17b4..=0x17b5,
            0x180b..=0x180f,
            0x200b..=0x200f,
            0x2028..=0x202e,
            0x2060..=0x206f,
            0x3164..=0x3164,
            0xfe00..=0xfe0f,
            0xfeff..=0xfeff,
            0xffa0..=0xffa0,
            0xfff0..=0xfffb,
            0x1bca0..=0x1bca3,
            0x1d173..=0x1d17a,
            0xe0000..=0xe0fff,
        ];
        // The planes that have assigned characters.
        for code in (0..0x34000).chain(0xe0000..0xe2000) {
            let Some(c) = char::from_u32(code) else { continue };
            // A space before the character, since some characters are only needed after others.
            let (raw, shown) = (format!("a {c}b"), format!("a \\u{{{code:x}}}b"));
            let expected = if hidden.iter().any(|range| range.contains(&code)) { &shown } else { &raw };
            assert_eq!(text(&raw), *expected, "U+{code:04X}");
        }
    }

    #[test]
    fn what_writing_needs_stays() {
        let unchanged = [
            "",
            "one\n\ttwo",
            "Grüße, 日本語, עברית, العربية, 🇫🇷",
            "می‌خواهم",
            "ක්‍ෂ",
            "न्‍त",
            "👩‍👩‍👧‍👦 👩🏽‍🚀 ❤️‍🔥 🏳️‍🌈 1️⃣ ☎︎",
        ];
        for unchanged_text in unchanged {
            assert_eq!(text(unchanged_text), unchanged_text);
        }
    }

    #[test]
    fn the_same_characters_elsewhere_are_shown() {
        let table = [
            ("a\r\nb\rc", "a\nb\\u{d}c"),
            ("\x1b[2J", "\\u{1b}[2J"),
            ("exe.\u{202e}gpj", "exe.\\u{202e}gpj"),
            ("pay\u{200d}pal", "pay\\u{200d}pal"),
            ("раура\u{200d}l", "раура\\u{200d}l"),
            ("👩\u{200d}", "👩\\u{200d}"),
            ("👩\u{200d}\u{200d}👩", "👩\\u{200d}\\u{200d}👩"),
            ("م\u{200c}👩", "م\\u{200c}👩"),
            ("م\u{200c}\u{61c}م", "م\\u{200c}\\u{61c}م"),
            ("\u{fe0f}", "\\u{fe0f}"),
            ("a\u{fe00}\u{fe01}", "a\u{fe00}\\u{fe01}"),
            ("a\u{200b}\u{fe01}", "a\\u{200b}\\u{fe01}"),
            ("🏴\u{e0067}\u{e007f}", "🏴\\u{e0067}\\u{e007f}"),
        ];
        for (raw, shown) in table {
            assert_eq!(text(raw), shown);
            assert_eq!(text(shown), shown, "twice");
        }
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({"a\u{202e}": "\u{e0041}\u{9b}2J\r\n\u{1b}[0m é 👩‍👧"});
        let document = serde_json::to_string_pretty(&value).unwrap();
        let shown = json(&document);
        assert!(shown.contains("\"a\\u202e\"") && shown.contains("\\udb40\\udc41\\u009b2J"), "{shown}");
        assert!(shown.contains("é 👩‍👧"), "{shown}");
        assert_eq!(text(&shown), shown);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
