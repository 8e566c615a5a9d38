//! `/metrics` of the runtime: valid Prometheus text format, and correct numbers.

use std::collections::{BTreeMap, HashMap, HashSet};

use rap_testkit::model::ModelServer;
use rap_testkit::peer::Reply;
use rap_testkit::tools::INVOKE;
use rap_testkit::{Rap, Setup, Tools, http, until};
use serde_json::json;

/// Samples by name and labels as written.
type Samples = BTreeMap<String, f64>;

/// Parses the text format strictly.
fn parse(text: &str) -> Samples {
    assert!(text.ends_with('\n'));
    let (mut samples, mut kinds, mut helped) = (Samples::new(), HashMap::new(), HashSet::new());
    let mut current = String::new();
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap_or_else(|| panic!("{line}"));
            assert!(!help.trim().is_empty() && helped.insert(name.to_owned()), "{line}");
            current = name.to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap_or_else(|| panic!("{line}"));
            assert_eq!(name, current, "a TYPE belongs to the HELP before it");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            kinds.insert(name.to_owned(), kind.to_owned());
        } else {
            let (sample, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            let (name, labels) = sample.split_once('{').unwrap_or((sample, "}"));
            check_name(name);
            check_labels(labels.strip_suffix('}').unwrap_or_else(|| panic!("{line}")));
            let suffixes = ["_bucket", "_sum", "_count"];
            let family = match kinds.get(&current).map(String::as_str) {
                Some("histogram") => suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)),
                _ => Some(name),
            };
            assert_eq!(family, Some(current.as_str()), "{line} stands in another family");
            assert!(samples.insert(sample.to_owned(), value.parse().unwrap()).is_none(), "twice: {line}");
        }
    }
    for (name, _) in kinds.iter().filter(|(_, kind)| *kind == "histogram") {
        check_histogram(name, text, &samples);
    }
    samples
}

fn check_name(name: &str) {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    assert!(name.starts_with("rap_") && name.chars().all(fits), "{name}");
}

fn check_labels(labels: &str) {
    for label in labels.split(',').filter(|label| !label.is_empty()) {
        let (name, value) = label.split_once('=').unwrap_or_else(|| panic!("{labels}"));
        assert!(name.chars().all(|c| c.is_ascii_lowercase()), "{labels}");
        let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let word = |c: char| c.is_ascii_alphanumeric() || "_.+-".contains(c);
        assert!(value.is_some_and(|value| !value.is_empty() && value.chars().all(word)), "{labels}");
    }
}

/// Checks that buckets are cumulative and that the last one equals the count.
fn check_histogram(name: &str, text: &str, samples: &Samples) {
    let prefix = format!("{name}_bucket{{le=\"");
    let buckets: Vec<(f64, f64)> = text
        .lines()
        .filter_map(|line| line.strip_prefix(&prefix)?.split_once("\"} "))
        .map(|(bound, count)| (bound.parse().unwrap(), count.parse().unwrap()))
        .collect();
    assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{name}: {buckets:?}");
    assert_eq!(*buckets.last().unwrap(), (f64::INFINITY, samples[&format!("{name}_count")]), "{name}");
    assert!(samples[&format!("{name}_sum")] >= 0.0);
}

async fn scrape(rap: &Rap) -> Samples {
    let answer = rap.send("GET", "/metrics", &[], b"").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    parse(answer.body.as_str().unwrap())
}

#[tokio::test]
async fn a_new_runtime_has_every_metric_at_zero() {
    let rap = Setup::new().token("client-token").start();
    let samples = scrape(&rap).await;
    let idle = ["rap_threads{status=\"idle\"}", "rap_steps_total{outcome=\"applied\"}", "rap_streams"];
    assert!(idle.iter().all(|name| samples[*name] == 0.0), "{samples:?}");
    let names: HashSet<_> = samples.keys().map(|key| key.split('{').next().unwrap()).collect();
    // The number of time series is fixed.
    assert!(samples.len() < 300 && names.len() > 20, "{} of {}", samples.len(), names.len());
}

#[tokio::test]
async fn threads_steps_calls_deliveries_and_the_model_are_counted() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let rap = Setup::new().tools(&tools).model(&model.lines()).start();
    model.calls(&[("c1", "work", json!({}))]);
    tools.answer_next(INVOKE, Reply::Status(500));
    let thread = rap.open("hello").await;
    let call = tools.invocations(2).await.remove(1);
    let waiting = until("the acknowledgement", async || {
        let samples = scrape(&rap).await;
        (samples["rap_deliveries_total{kind=\"invocation\",outcome=\"delivered\"}"] == 1.0).then_some(samples)
    })
    .await;
    assert_eq!(waiting["rap_threads{status=\"waiting\"}"], 1.0);
    assert_eq!(waiting["rap_deliveries_total{kind=\"invocation\",outcome=\"retrying\"}"], 1.0);
    assert_eq!(waiting["rap_invoke_seconds_count"], 2.0);

    model.says("well done");
    http::post(&format!("{}/callback/made-up", rap.url), &json!({})).await.expect_refusal(401);
    call.returns("done").await;
    rap.until_idle(&thread).await;
    let samples = scrape(&rap).await;
    let table = [
        ("rap_threads{status=\"waiting\"}", 0.0),
        ("rap_threads{status=\"idle\"}", 1.0),
        ("rap_deliveries_total{kind=\"callback\",outcome=\"delivered\"}", 1.0),
        ("rap_deliveries_total{kind=\"callback\",outcome=\"refused\"}", 1.0),
        ("rap_callback_seconds_count", 1.0),
        ("rap_model_seconds_count", 2.0),
        ("rap_model_first_words_seconds_count", 1.0),
        ("rap_effects_waiting{kind=\"ask\"}", 0.0),
        ("rap_effects_waiting{kind=\"invoke\"}", 0.0),
        ("rap_effects_under_way{kind=\"ask\"}", 0.0),
        ("rap_commits_lost_total", 0.0),
    ];
    for (name, expected) in table {
        assert_eq!(samples[name], expected, "{name}");
    }
    let of_model = [
        ("rap_model_questions_total{outcome=\"answered\",", 2.0),
        ("rap_model_questions_total{outcome=\"failed\",", 0.0),
        ("rap_model_tokens_total{kind=\"input\",", 20.0),
        ("rap_model_tokens_total{kind=\"output\",", 6.0),
        ("rap_model_cost_dollars_total{", 0.0),
    ];
    for (begin, expected) in of_model {
        let name = format!("{begin}agent=\"default\",model=\"gpt\",provider=\"openai\"}}");
        assert_eq!(samples[&name], expected, "{name}");
    }
    assert!(samples["rap_steps_total{outcome=\"applied\"}"] >= 4.0, "{samples:?}");
    assert!(samples["rap_step_commit_seconds_count"] >= 4.0);
    assert!(samples["rap_commit_jobs_sum"] >= samples["rap_commit_jobs_count"]);
    assert!(samples["rap_commit_seconds_count"] == samples["rap_commit_jobs_count"]);
}

/// Requests, tokens and costs have the agent, the model and the provider as labels. Two models of an agent that differ only
/// by their servers are summed up.
#[tokio::test]
async fn tokens_and_costs_are_counted_by_agent_and_model() {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    let table = |server: &ModelServer, name: &str| {
        format!(
            "{{ provider = \"openai\", name = \"{name}\", api_key = \"sk-key\", base_url = \"{}/v1\", \
             input_price = 1, output_price = 2 }}",
            server.url
        )
    };
    let models = |name: &str, models: &[String]| {
        format!("name = \"{name}\"\nfallback_after = \"0s\"\nmodels = [{}]", models.join(", "))
    };
    let setup = Setup::new().agent(&models("one", &[table(&first, "big"), table(&second, "small")]));
    let rap = setup.agent(&models("two", &[table(&first, "big"), table(&second, "big")])).start();
    // The cut answer of the first model is paid for, too.
    let usage =
        json!({"prompt_tokens": 500, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}});
    let cut = format!("data: {}\n\n", json!({"choices": [{"delta": {"content": "ha"}}], "usage": usage}));
    for agent in ["one", "two"] {
        let kind = ("content-type", "text/event-stream".to_owned());
        first.answer(Reply::Full(200, Some(kind), cut.clone().into()));
        second.says_to(1_000, "Here.");
        let new = json!({"id": agent, "agent": agent, "message": "hi"});
        rap.post("/v1/threads", &new).await.expect(201);
        rap.until_line(agent, "assistant: Here.").await;
    }
    let samples = scrape(&rap).await;
    let count = |name: &str, part: &str, agent: &str, model: &str| {
        samples[&format!("{name}{{{part}agent=\"{agent}\",model=\"{model}\",provider=\"openai\"}}")]
    };
    let tokens = |agent: &str, model: &str| {
        ["input", "cached", "output"]
            .map(|kind| count("rap_model_tokens_total", &format!("kind=\"{kind}\","), agent, model))
    };
    assert_eq!(tokens("one", "big"), [500.0, 8.0, 1.0]);
    assert_eq!(tokens("one", "small"), [1_000.0, 0.0, 3.0]);
    assert_eq!(tokens("two", "big"), [1_500.0, 8.0, 4.0]);
    let costs = [("one", "big"), ("one", "small"), ("two", "big")]
        .map(|(agent, model)| count("rap_model_cost_dollars_total", "", agent, model));
    assert_eq!(costs, [0.000_502, 0.001_006, 0.001_508]);
    let requests = |outcome: &str, agent: &str, model: &str| {
        count("rap_model_questions_total", &format!("outcome=\"{outcome}\","), agent, model)
    };
    assert_eq!((requests("failed", "one", "big"), requests("answered", "one", "big")), (1.0, 0.0));
    assert_eq!((requests("failed", "one", "small"), requests("answered", "one", "small")), (0.0, 1.0));
    assert_eq!((requests("failed", "two", "big"), requests("answered", "two", "big")), (1.0, 1.0));
    let (code, shown) = rap.command(&["top", "--once"]);
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("model requests: answered 2, failed 2, refused 0"), "{shown}");
    assert!(shown.contains("tokens: 3,000 in (16 cached), 8 out; cost $0.0030"), "{shown}");
}

#[tokio::test]
async fn threads_are_counted_by_status_across_restarts() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    for n in 0..5 {
        rap.post("/v1/threads", &json!({"id": format!("t{n}")})).await.expect(201);
    }
    rap.close("t0").await;
    let waiting = rap.open("call work").await;
    tools.invocation().await;
    let rap = rap.restarted();
    let samples = scrape(&rap).await;
    let count = |status: &str| samples[&format!("rap_threads{{status=\"{status}\"}}")];
    assert_eq!([count("idle"), count("closed"), count("waiting"), count("failed")], [4.0, 1.0, 1.0, 0.0]);
    // The model request may have been repeated after the kill; it is cancelled in any case.
    rap.act(&waiting, "interrupt").await.expect(202);
    rap.until_idle(&waiting).await;
    assert_eq!(scrape(&rap).await["rap_threads{status=\"idle\"}"], 5.0);
}
