//! Identifiers. Each has its own type and is validated by its constructor.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::limits;

/// Reason why a text is not an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The text is empty, longer than 256 bytes, or contains a control character.
    #[error("an identifier has 1 to 256 bytes and no control characters")]
    Identifier,
    /// The text is not a valid tool name.
    #[error("a tool's name has 1 to 128 letters, digits, `_` and `-`")]
    ToolName,
}

impl Error {
    pub(crate) fn expected(self) -> &'static str {
        match self {
            Error::Identifier => "1 to 256 bytes without control characters",
            Error::ToolName => "1 to 128 letters, digits, `_` or `-`",
        }
    }
}

fn identifier(text: &str) -> Result<(), Error> {
    let fits = !text.is_empty() && text.len() <= limits::ID_BYTES && !text.chars().any(char::is_control);
    if fits { Ok(()) } else { Err(Error::Identifier) }
}

fn tool_name(text: &str) -> Result<(), Error> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let fits = !text.is_empty() && text.len() <= limits::NAME_CHARS && text.bytes().all(plain);
    if fits { Ok(()) } else { Err(Error::ToolName) }
}

/// Constructor of an identifier that gives the text back if it is invalid.
pub(crate) trait Id: Sized {
    fn take(text: String) -> Result<Self, (Error, String)>;
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $check:path) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Box<str>);

        impl $name {
            /// Validates the text.
            pub fn new(text: impl Into<String>) -> Result<Self, Error> {
                $name::take(text.into()).map_err(|(error, _)| error)
            }

            /// Returns the identifier as it is written in messages.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl Id for $name {
            fn take(text: String) -> Result<Self, (Error, String)> {
                match $check(&text) {
                    Ok(()) => Ok($name(text.into())),
                    Err(error) => Err((error, text)),
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self, Error> {
                $name::new(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0.into()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    };
}

id! {
    /// Id of a thread: the protocol's `group_id` and `thread_id`.
    ThreadId, identifier
}
id! {
    /// Id of a tool call: the protocol's `id` and `tool_call_id`. Also used for the secondary `call_id` of some models.
    CallId, identifier
}
id! {
    /// Id of a subscription event. Deliveries with the same id are the same event.
    EventId, identifier
}
id! {
    /// Id of the end user on whose behalf a call is made.
    UserId, identifier
}
id! {
    /// Name of a tool: 1 to 128 letters, digits, `_` and `-`.
    ToolName, tool_name
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves: TC-21, CN-23
    #[test]
    fn identifiers_have_1_to_256_bytes_and_no_control_characters() {
        for good in ["a", "call_abc123", "../../etc/passwd", "ü ☃", &"x".repeat(256)] {
            assert_eq!(ThreadId::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "a\0b", "line\nbreak", "\u{7f}", "\u{85}", &"x".repeat(257), &"é".repeat(129)] {
            assert_eq!(CallId::new(bad), Err(Error::Identifier), "{bad:?}");
        }
    }

    #[test]
    fn tool_names_are_letters_digits_underscore_and_dash() {
        for good in ["a", "Read-File_2", &"x".repeat(128)] {
            assert!(ToolName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "a.b", "a/b", "ä", &"x".repeat(129)] {
            assert_eq!(ToolName::new(bad), Err(Error::ToolName), "{bad:?}");
        }
    }
}
