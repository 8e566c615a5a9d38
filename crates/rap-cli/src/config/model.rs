//! Reads `[model]` tables. Keys that the provider does not use are read but not required.

use std::path::PathBuf;

use rap_protocol::Secret;
use rap_runtime::model::anthropic::{self, MAX_TOKENS, MIN_THINKING_TOKENS, Thinking};
use rap_runtime::model::{CallIds, Kind, Options, Prices, Provider, openai, responses, scripted};

use super::document::{Setting, Value};
use super::resolver::Resolver;
use super::section::Section;
use super::value::count;
use super::{BaseUrl, Config, Location, Model, Problem, Window, value};

/// Providers that a configuration can name.
pub(crate) static PROVIDERS: [&Provider; 4] =
    [&anthropic::PROVIDER, &openai::PROVIDER, &responses::PROVIDER, &scripted::PROVIDER];

/// Upper bound of `max_tokens` and `window`.
const MAX_TOKEN_COUNT: u32 = 10_000_000;
/// Lower bound of `window`, in tokens.
const MIN_WINDOW: u32 = 1_000;
/// Upper bound of a price, in dollars per million tokens.
const MAX_PRICE: f64 = 1e6;

pub(super) fn read_model(section: &mut Section<'_>, resolver: &Resolver<'_>) -> Model {
    let defaults = Config::default().model;
    let location = section.location_of("provider");
    let provider = section.read("provider", provider).unwrap_or(defaults.provider);
    match location {
        Some(location) => require(section, &location, provider.kind),
        None => require_provider(section),
    }
    let name = section.read("name", non_empty_text).unwrap_or_default();
    let base_url = section.read("base_url", value::base_url).as_ref().map(BaseUrl::to_url);
    let api_key = section.read("api_key", |setting| api_key(setting, provider.kind, resolver)).flatten();
    let max_tokens = section.read("max_tokens", count(1..=MAX_TOKEN_COUNT)).unwrap_or(MAX_TOKENS);
    let thinking = section.read("thinking", |setting| thinking(setting, max_tokens)).unwrap_or_default();
    let call_ids = section.read("call_ids", call_ids);
    let prices = prices(section, &name);
    let script = section.read("script", |setting| script(setting, provider.kind, resolver)).flatten();
    let images = section.read("images", value::boolean).unwrap_or(defaults.images);
    let window = Window {
        tokens: section.read("window", count(MIN_WINDOW..=MAX_TOKEN_COUNT)),
        summarise_at: section.read("summarise_at", value::percent).unwrap_or(defaults.window.summarise_at),
    };
    let options = match provider.kind {
        Kind::Local => Options { script, ..Options::default() },
        Kind::Remote { .. } => {
            Options { name, base_url, api_key, max_tokens, thinking, call_ids, prices, script }
        }
    };
    Model { provider, options, images, window }
}

fn require(section: &mut Section<'_>, location: &Location, kind: Kind) {
    let Kind::Remote { key_hint } = kind else { return };
    if section.location_of("name").is_none() {
        section.refuse("name", location.clone(), Problem::Missing("name a model of the provider"));
    }
    if section.location_of("base_url").is_none() && section.location_of("api_key").is_none() {
        section.refuse("api_key", location.clone(), Problem::Missing(key_hint));
    }
}

/// Refuses the settings of a model on a server without its provider: the default one, which needs no server, would
/// ignore them. Other software may set variables with such names.
fn require_provider(section: &mut Section<'_>) {
    let given = ["name", "base_url", "api_key"].into_iter().filter_map(|key| section.location_of(key));
    let given = given.into_iter().find(|location| !matches!(location, Location::Variable(_)));
    if let (Some(location), None) = (given, section.location_of("script")) {
        let why = "name the provider of the model, such as \"openai\" or \"anthropic\"";
        section.refuse("provider", location, Problem::Missing(why));
    }
}

fn provider(setting: &Setting) -> Result<&'static Provider, Problem> {
    let quoted = PROVIDERS.map(|provider| format!("\"{}\"", provider.name));
    let [others @ .., last] = &quoted;
    let expected = format!("{} or {last}", others.join(", "));
    value::parse_text(setting, &expected, |text| PROVIDERS.into_iter().find(|provider| provider.name == text))
}

fn api_key(setting: &Setting, kind: Kind, resolver: &Resolver<'_>) -> Result<Option<Secret>, Problem> {
    match kind {
        Kind::Remote { .. } => resolver.secret(setting).map(Some),
        Kind::Local => Ok(None),
    }
}

/// Reads `thinking`. Thinking tokens count as part of the answer, so their number must be below `max_tokens`.
fn thinking(setting: &Setting, max_tokens: u32) -> Result<Thinking, Problem> {
    match &setting.value {
        Value::Text(text) | Value::Untyped(text) if text == "off" => Ok(Thinking::Off),
        Value::Text(text) | Value::Untyped(text) if text == "adaptive" => Ok(Thinking::Adaptive),
        _ => {
            let most = max_tokens.saturating_sub(1);
            let tokens = count(MIN_THINKING_TOKENS..=most)(setting).ok().map(Thinking::Tokens);
            let expected = format!(
                "\"off\", \"adaptive\", or a number of tokens from {MIN_THINKING_TOKENS} to {most}, below max_tokens"
            );
            tokens.ok_or_else(|| value::unexpected(&expected, setting))
        }
    }
}

fn call_ids(setting: &Setting) -> Result<CallIds, Problem> {
    value::parse_text(setting, "\"wire\" or \"short\"", |text| match text {
        "wire" => Some(CallIds::Wire),
        "short" => Some(CallIds::Short),
        _ => None,
    })
}

/// Reads the prices. A price that is not given is the known one, or the price of input.
fn prices(section: &mut Section<'_>, model: &str) -> Option<Prices> {
    let input = section.read("input_price", price);
    let output = section.read("output_price", price);
    let cached = section.read("cached_price", price);
    input.or(output).or(cached)?;
    let known = Prices::known(model);
    let usual = |price: fn(Prices) -> u64| known.map(price);
    let base = input.or(usual(|known| known.input)).unwrap_or(0);
    Some(Prices {
        input: base,
        output: output.or(usual(|known| known.output)).unwrap_or(0),
        cached: cached.or(usual(|known| known.cached)).unwrap_or(base),
        written: match (input, known) {
            // The known ratio of the two prices is kept.
            (Some(input), Some(known)) if known.input > 0 => {
                input.saturating_mul(known.written) / known.input
            }
            (input, known) => input.or(known.map(|known| known.written)).unwrap_or(0),
        },
    })
}

/// Reads a price in dollars per million tokens. Returns millionths of a dollar.
fn price(setting: &Setting) -> Result<u64, Problem> {
    let text = match &setting.value {
        Value::Integer(dollars) => dollars.to_string(),
        Value::Float(text) | Value::Text(text) | Value::Untyped(text) => text.trim().to_owned(),
        _ => String::new(),
    };
    let dollars = text.parse().ok().filter(|dollars| (0.0..=MAX_PRICE).contains(dollars));
    let micros = dollars.map(|dollars: f64| (dollars * 1e6).round() as u64);
    micros.ok_or_else(|| value::unexpected("dollars per million tokens, such as 2.50", setting))
}

fn script(setting: &Setting, kind: Kind, resolver: &Resolver<'_>) -> Result<Option<PathBuf>, Problem> {
    match kind {
        Kind::Local => resolver.readable(setting).map(Some),
        Kind::Remote { .. } => Ok(None),
    }
}

fn non_empty_text(setting: &Setting) -> Result<String, Problem> {
    value::parse_text(setting, "a string that is not empty", |text| {
        (!text.trim().is_empty()).then(|| text.to_owned())
    })
}
