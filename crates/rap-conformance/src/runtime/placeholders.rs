//! Placeholders such as `{tool_url}` in commands, environment variables and templates.
//!
//! Values are never interpreted: a command is split into words before placeholders are replaced, and no shell is used.

/// Error in a command.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// A quotation mark is not closed, or the command ends with a backslash.
    #[error("a quotation mark is not closed in: {0}")]
    OpenQuote(String),
    /// The command has no words.
    #[error("the command is empty")]
    Empty,
    /// The command lacks a required placeholder.
    #[error("the placeholder {{{name}}} is missing in: {text}")]
    Missing {
        /// Name of the placeholder.
        name: String,
        /// The command.
        text: String,
    },
    /// The address of the runtime is not known.
    #[error("the command does not contain {{listen}}: add it, or give --url or --say")]
    NoAddress,
}

/// Words of a command, with placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandTemplate(Vec<String>);

impl CommandTemplate {
    /// Creates a command from words that are already split.
    pub fn from_words(words: Vec<String>) -> Result<CommandTemplate, Error> {
        if words.is_empty() { Err(Error::Empty) } else { Ok(CommandTemplate(words)) }
    }

    /// Splits a command line as a shell does: words are separated by white space, unless it is quoted or escaped by a
    /// backslash. Nothing is expanded.
    pub fn split(text: &str) -> Result<CommandTemplate, Error> {
        let mut words = Vec::new();
        let mut word: Option<String> = None;
        let mut quote = None;
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match (quote, c) {
                (Some(mark), c) if c == mark => quote = None,
                (Some('"') | None, '\\') => {
                    let next = chars.next().ok_or_else(|| Error::OpenQuote(text.into()))?;
                    let word = word.get_or_insert_default();
                    if quote.is_some() && !matches!(next, '"' | '\\' | '$' | '`') {
                        word.push('\\');
                    }
                    word.push(next);
                }
                (None, '\'' | '"') => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                (None, c) if c.is_whitespace() => words.extend(word.take()),
                (_, c) => word.get_or_insert_default().push(c),
            }
        }
        if quote.is_some() {
            return Err(Error::OpenQuote(text.into()));
        }
        words.extend(word);
        CommandTemplate::from_words(words)
    }

    /// Checks that the command contains all of these placeholders.
    pub fn requiring(self, names: &[&str]) -> Result<CommandTemplate, Error> {
        match names.iter().find(|name| !self.mentions(name)) {
            None => Ok(self),
            Some(name) => Err(Error::Missing { name: (*name).into(), text: self.0.join(" ") }),
        }
    }

    /// Returns true if the command contains a placeholder.
    pub fn mentions(&self, name: &str) -> bool {
        self.0.iter().any(|word| mentions(word, name))
    }

    /// Returns the words with placeholders replaced by values.
    pub fn filled(&self, values: &[(&str, &str)]) -> Vec<String> {
        self.0.iter().map(|word| fill(word, values)).collect()
    }
}

/// Returns true if a text contains a placeholder.
pub fn mentions(text: &str, name: &str) -> bool {
    text.contains(&format!("{{{name}}}"))
}

/// Replaces placeholders in a text by values. Unknown placeholders stay as they are, and placeholders in values are not
/// replaced.
pub fn fill(text: &str, values: &[(&str, &str)]) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let known = values.iter().find_map(|(name, value)| {
            let after = rest[1..].strip_prefix(name)?.strip_prefix('}')?;
            Some((*value, after))
        });
        let (value, after) = known.unwrap_or(("{", &rest[1..]));
        out.push_str(value);
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_as_by_a_shell_and_nothing_is_expanded() {
        let table: [(&str, &[&str]); 6] = [
            ("say {thread} {text}", &["say", "{thread}", "{text}"]),
            ("  a\tb\n", &["a", "b"]),
            ("'a b' \"c d\" e\\ f", &["a b", "c d", "e f"]),
            ("a'b'\"c\" '' $HOME *", &["abc", "", "$HOME", "*"]),
            (r#""a \"b\" \n" 'c\d'"#, &["a \"b\" \\n", "c\\d"]),
            ("--to={thread}", &["--to={thread}"]),
        ];
        for (text, words) in table {
            assert_eq!(CommandTemplate::split(text).unwrap().0, words, "{text}");
        }
        for text in ["'a", "\"a", "a\\"] {
            assert_eq!(CommandTemplate::split(text), Err(Error::OpenQuote(text.into())));
        }
        assert_eq!(CommandTemplate::split("  "), Err(Error::Empty));
    }

    #[test]
    fn values_are_inserted_once_and_never_interpreted() {
        let words = CommandTemplate::split("say '{thread} says' {text}{text} {other} {").unwrap();
        let filled = words.filled(&[("thread", "{text} $(rm)"), ("text", "a b; {thread}")]);
        let expected = ["say", "{text} $(rm) says", "a b; {thread}a b; {thread}", "{other}", "{"];
        assert_eq!(filled, expected);
    }

    #[test]
    fn a_command_without_a_required_placeholder_is_rejected() {
        let missing = CommandTemplate::split("say {thread}").unwrap().requiring(&["thread", "text"]);
        assert!(missing.unwrap_err().to_string().contains("{text} is missing"));
    }
}
