//! Limits of every message. A message that exceeds one is rejected with an [`crate::Invalid`] that names the limit.

/// Maximum size of any message, in bytes (8 MiB).
pub const BODY_BYTES: usize = 8 * 1024 * 1024;
/// Maximum nesting depth of JSON.
pub const NESTING: usize = 64;
/// Maximum memory of a parsed message, in bytes, estimated from its numbers of objects, arrays and values. Small objects
/// need up to eighty times the size of their text.
pub const PARSED_BYTES: usize = 128 * 1024 * 1024;
/// Maximum length of an identifier, in bytes.
pub const ID_BYTES: usize = 256;
/// Maximum length of a URL, in bytes.
pub const URL_BYTES: usize = 8 * 1024;
/// Maximum length of the name of a tool, a toolset or a view type, in characters.
pub const NAME_CHARS: usize = 128;
/// Maximum length of the description of a tool or a toolset, in bytes.
pub const DESCRIPTION_BYTES: usize = 64 * 1024;
/// Maximum size of a `displayScript`, in bytes.
pub const DISPLAY_SCRIPT_BYTES: usize = 16 * 1024;
/// Maximum number of tools of one toolset.
pub const TOOLS: usize = 1024;
/// Maximum number of annotations of one tool.
pub const ANNOTATIONS: usize = 64;
/// Maximum size of an `inputSchema`, in bytes of JSON.
pub const SCHEMA_BYTES: usize = 256 * 1024;
/// Maximum number of subschemas of an `inputSchema`, each counted once however often it is referred to.
pub const SCHEMA_NODES: usize = 20_000;
/// Maximum number of subschemas that apply to one value when all references are expanded.
pub const EXPANDED_SCHEMA: u64 = 50_000;
/// Maximum number of subschemas inside each other that apply to one value when all references are expanded.
pub const SCHEMA_DEPTH: usize = 64;
/// Maximum size of one compiled `pattern`, in bytes.
pub const PATTERN_BYTES: usize = 256 * 1024;
/// Maximum size of all compiled patterns of an `inputSchema`, in bytes.
pub const SCHEMA_PATTERN_BYTES: usize = 1024 * 1024;
/// Maximum size of the compiled schemas of one toolset, in bytes.
pub const TOOLSET_PROGRAM_BYTES: usize = 64 * 1024 * 1024;
/// Maximum number of steps of one validation. A step takes some ten nanoseconds: a subschema that is applied, an array
/// item or a property that is visited, 16 bytes that are compared, a byte that goes through a state of a pattern.
pub const VALIDATION_STEPS: u64 = 100_000_000;
/// Maximum number of steps of validations that run on the thread of their caller instead of a thread of their own.
pub const INLINE_VALIDATION_STEPS: u64 = 50_000;
/// Maximum number of subschemas inside each other during a validation.
pub const VALIDATION_DEPTH: usize = 512;
/// Maximum number of schema violations that one error names.
pub const VIOLATIONS: usize = 5;
/// Maximum number of ancestors of a thread.
pub const ANCESTORS: usize = 64;
/// Maximum number of items in a result's `content`.
pub const CONTENT_ITEMS: usize = 256;
/// Maximum number of segments in a result's `display_as`.
pub const DISPLAY_SEGMENTS: usize = 64;
/// Maximum number of choices of a question to the user.
pub const CHOICES: usize = 256;
/// Maximum length of one choice, in bytes.
pub const CHOICE_BYTES: usize = 4 * 1024;
/// Maximum length of the prompt of a question to the user, in bytes.
pub const PROMPT_BYTES: usize = 64 * 1024;
/// Maximum number of characters of a value that an error message repeats.
pub const FOUND_CHARS: usize = 60;
/// Maximum length of a path into arguments or a schema in an error message, in characters.
pub const PATH_CHARS: usize = 120;
/// Maximum length of the description of a schema violation, in characters.
pub const PROBLEM_CHARS: usize = 240;
