//! Glob patterns for tool names.

use std::fmt;

/// A glob pattern for tool names, in which `*` matches any number of characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolGlob(String);

impl ToolGlob {
    /// Parses a pattern of letters, digits, `_`, `-` and `*`. Returns `None` if it contains anything else, or is empty
    /// or too long.
    pub fn new(pattern: &str) -> Option<Self> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'*');
        let fits = !pattern.is_empty()
            && pattern.len() <= rap_protocol::limits::NAME_CHARS
            && pattern.bytes().all(plain);
        fits.then(|| ToolGlob(pattern.to_owned()))
    }

    /// Returns the pattern that matches every tool.
    pub fn every() -> Self {
        ToolGlob("*".into())
    }

    /// Returns true if the pattern matches the name of a tool.
    pub fn matches(&self, tool: &str) -> bool {
        let Some((start, rest)) = self.0.split_once('*') else { return self.0 == tool };
        let Some(mut tool) = tool.strip_prefix(start) else { return false };
        let Some((middle, end)) = rest.rsplit_once('*') else { return tool.ends_with(rest) };
        // Matching each part as early as possible leaves the most text for the parts after it.
        for part in middle.split('*') {
            let Some(at) = tool.find(part) else { return false };
            tool = &tool[at + part.len()..];
        }
        tool.ends_with(end)
    }
}

impl fmt::Display for ToolGlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_characters() {
        let table = [
            ("*", "a b-c anything"),
            ("read_file", "read_file"),
            ("read_*", "read_ read_file"),
            ("*_file", "_file read_file"),
            ("*file*", "file read_file files read_file_2"),
            ("a*b*c", "abc axbxc abbcc abcbc"),
            ("a**c", "ac abc"),
        ];
        for (pattern, tools) in table {
            for tool in tools.split(' ') {
                assert!(ToolGlob::new(pattern).unwrap().matches(tool), "{pattern} {tool}");
            }
        }
    }

    #[test]
    fn all_other_characters_match_exactly() {
        let table = [
            ("read_file", "read read_file_2 READ_FILE"),
            ("read_*", "read xread_file"),
            ("*_file", "file_ _files"),
            ("a*a", "a"),
            ("a*b*c", "ac acb xabc abcd"),
        ];
        for (pattern, tools) in table {
            for tool in tools.split(' ') {
                assert!(!ToolGlob::new(pattern).unwrap().matches(tool), "{pattern} {tool}");
            }
        }
    }

    #[test]
    fn a_pattern_has_only_characters_of_tool_names_and_stars() {
        for bad in ["", "a b", "a?", "[a]", "ü", &"x".repeat(129)] {
            assert_eq!(ToolGlob::new(bad), None, "{bad}");
        }
    }
}
