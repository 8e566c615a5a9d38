//! Reads `[telemetry]`: the collector of traces. What is not set is taken from the usual variables of OpenTelemetry.

use rap_protocol::{EndpointUrl, Secret};
use rap_runtime::TelemetrySettings;
use url::Url;

use super::document::{Setting, Value};
use super::resolver::Resolver;
use super::section::Section;
use super::{Location, Problem, value};

/// Path that is appended to the base URL of a collector.
const TRACES: &str = "v1/traces";
/// Name of the runtime in traces.
const SERVICE: &str = "rap";
const URL_EXPECTED: &str =
    "\"none\", or the base URL of a collector that takes OTLP over HTTP, such as \"http://127.0.0.1:4318\"";
const HEADERS_EXPECTED: &str = "a table of headers such as { authorization = \"env:OTLP_AUTHORIZATION\" }";
const VARIABLE_EXPECTED: &str = "headers as NAME=VALUE with %20 for a space, separated by commas";

/// Choice of a collector.
enum Collector {
    None,
    At(Url),
}

pub(super) fn read_telemetry(
    section: &mut Section<'_>,
    resolver: &Resolver<'_>,
) -> Option<TelemetrySettings> {
    let variable = |name: &str| resolver.plain_variable(name).filter(|text| !text.is_empty());
    let given = section.location_of("otlp_endpoint").is_some();
    let collector = section.read("otlp_endpoint", |setting| match value::text(setting)? {
        "none" => Ok(Collector::None),
        text => base_url(text).map(Collector::At),
    });
    let headers_given = section.location_of("headers").is_some();
    let headers = section.read("headers", |setting| header_table(setting, resolver));
    let service = section.read("service", |setting| value::text(setting).map(str::to_owned));
    let url = match collector {
        Some(Collector::At(url)) => url,
        Some(Collector::None) => return None,
        None if given || is_off(variable) => return None,
        None => url_of_variables(section, variable)?,
    };
    let headers = match resolver.secret_variable("OTEL_EXPORTER_OTLP_HEADERS") {
        Some(text) if !headers_given => {
            from_variable(section, "headers", "OTEL_EXPORTER_OTLP_HEADERS", text, header_list)?
        }
        _ => headers.unwrap_or_default(),
    };
    let service = service.or_else(|| variable("OTEL_SERVICE_NAME").map(str::to_owned));
    Some(TelemetrySettings { url, headers, service: service.unwrap_or_else(|| SERVICE.into()) })
}

/// Returns true if the variables of OpenTelemetry turn traces off.
fn is_off<'a>(variable: impl Fn(&str) -> Option<&'a str>) -> bool {
    let is = |name, value: &str| variable(name).is_some_and(|text: &str| text.eq_ignore_ascii_case(value));
    is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none")
}

fn url_of_variables<'a>(
    section: &mut Section<'_>,
    variable: impl Fn(&str) -> Option<&'a str>,
) -> Option<Url> {
    let (traces, base) = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT");
    match (variable(traces), variable(base)) {
        (Some(text), _) => from_variable(section, "otlp_endpoint", traces, text, endpoint),
        (None, Some(text)) => from_variable(section, "otlp_endpoint", base, text, base_url),
        (None, None) => None,
    }
}

/// Reads a variable of OpenTelemetry. A mistake names the variable.
fn from_variable<T>(
    section: &mut Section<'_>,
    key: &str,
    name: &str,
    text: &str,
    read: impl FnOnce(&str) -> Result<T, Problem>,
) -> Option<T> {
    let refuse = |problem| section.refuse(key, Location::Variable(name.to_owned()), problem);
    read(text).map_err(refuse).ok()
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

fn is_header_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

fn header_table(setting: &Setting, resolver: &Resolver<'_>) -> Result<Vec<(String, Secret)>, Problem> {
    let table = match &setting.value {
        Value::Table(table) => table,
        Value::Untyped(text) => return header_list(text),
        _ => return Err(Problem::Expected(HEADERS_EXPECTED)),
    };
    let header = |(name, value): (&String, &Setting)| {
        if !is_header_name(name) {
            return Err(Problem::Expected(HEADERS_EXPECTED));
        }
        Ok((name.to_ascii_lowercase(), resolver.header_value(value)?))
    };
    table.iter().map(header).collect()
}

/// Reads headers in the form `NAME=VALUE,NAME=VALUE`, with encoded values. Errors do not contain them.
fn header_list(text: &str) -> Result<Vec<(String, Secret)>, Problem> {
    let header = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let (name, value) = (name.trim(), decoded(value.trim())?);
        let is_value = !value.is_empty() && value.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        (is_header_name(name) && is_value).then(|| (name.to_ascii_lowercase(), Secret::new(value.as_str())))
    };
    let parts = text.split(',').filter(|part| !part.trim().is_empty());
    parts.map(|part| header(part).ok_or(Problem::Expected(VARIABLE_EXPECTED))).collect()
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
