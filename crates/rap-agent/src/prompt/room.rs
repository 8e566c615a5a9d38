//! Room in a model's window: whether a prompt fits, and whether a summary of the conversation would help.

use super::bytes_as_tokens;

/// Number of bytes that a token has at most, on average. More than that is unusual in prose and in JSON.
const TOKEN_BYTES_AT_MOST: usize = 6;

/// Size of a prompt in tokens. All of it is estimated, except for what the provider counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Size {
    /// System prompt and tools, which no summary makes shorter. The estimate errs on the side of too many.
    pub fixed: u64,
    /// The fewest that system prompt and tools can have.
    pub fixed_at_least: u64,
    /// The whole prompt.
    pub filled: u64,
}

/// Parts of a prompt that its size follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// Bytes of system prompt and tools.
    pub fixed_bytes: usize,
    /// Tokens of the entries that the last answer was given to, as [`tokens`](super::tokens) counts them.
    pub before: u64,
    /// Tokens of the entries since then, counted in the same way.
    pub since: u64,
    /// Tokens that the provider counted for the last answer; 0 if it did not.
    pub read: u64,
}

impl Parts {
    /// The size of the prompt. Where the provider has counted, its count is taken for everything but the newest entries,
    /// and is divided up as the estimate would be.
    pub fn size(&self) -> Size {
        let Parts { fixed_bytes, before, since, read } = *self;
        let estimated = bytes_as_tokens(fixed_bytes);
        let fixed_at_least = (fixed_bytes / TOKEN_BYTES_AT_MOST) as u64;
        let whole = estimated.saturating_add(before);
        if read == 0 {
            return Size { fixed: estimated, fixed_at_least, filled: whole.saturating_add(since) };
        }
        let part = u128::from(read) * u128::from(estimated) / u128::from(whole.max(1));
        let fixed = u64::try_from(part).unwrap_or(read);
        Size { fixed, fixed_at_least: fixed_at_least.min(fixed), filled: read.saturating_add(since) }
    }
}

/// What to do with a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// Ask: there is room enough, or a summary would not make any.
    Fits,
    /// Summarise the conversation first.
    Summarise,
    /// Do not ask: system prompt and tools alone are longer than what the model can read.
    CannotFit,
}

/// Whether a prompt fits into a window of so many tokens, of which it may take `share` percent.
pub fn room(size: Size, window: u64, share: u64) -> Room {
    let is_past = |tokens: u64| u128::from(tokens) * 100 >= u128::from(window) * u128::from(share);
    if size.fixed_at_least > window {
        Room::CannotFit
    } else if is_past(size.filled) && !is_past(size.fixed) {
        Room::Summarise
    } else {
        Room::Fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_made_where_it_helps() {
        let size = |fixed_at_least, fixed, filled| Size { fixed, fixed_at_least, filled };
        let table = [
            (size(0, 0, 0), Room::Fits),
            (size(0, 0, 749), Room::Fits),
            (size(0, 0, 750), Room::Summarise),
            (size(100, 749, 750), Room::Summarise),
            (size(100, 749, 5_000), Room::Summarise),
            (size(100, 750, 750), Room::Fits),
            (size(100, 750, 5_000), Room::Fits),
            (size(1_000, 2_000, 2_000), Room::Fits),
            (size(1_001, 2_000, 2_000), Room::CannotFit),
            (size(u64::MAX, u64::MAX, u64::MAX), Room::CannotFit),
        ];
        for (size, expected) in table {
            assert_eq!(room(size, 1_000, 75), expected, "{size:?}");
        }
        assert_eq!(room(size(0, 0, u64::MAX), u64::MAX, 100), Room::Summarise);
    }

    #[test]
    fn without_a_count_everything_is_estimated() {
        let parts = Parts { fixed_bytes: 600, before: 30, since: 7, read: 0 };
        assert_eq!(parts.size(), Size { fixed: 200, fixed_at_least: 100, filled: 237 });
    }

    #[test]
    fn the_count_of_the_provider_is_divided_up() {
        let parts = Parts { fixed_bytes: 600, before: 200, since: 7, read: 300 };
        assert_eq!(parts.size(), Size { fixed: 150, fixed_at_least: 100, filled: 307 });
        assert_eq!(Parts { read: 20, ..parts }.size(), Size { fixed: 10, fixed_at_least: 10, filled: 27 });
        let nothing = Parts { fixed_bytes: 0, before: 0, since: 0, read: 5 };
        assert_eq!(nothing.size(), Size { fixed: 0, fixed_at_least: 0, filled: 5 });
        let endless = Parts { fixed_bytes: usize::MAX, before: u64::MAX, since: u64::MAX, read: u64::MAX };
        assert_eq!(endless.size().filled, u64::MAX);
    }
}
