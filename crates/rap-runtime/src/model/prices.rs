//! Prices of models, and the cost of an answer.
//!
//! Prices are those of the providers' price lists. They change, so a configuration can replace them.

use rap_agent::Usage;

/// Prices in millionths of a US dollar per million tokens: a price of 3 dollars per million tokens is 3,000,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prices {
    /// Input tokens that are neither read from nor written to the provider's cache.
    pub input: u64,
    /// Output tokens.
    pub output: u64,
    /// Input tokens that the provider read from its cache.
    pub cached: u64,
    /// Input tokens that the provider wrote to its cache.
    pub written: u64,
}

/// Names of models, and their prices for input, output and cached input in thousandths of a dollar per million tokens.
const KNOWN: &[(&[&str], [u64; 3])] = &[
    (&["claude-fable-5"], [10_000, 50_000, 1_000]),
    (
        &["claude-opus-5", "claude-opus-4-8", "claude-opus-4-7", "claude-opus-4-6", "claude-opus-4-5"],
        [5_000, 25_000, 500],
    ),
    (&["claude-opus-4-1", "claude-opus-4", "claude-opus-4-0", "claude-3-opus"], [15_000, 75_000, 1_500]),
    (&["claude-sonnet-5"], [2_000, 10_000, 200]),
    (
        &["claude-sonnet-4-6", "claude-sonnet-4-5", "claude-sonnet-4", "claude-sonnet-4-0"],
        [3_000, 15_000, 300],
    ),
    (&["claude-3-7-sonnet", "claude-3-5-sonnet"], [3_000, 15_000, 300]),
    (&["claude-haiku-4-5"], [1_000, 5_000, 100]),
    (&["claude-3-5-haiku"], [800, 4_000, 80]),
    (&["claude-3-haiku"], [250, 1_250, 30]),
    (&["gpt-5.6", "gpt-5.6-sol", "gpt-5.5"], [5_000, 30_000, 500]),
    (&["gpt-5.6-terra"], [2_000, 12_000, 200]),
    (&["gpt-5.6-luna"], [200, 1_200, 20]),
    (&["gpt-5.5-pro", "gpt-5.4-pro"], [30_000, 180_000, 3_000]),
    (&["gpt-5.4"], [2_500, 15_000, 250]),
    (&["gpt-5.4-mini"], [750, 4_500, 75]),
    (&["gpt-5.4-nano"], [200, 1_250, 20]),
    (&["gpt-5.3-chat", "gpt-5.3-codex", "gpt-5.2", "gpt-5.2-chat", "gpt-5.2-codex"], [1_750, 14_000, 175]),
    (&["gpt-5.2-pro"], [21_000, 168_000, 21_000]),
    (&["gpt-5.1", "gpt-5.1-chat", "gpt-5.1-codex", "gpt-5.1-codex-max"], [1_250, 10_000, 125]),
    (&["gpt-5", "gpt-5-chat", "gpt-5-codex"], [1_250, 10_000, 125]),
    (&["gpt-5-mini", "gpt-5.1-codex-mini"], [250, 2_000, 25]),
    (&["gpt-5-nano"], [50, 400, 5]),
    (&["gpt-5-pro"], [15_000, 120_000, 15_000]),
    (&["gpt-4.1"], [2_000, 8_000, 500]),
    (&["gpt-4.1-mini"], [400, 1_600, 100]),
    (&["gpt-4.1-nano"], [100, 400, 25]),
    (&["gpt-4o"], [2_500, 10_000, 1_250]),
    (&["gpt-4o-mini"], [150, 600, 75]),
    (&["o1"], [15_000, 60_000, 7_500]),
    (&["o3"], [2_000, 8_000, 500]),
    (&["o3-mini"], [1_100, 4_400, 550]),
    (&["o3-pro"], [20_000, 80_000, 20_000]),
    (&["o4-mini"], [1_100, 4_400, 275]),
    (&["gemini-3.5-flash"], [1_500, 9_000, 150]),
    (&["gemini-3.1-pro", "gemini-3-pro"], [2_000, 12_000, 200]),
    (&["gemini-3-flash"], [500, 3_000, 50]),
    (&["gemini-3.1-flash-lite"], [250, 1_500, 25]),
    (&["gemini-2.5-pro"], [1_250, 10_000, 125]),
    (&["gemini-2.5-flash"], [300, 2_500, 30]),
    (&["gemini-2.5-flash-lite"], [100, 400, 10]),
    (&["deepseek-chat", "deepseek-reasoner"], [280, 420, 28]),
    (&["grok-4.5"], [2_000, 6_000, 500]),
    (&["grok-code-fast-1"], [200, 1_500, 20]),
    (&["kimi-k2-thinking", "kimi-k2-0905"], [600, 2_500, 150]),
];
/// Models whose providers charge a quarter more for input that they write to their cache.
const WRITES_COST_MORE: [&str; 2] = ["claude-", "gpt-5.6"];

impl Prices {
    /// Returns the known prices of a model. Its name may have a vendor before it, as in `vendor/name` or `vendor.name`,
    /// and a date, a version or `latest` after it. Another word after it is another model, whose prices are unknown.
    pub fn known(model: &str) -> Option<Prices> {
        let name = model.rsplit('/').next().unwrap_or(model);
        let name = name.rsplit("anthropic.").next().unwrap_or(name);
        let names = KNOWN.iter().flat_map(|(names, prices)| names.iter().map(move |name| (*name, prices)));
        let same = |known: &&str| name.strip_prefix(*known).is_some_and(is_version);
        let (known, prices) = names.filter(|(known, _)| same(known)).max_by_key(|(known, _)| known.len())?;
        let [input, output, cached] = prices.map(|price| price * 1_000);
        let costs_more = WRITES_COST_MORE.iter().any(|start| known.starts_with(start));
        let written = if costs_more { input * 5 / 4 } else { input };
        Some(Prices { input, output, cached, written })
    }

    /// Returns the cost of an answer in billionths of a dollar.
    pub fn cost(&self, usage: &Usage) -> u64 {
        let Usage { input, output, cached, written, .. } = *usage;
        let fresh = input.saturating_sub(cached).saturating_sub(written);
        let parts =
            [(fresh, self.input), (output, self.output), (cached, self.cached), (written, self.written)];
        let costs = parts.map(|(tokens, price)| u128::from(tokens) * u128::from(price));
        let sum = costs.into_iter().fold(0, u128::saturating_add);
        u64::try_from(sum / 1_000).unwrap_or(u64::MAX)
    }
}

/// Returns true if the end of a name names a version of the same model: `-2025-08-07`, `@20250929`, `-0905`, `-latest`,
/// `-preview`, `-v1:0`, `:free` or nothing.
fn is_version(end: &str) -> bool {
    let (end, _tag) = end.split_once(':').unwrap_or((end, ""));
    let mut parts = end.split(['-', '@']);
    let is_number = |part: &str| part.len() >= 2 && part.bytes().all(|byte| byte.is_ascii_digit());
    let is_release = |part: &str| {
        part.strip_prefix('v').is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    parts.next() == Some("")
        && parts.all(|part| is_number(part) || is_release(part) || matches!(part, "latest" | "preview"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_those_of_the_model_and_of_no_other_one() {
        let table = [
            ("gpt-5-2025-08-07", Some(1_250_000)),
            ("gpt-5-mini", Some(250_000)),
            ("openrouter/openai/gpt-5-nano", Some(50_000)),
            ("claude-opus-4-1", Some(15_000_000)),
            ("claude-opus-4-20250514", Some(15_000_000)),
            ("claude-opus-4-6", Some(5_000_000)),
            ("claude-sonnet-4-5@20250929", Some(3_000_000)),
            ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", Some(3_000_000)),
            ("bedrock/anthropic.claude-3-5-haiku-20241022-v1:0", Some(800_000)),
            ("gemini-2.5-flash-lite-preview-09-2025", Some(100_000)),
            ("gemini-2.5-pro:free", Some(1_250_000)),
            ("o3-mini", Some(1_100_000)),
            ("o3-pro-2025-06-10", Some(20_000_000)),
            ("gpt-5-pro", Some(15_000_000)),
            ("gpt-5.1-chat-latest", Some(1_250_000)),
            // Other models whose names begin like that of a known one.
            ("o3-deep-research", None),
            ("gpt-4o-audio-preview", None),
            ("gpt-5.9", None),
            ("claude-opus-4-9", None),
            ("claude-opus-40", None),
            ("llama-3", None),
            ("", None),
        ];
        for (model, expected) in table {
            assert_eq!(Prices::known(model).map(|prices| prices.input), expected, "{model}");
        }
        assert_eq!(Prices::known("gpt-5.6-terra").unwrap().written, 2_500_000);
        assert_eq!(Prices::known("gpt-5.5").unwrap().written, 5_000_000);
    }

    #[test]
    fn every_name_has_one_price() {
        let mut names: Vec<_> = KNOWN.iter().flat_map(|(names, _)| names.iter()).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn every_kind_of_token_has_its_price() {
        let prices = Prices::known("claude-sonnet-4-5").unwrap();
        let usage = Usage { input: 1_000_000, output: 100_000, cached: 600_000, written: 300_000, cost: 0 };
        // 0.1 M at 3 $, 0.6 M at 0.3 $, 0.3 M at 3.75 $ and 0.1 M at 15 $.
        assert_eq!(prices.cost(&usage), 300_000_000 + 180_000_000 + 1_125_000_000 + 1_500_000_000);
        let most = Usage { input: u64::MAX, output: u64::MAX, ..Usage::default() };
        assert_eq!(Prices { input: u64::MAX, output: u64::MAX, cached: 0, written: 0 }.cost(&most), u64::MAX);
        assert_eq!(prices.cost(&Usage { cached: 5, ..Usage::default() }), 5 * 300);
    }
}
