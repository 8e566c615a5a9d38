//! Decides whether a prompt fits into a model's context window, and whether a summary of the conversation would help.

use super::tokens_for_bytes;

/// Upper estimate of the bytes per token. A higher average is unusual in prose and in JSON.
const MAX_TOKEN_BYTES: usize = 6;

/// Size of a prompt in tokens. Everything that the provider has not counted is an estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptSize {
    /// System prompt and tools, which a summary does not make shorter. The estimate is rather too high.
    pub fixed: u64,
    /// Lower estimate of the system prompt and tools.
    pub fixed_at_least: u64,
    /// The whole prompt.
    pub filled: u64,
}

/// Sizes of the parts of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptParts {
    /// Size of the system prompt and tools, in bytes.
    pub fixed_bytes: usize,
    /// Tokens of the entries that the last answer's prompt included, as counted by
    /// [`estimate_tokens`](super::estimate_tokens).
    pub before: u64,
    /// Tokens of the entries since then, counted in the same way.
    pub since: u64,
    /// Input tokens that the provider counted for the last answer; 0 if unknown.
    pub read: u64,
}

impl PromptParts {
    /// Returns the size of the prompt. If the provider's count is known, it is used for everything but the newest entries,
    /// and is divided between fixed and variable parts in proportion to the estimates.
    pub fn size(&self) -> PromptSize {
        let PromptParts { fixed_bytes, before, since, read } = *self;
        let estimated = tokens_for_bytes(fixed_bytes);
        let fixed_at_least = (fixed_bytes / MAX_TOKEN_BYTES) as u64;
        let whole = estimated.saturating_add(before);
        if read == 0 {
            return PromptSize { fixed: estimated, fixed_at_least, filled: whole.saturating_add(since) };
        }
        let part = u128::from(read) * u128::from(estimated) / u128::from(whole.max(1));
        let fixed = u64::try_from(part).unwrap_or(read);
        PromptSize { fixed, fixed_at_least: fixed_at_least.min(fixed), filled: read.saturating_add(since) }
    }
}

/// Result of comparing a prompt with the context window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptFit {
    /// The prompt fits, or a summary would not make it shorter. It is sent.
    Fits,
    /// The conversation has to be summarised first.
    Summarise,
    /// The system prompt and tools alone exceed the context window. The prompt is not sent.
    CannotFit,
}

/// Returns whether a prompt fits into `share` percent of a context window of `window` tokens.
pub fn prompt_fit(size: PromptSize, window: u64, share: u64) -> PromptFit {
    let is_past = |tokens: u64| u128::from(tokens) * 100 >= u128::from(window) * u128::from(share);
    if size.fixed_at_least > window {
        PromptFit::CannotFit
    } else if is_past(size.filled) && !is_past(size.fixed) {
        PromptFit::Summarise
    } else {
        PromptFit::Fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_requested_only_if_it_helps() {
        let size = |fixed_at_least, fixed, filled| PromptSize { fixed, fixed_at_least, filled };
        let table = [
            (size(0, 0, 0), PromptFit::Fits),
            (size(0, 0, 749), PromptFit::Fits),
            (size(0, 0, 750), PromptFit::Summarise),
            (size(100, 749, 750), PromptFit::Summarise),
            (size(100, 749, 5_000), PromptFit::Summarise),
            (size(100, 750, 750), PromptFit::Fits),
            (size(100, 750, 5_000), PromptFit::Fits),
            (size(1_000, 2_000, 2_000), PromptFit::Fits),
            (size(1_001, 2_000, 2_000), PromptFit::CannotFit),
            (size(u64::MAX, u64::MAX, u64::MAX), PromptFit::CannotFit),
        ];
        for (size, expected) in table {
            assert_eq!(prompt_fit(size, 1_000, 75), expected, "{size:?}");
        }
        assert_eq!(prompt_fit(size(0, 0, u64::MAX), u64::MAX, 100), PromptFit::Summarise);
    }

    #[test]
    fn without_a_count_of_the_provider_everything_is_estimated() {
        let parts = PromptParts { fixed_bytes: 600, before: 30, since: 7, read: 0 };
        assert_eq!(parts.size(), PromptSize { fixed: 200, fixed_at_least: 100, filled: 237 });
    }

    #[test]
    fn the_count_of_the_provider_is_divided_in_proportion() {
        let parts = PromptParts { fixed_bytes: 600, before: 200, since: 7, read: 300 };
        assert_eq!(parts.size(), PromptSize { fixed: 150, fixed_at_least: 100, filled: 307 });
        assert_eq!(
            PromptParts { read: 20, ..parts }.size(),
            PromptSize { fixed: 10, fixed_at_least: 10, filled: 27 }
        );
        let nothing = PromptParts { fixed_bytes: 0, before: 0, since: 0, read: 5 };
        assert_eq!(nothing.size(), PromptSize { fixed: 0, fixed_at_least: 0, filled: 5 });
        let endless =
            PromptParts { fixed_bytes: usize::MAX, before: u64::MAX, since: u64::MAX, read: u64::MAX };
        assert_eq!(endless.size().filled, u64::MAX);
    }
}
