//! What a model is told about itself. Every key is checked as far as its provider uses it.

use std::path::PathBuf;

use rap_protocol::Secret;
use rap_runtime::model::anthropic::{self, LEAST_THINKING, MAX_TOKENS, Thinking};
use rap_runtime::model::{Kind, Options, Provider, openai, scripted};

use super::document::{Setting, Value};
use super::outside::Outside;
use super::section::Section;
use super::value::count;
use super::{BaseUrl, Config, Model, Place, Problem, Window, value};

/// Providers that a configuration can name. Another one is a line here.
static PROVIDERS: [&Provider; 3] = [&anthropic::PROVIDER, &openai::PROVIDER, &scripted::PROVIDER];

/// The most tokens that an answer can be allowed.
const TOKENS: u32 = 10_000_000;
/// The least that a model is said to read, in tokens.
const LEAST_WINDOW: u32 = 1_000;

pub(super) fn read_model(section: &mut Section<'_>, outside: &Outside<'_>) -> Model {
    let usual = Config::default().model;
    let place = section.place_of("provider");
    let provider = section.read("provider", provider).unwrap_or(usual.provider);
    if let Some(place) = place {
        require(section, &place, provider.kind);
    }
    let name = section.read("name", filled_text).unwrap_or_default();
    let base_url = section.read("base_url", value::base_url).as_ref().map(BaseUrl::to_url);
    let api_key = section.read("api_key", |setting| api_key(setting, provider.kind, outside)).flatten();
    let max_tokens = section.read("max_tokens", count(1..=TOKENS)).unwrap_or(MAX_TOKENS);
    let thinking = section.read("thinking", |setting| thinking(setting, max_tokens)).unwrap_or_default();
    let script = section.read("script", |setting| script(setting, provider.kind, outside)).flatten();
    let images = section.read("images", value::boolean).unwrap_or(usual.images);
    let window = Window {
        tokens: section.read("window", count(LEAST_WINDOW..=TOKENS)),
        summarise_at: section.read("summarise_at", value::percent).unwrap_or(usual.window.summarise_at),
    };
    let options = match provider.kind {
        Kind::Local => Options { script, ..Options::default() },
        Kind::Remote { .. } => Options { name, base_url, api_key, max_tokens, thinking, script },
    };
    Model { provider, options, images, window }
}

fn require(section: &mut Section<'_>, place: &Place, kind: Kind) {
    let Kind::Remote { key_hint } = kind else { return };
    if section.place_of("name").is_none() {
        section.refuse("name", place.clone(), Problem::Missing("which model of the provider is it?"));
    }
    if section.place_of("base_url").is_none() && section.place_of("api_key").is_none() {
        section.refuse("api_key", place.clone(), Problem::Missing(key_hint));
    }
}

fn provider(setting: &Setting) -> Result<&'static Provider, Problem> {
    let quoted = PROVIDERS.map(|provider| format!("\"{}\"", provider.name));
    let [others @ .., last] = &quoted;
    let expected = format!("{} or {last}", others.join(", "));
    value::shown(setting, &expected, |text| PROVIDERS.into_iter().find(|provider| provider.name == text))
}

fn api_key(setting: &Setting, kind: Kind, outside: &Outside<'_>) -> Result<Option<Secret>, Problem> {
    match kind {
        Kind::Remote { .. } => outside.secret(setting).map(Some),
        Kind::Local => Ok(None),
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

fn script(setting: &Setting, kind: Kind, outside: &Outside<'_>) -> Result<Option<PathBuf>, Problem> {
    match kind {
        Kind::Local => outside.readable(setting).map(Some),
        Kind::Remote { .. } => Ok(None),
    }
}

fn filled_text(setting: &Setting) -> Result<String, Problem> {
    value::shown(setting, "a string that is not empty", |text| {
        (!text.trim().is_empty()).then(|| text.to_owned())
    })
}
