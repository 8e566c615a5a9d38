//! Files and output for operators: logs as JSON, manual pages, the systemd unit, the dashboard and the alert rules.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use rap_testkit::{Rap, Setup, Tools, programs};
use serde_json::Value;
use yaml_rust2::{Yaml, YamlLoader};

fn deploy(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[tokio::test]
async fn the_log_can_be_json() {
    let rap = Setup::new().variable("RAP_LOG_FORMAT", "json").start();
    let thread = rap.open("say hello").await;
    rap.until_idle(&thread).await;
    let log = rap.log();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let listening = lines
        .iter()
        .find(|line| line["message"].as_str().is_some_and(|message| message.starts_with("listening on ")));
    let listening = listening.unwrap_or_else(|| panic!("{log}"));
    assert_eq!(listening["level"], "INFO");
    assert_eq!(listening["tool_servers"], 0);
    assert!(listening["timestamp"].is_string() && listening["target"].is_string(), "{listening}");
}

#[test]
fn there_is_a_manual_page_for_every_command() {
    let page = |arguments: &[&str]| {
        let output = programs::rap(&[&["man"], arguments].concat()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, text) = page(&[]);
    assert_eq!(code, Some(0));
    assert!(text.contains(".TH rap 1") && text.contains("rap\\-serve"), "{text}");
    let (code, text) = page(&["threads", "ls"]);
    assert!(code == Some(0) && text.contains("\\-\\-status"), "{text}");
    assert_eq!(page(&["nothing"]).0, Some(2));
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().to_str().unwrap();
    assert_eq!(page(&["--dir", dir]).0, Some(0));
    for name in ["rap.1", "rap-serve.1", "rap-threads-ls.1", "rap-backup.1"] {
        assert!(directory.path().join(name).exists(), "{name}");
    }
}

/// The flags of the unit exist, and it waits for longer than the runtime takes to stop.
#[test]
fn the_unit_starts_the_runtime() {
    let unit = deploy("rap.service");
    let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(&format!("{key}="))).unwrap();
    let mut words = value("ExecStart").split(' ');
    assert_eq!(words.next(), Some("/usr/local/bin/rap"));
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("rap.toml");
    fs::write(&config, "[server]\nlisten = \"nonsense\"\n").unwrap();
    let config = config.to_str().unwrap();
    let words: Vec<&str> =
        words.map(|word| if word == "/etc/rap/rap.toml" { config } else { word }).collect();
    // The flags are accepted; only the configuration is refused.
    let output = programs::rap(&words).output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && log.contains("listen"), "{log}");
    let stop_within = rap_cli::config::Config::default().limits.stop_within;
    assert!(value("TimeoutStopSec").parse::<u64>().unwrap() > stop_within.as_secs());
    assert_eq!(value("WorkingDirectory"), format!("/var/lib/{}", value("StateDirectory")));
}

/// Returns the queries of the dashboard and of the alert rules.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&deploy("grafana-dashboard.json")).unwrap();
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            queries.push(target["expr"].as_str().unwrap().to_owned());
        }
    }
    assert!(queries.len() > 10);
    let rules = YamlLoader::load_from_str(&deploy("alerts.yml")).unwrap().remove(0);
    let text = |value: &Yaml| value.as_str().unwrap().to_owned();
    for rule in rules["groups"][0]["rules"].as_vec().unwrap() {
        assert!(!text(&rule["alert"]).is_empty() && !text(&rule["annotations"]["summary"]).is_empty());
        queries.push(text(&rule["expr"]));
    }
    queries
}

/// Every metric and every label that the dashboard and the alert rules name is in /metrics.
#[tokio::test]
async fn the_dashboard_and_the_alert_rules_name_metrics_that_exist() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let metrics = rap.send("GET", "/metrics", &[], b"").await.text;
    let samples: BTreeSet<&str> = metrics
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split([' ', '{']).next())
        .collect();
    let mut named = BTreeSet::new();
    for query in queries() {
        let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        for name in query.split(word).filter(|word| word.starts_with("rap_")) {
            assert!(samples.contains(name), "{name} in {query}");
            named.insert(name.to_owned());
        }
        for (name, value) in labels(&query) {
            let known = ["job"].contains(&name) || metrics.contains(&format!("{name}=\"{value}\""));
            assert!(known, "{name}=\"{value}\" in {query}");
        }
        for list in query.split("by (").skip(1) {
            for name in list.split(')').next().unwrap().split(", ") {
                assert!(metrics.contains(&format!("{name}=\"")), "{name} in {query}");
            }
        }
    }
    assert!(named.len() > 12, "{named:?}");
}

/// Returns the labels with their values in a query.
fn labels(query: &str) -> Vec<(&str, &str)> {
    let inside = query.split('{').skip(1).map(|rest| rest.split('}').next().unwrap());
    let pairs = inside.flat_map(|labels| labels.split(',')).filter_map(|label| label.split_once('='));
    pairs.map(|(name, value)| (name.trim_end_matches('!'), value.trim_matches('"'))).collect()
}
