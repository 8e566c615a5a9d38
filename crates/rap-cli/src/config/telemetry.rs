//! Reads `[telemetry]`: the collector of traces. What is not set is taken from the usual variables of OpenTelemetry.

use rap_protocol::{EndpointUrl, Secret};
use rap_runtime::TelemetrySettings;
use url::Url;

use super::resolver::Resolver;
use super::section::Section;
use super::{Location, Problem, value};

/// Path that is appended to the base URL of a collector.
const TRACES: &str = "v1/traces";
const URL_EXPECTED: &str =
    "the base URL of a collector that takes OTLP over HTTP, such as \"http://127.0.0.1:4318\"";
const HEADERS_EXPECTED: &str =
    "headers as NAME=VALUE with %20 for a space, separated by commas, or env:NAME, or file:PATH";

pub(super) fn read_telemetry(
    section: &mut Section<'_>,
    resolver: &Resolver<'_>,
) -> Option<TelemetrySettings> {
    let variable = |name: &str| resolver.plain_variable(name).filter(|text| !text.is_empty());
    let disabled = variable("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"));
    let given = section.location_of("otlp").is_some();
    let url = section.read("otlp", |setting| base_url(value::text(setting)?));
    let headers = section.read("headers", |setting| headers(resolver.secret(setting)?.expose()));
    let service = section.read("service", |setting| value::text(setting).map(str::to_owned));
    let url = match url {
        None if given => return None,
        Some(url) => url,
        None => {
            match (variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), variable("OTEL_EXPORTER_OTLP_ENDPOINT")) {
                (Some(text), _) => {
                    from_variable(section, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", text, endpoint)?
                }
                (None, Some(text)) => from_variable(section, "OTEL_EXPORTER_OTLP_ENDPOINT", text, base_url)?,
                (None, None) => return None,
            }
        }
    };
    let headers = match headers {
        Some(headers) => headers,
        None => match resolver.secret_variable("OTEL_EXPORTER_OTLP_HEADERS") {
            Some(text) => from_variable(section, "OTEL_EXPORTER_OTLP_HEADERS", text, self::headers)?,
            None => Vec::new(),
        },
    };
    let service = service.or_else(|| variable("OTEL_SERVICE_NAME").map(str::to_owned));
    let settings = TelemetrySettings { url, headers, service: service.unwrap_or_else(|| "rap".into()) };
    (!disabled).then_some(settings)
}

/// Reads a variable of OpenTelemetry. A mistake names the variable.
fn from_variable<T>(
    section: &mut Section<'_>,
    name: &str,
    text: &str,
    read: impl FnOnce(&str) -> Result<T, Problem>,
) -> Option<T> {
    match read(text) {
        Ok(value) => Some(value),
        Err(problem) => {
            section.refuse("otlp", Location::Variable(name.to_owned()), problem);
            None
        }
    }
}

/// Returns the URL for traces of a collector.
fn base_url(text: &str) -> Result<Url, Problem> {
    endpoint(&format!("{}/{TRACES}", text.trim_end_matches('/')))
}

fn endpoint(text: &str) -> Result<Url, Problem> {
    let url = EndpointUrl::new(text).map_err(|_| Problem::Expected(URL_EXPECTED))?.to_url();
    let plain = url.username().is_empty() && url.password().is_none() && url.fragment().is_none();
    if plain { Ok(url) } else { Err(Problem::Expected(URL_EXPECTED)) }
}

/// Reads headers in the form `NAME=VALUE,NAME=VALUE`, with encoded values. Errors do not contain them.
fn headers(text: &str) -> Result<Vec<(String, Secret)>, Problem> {
    let header = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let (name, value) = (name.trim(), decoded(value.trim())?);
        let is_name = !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
        let is_value = !value.is_empty() && value.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        (is_name && is_value).then(|| (name.to_ascii_lowercase(), Secret::new(value.as_str())))
    };
    let parts = text.split(',').filter(|part| !part.trim().is_empty());
    parts.map(|part| header(part).ok_or(Problem::Expected(HEADERS_EXPECTED))).collect()
}

/// Decodes `%20` and the like.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        if *byte == b'%' {
            let (digits, after) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = after;
        } else {
            bytes.push(*byte);
        }
    }
    String::from_utf8(bytes).ok()
}
