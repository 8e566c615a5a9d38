//! The collector of traces: the file, the variables of OpenTelemetry, and mistakes.

use super::*;

const BASE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const FILE: &str = "[telemetry]\notlp_endpoint = \"http://collector:4318/\"\n";

fn url_of(setup: Setup) -> Option<String> {
    setup.config().telemetry.map(|telemetry| telemetry.url.to_string())
}

#[test]
fn the_file_is_read_before_the_variables() {
    let expected = Some("http://collector:4318/v1/traces".to_owned());
    assert_eq!(url_of(Setup::new(FILE)), expected);
    assert_eq!(url_of(Setup::new(FILE).variable(BASE, "http://other:4318")), expected);
    assert_eq!(url_of(Setup::new("").variable(BASE, "http://collector:4318")), expected);
    assert_eq!(
        url_of(Setup::new("").variable("RAP_TELEMETRY_OTLP_ENDPOINT", "http://collector:4318")),
        expected
    );
    let traces = Setup::new("").variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:1/own");
    assert_eq!(url_of(traces.variable(BASE, "http://other:4318")), Some("http://t:1/own".into()));
}

#[test]
fn without_a_collector_there_are_no_traces() {
    assert_eq!(url_of(Setup::new("")), None);
    assert_eq!(url_of(Setup::new("").variable(BASE, "")), None);
    let set = || Setup::new("").variable(BASE, "http://collector:4318");
    assert_eq!(url_of(set().variable("OTEL_SDK_DISABLED", "TRUE")), None);
    assert_eq!(url_of(set().variable("OTEL_TRACES_EXPORTER", "none")), None);
    let none = Setup::new("[telemetry]\notlp_endpoint = \"none\"\n");
    assert_eq!(url_of(none.variable(BASE, "http://collector:4318")), None);
}

#[test]
fn headers_come_from_the_file_or_a_variable() {
    let headers = |setup: Setup| {
        let headers = setup.config().telemetry.unwrap().headers.into_iter();
        headers.map(|(name, value)| format!("{name}: {}", value.expose())).collect::<Vec<_>>()
    };
    let file = format!("{FILE}headers = {{ Authorization = \"env:A\", x-team = \"blue\" }}\n");
    let file = Setup::new(&file).variable("A", "Bearer t0ken");
    assert_eq!(headers(file), ["authorization: Bearer t0ken", "x-team: blue"]);
    let variable = "x-a=1%2C2, x-b=Bearer%20t";
    let from_variable = Setup::new(FILE).variable("OTEL_EXPORTER_OTLP_HEADERS", variable);
    assert_eq!(headers(from_variable), ["x-a: 1,2", "x-b: Bearer t"]);
}

#[test]
fn mistakes_name_the_key_or_the_variable_but_no_secret() {
    for (lines, expected) in [
        ("otlp_endpoint = \"collector:4318\"", "rap.toml:2: telemetry.otlp_endpoint: expected"),
        ("otlp_endpoint = \"http://u:s3cr3t@collector\"", "rap.toml:2: telemetry.otlp_endpoint: expected"),
        ("headers = \"s3cr3t\"", "rap.toml:2: telemetry.headers: expected a table"),
        ("headers = { \"a b\" = \"s3cr3t\" }", "rap.toml:2: telemetry.headers: expected a table"),
        ("headers = { a = \"env:MISSING\" }", "the environment variable MISSING is not set"),
        ("endpoint = \"http://collector\"", "telemetry.endpoint: unknown key"),
    ] {
        let error = Setup::new(&format!("[telemetry]\n{lines}\n")).error();
        assert!(error.contains(expected), "{lines}: {error}");
    }
    for (variable, value, key) in [
        (BASE, "collector:4318", "telemetry.otlp_endpoint"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://collector", "telemetry.otlp_endpoint"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "s3cr3t", "telemetry.headers"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=%zz", "telemetry.headers"),
    ] {
        let file = if variable.ends_with("HEADERS") { FILE } else { "" };
        let error = Setup::new(file).variable(variable, value).error();
        assert!(error.contains(&format!("{variable}: {key}: expected")), "{error}");
    }
}
