//! Errors of servers for a request that exceeds the context window. Tests of the adapters include this file too.

/// An error for each wording, and the window that it names.
pub(crate) const ERRORS: &[(&str, Option<u64>)] = &[
    ("context_length_exceeded", None),
    ("This model's maximum context length is 8,192 tokens. However, you requested 9000", Some(8_192)),
    ("Your input exceeds the context window of this model.", None),
    (
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 318569 tokens.",
        Some(272_000),
    ),
    ("prompt is too long: 210000 tokens > 200000 maximum", Some(200_000)),
    (
        "input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input length",
        Some(200_000),
    ),
    ("request_too_large", None),
    (
        "The input token count (1200293) exceeds the maximum number of tokens allowed (1048576).",
        Some(1_048_576),
    ),
    (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs`",
        Some(4_096),
    ),
    ("Input validation error: `inputs` must have less than 1024 tokens. Given: 1500", Some(1_024)),
    ("The decoder prompt (length 9000) is longer than the maximum model length of 8192.", Some(8_192)),
    (
        "You passed 99073 input tokens and requested 32000 output tokens. However, the model's context length is \
         only 131072 tokens, resulting in a maximum input length of 99072 tokens.",
        Some(131_072),
    ),
    ("The input (516368 tokens) is longer than the model's context length (262144 tokens).", Some(262_144)),
    ("This model's maximum prompt length is 131072 but the request has 537812 tokens", Some(131_072)),
    ("Your request exceeded model token limit: 262144 (requested: 291351)", Some(262_144)),
    ("prompt token count of 66000 exceeds the limit of 64000", Some(64_000)),
    (
        "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
        Some(4_096),
    ),
    ("Requested tokens (2500) exceed context window of 2048", Some(2_048)),
    ("The number of tokens to keep from the initial prompt is greater than the context length.", None),
    ("However, the model is loaded with context length of only 4096 tokens", Some(4_096)),
    ("Prompt contains 40000 tokens, too large for model with 32768 maximum context length", Some(32_768)),
    ("The prompt is too long: 137500, model maximum context length: 131071", Some(131_071)),
    ("Current length is 9000 while limit is 8192", Some(8_192)),
    ("Please reduce the length of the messages or completion.", None),
    ("too many tokens: size limit exceeded by 11 tokens", None),
    ("total number of tokens in the prompt cannot exceed 4081", Some(4_081)),
    ("Range of input length should be [1, 30720]", Some(30_720)),
    ("Input length 131393 exceeds the maximum allowed input length of 131040 tokens.", Some(131_040)),
    ("length of prompt_tokens (33000) must be less than max_seq_len (32768).", Some(32_768)),
    ("the number of input tokens 9000 cannot exceed the total tokens limit 8192 for this model", Some(8_192)),
    (
        "The estimated number of input and maximum output tokens (9000) exceeded this model context window \
         limit (8192).",
        Some(8_192),
    ),
    ("Input Tokens Exceeded: Number of input tokens exceeds maximum length.", None),
    ("Prompt exceeds max length", None),
    ("model_context_window_exceeded", None),
    ("invalid params, context window exceeds limit (2013)", None),
    ("prompt too long; exceeded max context length by 4 tokens", None),
    ("ValidationException: Input is too long for requested model.", None),
    ("litellm.ContextWindowExceededError: it is long", None),
    ("the context size has been exceeded", None),
    ("the tokens exceed the model's context length", None),
];
