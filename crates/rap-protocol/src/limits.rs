//! Every bound of the wire, by name. Past a bound there is an [`crate::Invalid`] that says so.

/// The largest body of any message, in bytes (8 MiB).
pub const BODY_BYTES: usize = 8 * 1024 * 1024;
/// How deep JSON may nest.
pub const NESTING: usize = 64;
/// The longest identifier, in bytes.
pub const ID_BYTES: usize = 256;
/// The longest URL, in bytes.
pub const URL_BYTES: usize = 8 * 1024;
/// The longest name of a tool, a toolset or a view type, in characters.
pub const NAME_CHARS: usize = 128;
/// The longest description of a tool or a toolset, in bytes.
pub const DESCRIPTION_BYTES: usize = 64 * 1024;
/// The largest `displayScript`, in bytes.
pub const DISPLAY_SCRIPT_BYTES: usize = 16 * 1024;
/// The most tools of one toolset.
pub const TOOLS: usize = 1024;
/// The most keys of a tool's annotations.
pub const ANNOTATIONS: usize = 64;
/// The largest `inputSchema`, in bytes of JSON.
pub const SCHEMA_BYTES: usize = 256 * 1024;
/// The most violations of a schema that one error names.
pub const VIOLATIONS: usize = 5;
/// The longest chain of ancestors of a thread.
pub const ANCESTORS: usize = 64;
/// The most items of a result's `content`.
pub const CONTENT_ITEMS: usize = 256;
/// The most segments of a result's `display_as`.
pub const DISPLAY_SEGMENTS: usize = 64;
/// The most choices of a question to the user.
pub const CHOICES: usize = 256;
/// The longest text of one choice, in bytes.
pub const CHOICE_BYTES: usize = 4 * 1024;
/// The longest prompt of a question to the user, in bytes.
pub const PROMPT_BYTES: usize = 64 * 1024;
/// How much of a value an error message repeats, in characters.
pub const FOUND_CHARS: usize = 60;
/// The longest path into arguments or a schema that an error names, in characters.
pub const PATH_CHARS: usize = 120;
/// The longest sentence on what is wrong with arguments or a schema, in characters.
pub const PROBLEM_CHARS: usize = 240;
