//! What a model is told about itself. Every key is checked as far as its provider uses it.

use std::path::PathBuf;

use rap_protocol::Secret;
use rap_runtime::model::anthropic::{self, LEAST_THINKING, MAX_TOKENS, Thinking};
use rap_runtime::model::openai;

use super::document::{Setting, Value};
use super::outside::Outside;
use super::section::Section;
use super::value::count;
use super::{BaseUrl, Config, Model, Place, Problem, Provider, value};

/// The most tokens that an answer can be allowed.
const TOKENS: u32 = 10_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProviderName {
    Anthropic,
    OpenAi,
    Scripted,
}

pub(super) fn read_model(section: &mut Section<'_>, outside: &Outside<'_>) -> Model {
    let place = section.place_of("provider");
    let chosen = section.read("provider", provider_name).unwrap_or(ProviderName::Scripted);
    if let Some(place) = place {
        require(section, &place, chosen);
    }
    let name = section.read("name", filled_text).unwrap_or_default();
    let base_url = section.read("base_url", value::base_url);
    let api_key = section.read("api_key", |setting| api_key(setting, chosen, outside)).flatten();
    let max_tokens = section.read("max_tokens", count(1..=TOKENS)).unwrap_or(MAX_TOKENS);
    let thinking = section.read("thinking", |setting| thinking(setting, max_tokens)).unwrap_or_default();
    let script = section.read("script", |setting| script(setting, chosen, outside)).flatten();
    let images = section.read("images", value::boolean).unwrap_or(Config::default().model.images);
    let at = |usual: &str| base_url.unwrap_or_else(|| BaseUrl::new(usual).expect("bug: a constant URL"));
    let provider = match chosen {
        ProviderName::Scripted => Provider::Scripted { script },
        ProviderName::OpenAi => Provider::OpenAi { name, base_url: at(openai::DEFAULT_BASE_URL), api_key },
        ProviderName::Anthropic => {
            let base_url = at(anthropic::DEFAULT_BASE_URL);
            Provider::Anthropic { name, base_url, api_key, max_tokens, thinking }
        }
    };
    Model { provider, images }
}

fn require(section: &mut Section<'_>, place: &Place, chosen: ProviderName) {
    let hint = match chosen {
        ProviderName::Scripted => return,
        ProviderName::OpenAi => "api.openai.com wants a key, such as \"env:OPENAI_API_KEY\"",
        ProviderName::Anthropic => "api.anthropic.com wants a key, such as \"env:ANTHROPIC_API_KEY\"",
    };
    if section.place_of("name").is_none() {
        section.refuse("name", place.clone(), Problem::Missing("which model of the provider is it?"));
    }
    if section.place_of("base_url").is_none() && section.place_of("api_key").is_none() {
        section.refuse("api_key", place.clone(), Problem::Missing(hint));
    }
}

fn provider_name(setting: &Setting) -> Result<ProviderName, Problem> {
    value::shown(setting, "\"anthropic\", \"openai\" or \"scripted\"", |text| match text {
        "anthropic" => Some(ProviderName::Anthropic),
        "openai" => Some(ProviderName::OpenAi),
        "scripted" => Some(ProviderName::Scripted),
        _ => None,
    })
}

fn api_key(
    setting: &Setting,
    chosen: ProviderName,
    outside: &Outside<'_>,
) -> Result<Option<Secret>, Problem> {
    match chosen {
        ProviderName::OpenAi | ProviderName::Anthropic => outside.secret(setting).map(Some),
        ProviderName::Scripted => Ok(None),
    }
}

/// Thinking is a part of the answer, and the rest needs room too.
fn thinking(setting: &Setting, max_tokens: u32) -> Result<Thinking, Problem> {
    match &setting.value {
        Value::Text(text) | Value::Loose(text) if text == "off" => Ok(Thinking::Off),
        Value::Text(text) | Value::Loose(text) if text == "adaptive" => Ok(Thinking::Adaptive),
        _ => {
            let most = max_tokens.saturating_sub(1);
            let tokens = count(LEAST_THINKING..=most)(setting).ok().map(Thinking::Tokens);
            let expected = format!(
                "\"off\", \"adaptive\", or a number of tokens from {LEAST_THINKING} to {most}, below max_tokens"
            );
            tokens.ok_or_else(|| value::wrong(&expected, setting))
        }
    }
}

fn script(
    setting: &Setting,
    chosen: ProviderName,
    outside: &Outside<'_>,
) -> Result<Option<PathBuf>, Problem> {
    match chosen {
        ProviderName::Scripted => outside.readable(setting).map(Some),
        ProviderName::OpenAi | ProviderName::Anthropic => Ok(None),
    }
}

fn filled_text(setting: &Setting) -> Result<String, Problem> {
    value::shown(setting, "a string that is not empty", |text| {
        (!text.trim().is_empty()).then(|| text.to_owned())
    })
}
