//! Recognises the error of a server whose context window is too small for a request, and the size of the window if the
//! error names it. There is no common error code, so the wordings of servers are listed here as data.

use std::sync::LazyLock;

use regex_automata::nfa::thompson::pikevm::PikeVM;
use serde_json::Value;

/// Errors of servers for a request that exceeds the context window: regular expressions for text in lower case. Their
/// group is the size of the window in tokens.
const WORDINGS: &[&str] = &[
    // OpenAI and most compatible servers.
    r"context_length_exceeded",
    r"maximum context length (?:is|of) ([\d,]+)",
    r"exceeds? the context window",
    r"tokens exceeds? the configured limit of ([\d,]+)",
    // Anthropic. The second counts `max_tokens` as part of the window.
    r"prompt is too long(?:: [\d,]+ tokens > ([\d,]+))?",
    r"input length and .?max_tokens.? exceed context limit(?:: [\d,]+ \+ [\d,]+ > ([\d,]+))?",
    r"request_too_large",
    // Gemini.
    r"exceeds the maximum number of tokens allowed(?: \(?([\d,]+))?",
    // TGI and Together.
    r"inputs.? tokens \+ .?max_new_tokens.? must be <= ([\d,]+)",
    r"inputs.? must have less than ([\d,]+) tokens",
    // vLLM. The second counts the requested output as part of the window.
    r"longer than the maximum model length(?: of ([\d,]+))?",
    r"context length is only ([\d,]+)",
    // SGLang and Together.
    r"longer than the model's context length(?: (?:of |\()([\d,]+))?",
    // xAI.
    r"maximum prompt length is ([\d,]+)",
    // Kimi.
    r"exceeded model token limit(?:: ([\d,]+))?",
    // GitHub Copilot.
    r"prompt token count of [\d,]+ exceeds the limit of ([\d,]+)",
    // llama.cpp and its Python server.
    r"exceeds? the available context size(?: \(([\d,]+))?",
    r"exceed context window of ([\d,]+)",
    // LM Studio.
    r"greater than the context length",
    r"context length of only ([\d,]+)",
    // Mistral.
    r"too large for model with ([\d,]+) maximum context length",
    // Fireworks.
    r"model maximum context length: ([\d,]+)",
    // Cerebras and Groq.
    r"current length is [\d,]+ while limit is ([\d,]+)",
    r"reduce the length of the messages",
    // Cohere.
    r"too many tokens\b",
    r"tokens in the prompt cannot exceed ([\d,]+)",
    // Qwen.
    r"range of input length should be \[1, ([\d,]+)\]",
    // OpenRouter, SiliconFlow, watsonx, Workers AI.
    r"exceeds the maximum (?:allowed )?(?:input |prompt )?length(?: of)? \(?([\d,]+)",
    r"prompt_tokens.{0,20} must be less than max_seq_len \(([\d,]+)",
    r"cannot exceed the total tokens limit ([\d,]+)",
    r"exceeded this model context window limit \(([\d,]+)",
    // Amazon Nova.
    r"number of input tokens exceeds maximum length",
    // Z.ai, MiniMax, Ollama, Bedrock, LiteLLM.
    r"prompt exceeds max length",
    r"model_context_window_exceeded",
    r"context window exceeds limit",
    r"exceeded max context length",
    r"input is too long",
    r"contextwindowexceedederror",
    // Others.
    r"context.(?:length|window|size|limit)[^.]{0,40}exceed",
    r"exceed[^.]{0,40} context.(?:length|window|size|limit)",
];
/// Errors about the rate of requests, which may also name numbers of tokens.
const RATE_LIMIT: &str = r"tokens per (?:min|hour|day)|rate.?limit|please wait";
/// Sizes of a context window that are believed, in tokens.
const PLAUSIBLE: std::ops::RangeInclusive<u64> = 1_000..=10_000_000;

static MATCHERS: LazyLock<Vec<PikeVM>> =
    LazyLock::new(|| WORDINGS.iter().map(|text| compile(text)).collect());
static RATE_LIMIT_MATCHER: LazyLock<PikeVM> = LazyLock::new(|| compile(RATE_LIMIT));

fn compile(pattern: &str) -> PikeVM {
    PikeVM::new(pattern).expect("bug: a constant regular expression")
}

/// Returns true if the error of a server says that the request exceeds the context window.
pub(super) fn says_too_long(error: &str) -> bool {
    let error = error.to_lowercase();
    let matches = |vm: &PikeVM| vm.is_match(&mut vm.create_cache(), error.as_str());
    MATCHERS.iter().any(matches) && !matches(&RATE_LIMIT_MATCHER)
}

/// Returns the size of the context window that such an error names, in tokens.
pub(super) fn named_window(error: &str) -> Option<u64> {
    let error = error.to_lowercase();
    let window = |vm: &PikeVM| {
        let mut groups = vm.create_captures();
        vm.captures(&mut vm.create_cache(), error.as_str(), &mut groups);
        let digits = error[groups.get_group(1)?.range()].replace(',', "");
        digits.parse().ok().filter(|tokens| PLAUSIBLE.contains(tokens))
    };
    MATCHERS.iter().find_map(window)
}

/// Returns the parts of an error body that a server wrote. Some servers repeat parts of the request in a list of details,
/// and a conversation may contain any wording.
pub(super) fn wording(body: &Value) -> String {
    let body = body.get(0).unwrap_or(body);
    match (body.get("error"), body.get("detail")) {
        (Some(error), _) => error.to_string(),
        (None, Some(Value::Array(details))) => {
            details.iter().filter_map(|detail| detail["msg"].as_str()).collect::<Vec<_>>().join(" ")
        }
        _ => body.to_string(),
    }
}

#[cfg(test)]
mod examples;

#[cfg(test)]
mod tests {
    use super::examples::ERRORS;
    use super::*;
    use serde_json::json;

    #[test]
    fn every_wording_of_the_table_is_recognised_and_its_window_is_read() {
        assert_eq!(ERRORS.len(), WORDINGS.len());
        for ((error, window), wording) in ERRORS.iter().zip(WORDINGS) {
            let vm = compile(wording);
            assert!(vm.is_match(&mut vm.create_cache(), &*error.to_lowercase()), "{wording}: {error}");
            assert!(says_too_long(error), "{error}");
            assert_eq!(named_window(error), *window, "{error}");
        }
    }

    #[test]
    fn variants_of_a_wording_are_recognised() {
        let variants = [
            ("The input token count exceeds the maximum number of tokens allowed 1048576.", Some(1_048_576)),
            ("Your prompt is longer than the model's context length of 2048.", Some(2_048)),
            ("Requested token count exceeds the model's maximum context length of 4096 tokens.", Some(4_096)),
            ("The input length (9000) exceeds the maximum length (8192)", Some(8_192)),
        ];
        for (error, window) in variants {
            assert!(says_too_long(error), "{error}");
            assert_eq!(named_window(error), window, "{error}");
        }
    }

    #[test]
    fn other_errors_are_not_taken_for_a_full_window() {
        let others = [
            "max_tokens: 64000 > 8192, which is the maximum allowed number of output tokens for the model",
            "max_tokens exceeds the limit of 8192",
            "Too many tokens, please wait before trying again.",
            "Request too large for gpt on tokens per min (TPM): Limit 30000, Requested 40000. Reduce the length of the messages",
            "This request would exceed your organization's rate limit of 30,000 input tokens per minute",
            "The model `gpt` does not exist",
            "Invalid schema for function `read`",
            "image exceeds 5 MB maximum",
            "the image exceeds the maximum length of a side",
            "string too long: expected a string with maximum length 64",
        ];
        for error in others {
            assert!(!says_too_long(error), "{error}");
        }
        assert_eq!(named_window("maximum context length is 7"), None);
        assert_eq!(named_window("maximum context length is 99999999999999999999999"), None);
    }

    #[test]
    fn only_the_words_of_the_server_are_read() {
        let echo = "maximum context length is 4096";
        let refused = json!({"detail": [{"msg": "field required", "input": echo}]});
        assert!(!says_too_long(&wording(&refused)));
        assert!(says_too_long(&wording(&json!([{"error": {"code": 400, "message": echo}}]))));
        assert!(says_too_long(&wording(&json!({"error": {"message": "no", "metadata": {"raw": echo}}}))));
        assert!(says_too_long(&wording(&json!({"object": "error", "message": echo}))));
        assert!(says_too_long(&wording(&json!({"error": echo, "error_type": "validation"}))));
    }
}
