//! `rap models check`: asks the configured models, and shows what works.

use std::sync::Arc;
use std::time::Instant;

use rap_agent::{Arguments, CallEntry, Entry, Item};
use rap_api::Cost;
use rap_protocol::{Body, CallId, Content, Image, InputSchema, Timestamp, visible};
use rap_runtime::model::{AnswerMemory, Model, ModelAnswer, ModelRequest, OfferedTool, Spent, Usage};
use serde_json::{Map, json};

use super::print;
use crate::config::{self, Config};
use crate::serve::{self, model_name};

/// Number of characters of an answer that are shown.
const SHOWN_CHARS: usize = 60;
/// A red square of 8 by 8 pixels, as a PNG in base64.
const RED: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC";
/// Messages to the model. The scripted model follows their last lines.
const WORD: &str = "This is a test of the connection. Answer with one word: ready\nsay ready";
const CALL: &str = "This is a test of tools. Call the tool add with a = 2 and b = 3, and nothing else.\ncall add {\"a\": 2, \"b\": 3}";
const COLOUR: &str = "Call the tool look, and answer with one word: which colour is the image?";

/// Checks the models of all agents, each once. Fails if one of them fails a check.
pub async fn check(config: Config) -> anyhow::Result<()> {
    let own = config.agents.iter().flat_map(|agent| agent.model.iter().chain(&agent.fallbacks));
    let uses_common = config.agents.iter().any(|agent| agent.model.is_none());
    let models = uses_common.then_some(&config.model).into_iter().chain(own);
    // Agents may share a model, which is asked and paid for once.
    let mut unique: Vec<&config::Model> = Vec::new();
    for model in models {
        if !unique.contains(&model) {
            unique.push(model);
        }
    }
    let mut failed = Vec::new();
    for model in unique {
        if !check_model(model, &config).await? {
            failed.push(model_name(model));
        }
    }
    match failed.as_slice() {
        [] => Ok(()),
        names => Err(anyhow::anyhow!("checks failed: {}", names.join(", "))),
    }
}

/// Checks one model. Returns true if it answers, calls a tool and, unless it is configured not to, accepts images. A
/// model that gives no answer is not asked again.
async fn check_model(settings: &config::Model, config: &Config) -> anyhow::Result<bool> {
    let model = serve::model(settings.clone(), &config.limits)?;
    print(&format!("{} at {}\n", model_name(settings), model.destination()))?;
    let mut probe = Probe { model, usage: Usage::default() };
    let word = probe.ask(request(vec![Item::user(WORD)], &[], false), "word", any_text).await?;
    if word == Outcome::NoAnswer {
        return Ok(false);
    }
    let sum = |arguments: &Map<String, serde_json::Value>| {
        arguments.get("a") == Some(&json!(2)) && arguments.get("b") == Some(&json!(3))
    };
    let numbers =
        json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}});
    let tools = [tool("add", "Adds two numbers.", numbers)?];
    let call = probe.ask(request(vec![Item::user(CALL)], &tools, false), "tool call", |answer| {
        let calls = answer.calls.iter().filter(|call| call.name == "add");
        match calls.filter_map(|call| call.arguments.as_ref().ok()).any(sum) {
            true => Ok("add(2, 3)".into()),
            false => Err(format!("it did not call the tool; it answered: {}", shown(&answer.text))),
        }
    });
    let call = call.await?;
    let image = if settings.images {
        let look = [tool("look", "Returns an image.", json!({"type": "object"}))?];
        let image = probe.ask(request(image_history()?, &look, true), "image", any_text).await?;
        if image != Outcome::Passed {
            print("             if the model cannot see images, set images = false in its section\n")?;
        }
        image
    } else {
        print("  image      not checked: model.images is false\n")?;
        Outcome::Passed
    };
    let window = match settings.window.tokens {
        Some(tokens) => format!("{tokens} tokens"),
        None => window(&*probe.model).await,
    };
    let Usage { input, output, cost, .. } = probe.usage;
    let cost = Cost::from_nanos(cost)
        .map_or_else(|| "price unknown; set input_price and output_price".into(), |cost| cost.to_string());
    print(&format!(
        "  window     {window}\n  cost       {input} input and {output} output tokens, {cost}\n"
    ))?;
    Ok([word, call, image].iter().all(|outcome| *outcome == Outcome::Passed))
}

fn any_text(answer: &ModelAnswer) -> Result<String, String> {
    match answer.text.trim().is_empty() {
        true => Err("the answer is empty".into()),
        false => Ok(shown(&answer.text)),
    }
}

/// Describes the context window of a model without a configured one.
async fn window(model: &dyn Model) -> String {
    match model.window().await {
        None => "unknown".into(),
        Some(tokens) if model.assumes_window().await => {
            format!("{tokens} tokens, assumed: its server does not name it; set model.window if you know it")
        }
        Some(tokens) => format!("{tokens} tokens"),
    }
}

/// Outcome of one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    /// The answer is not as expected.
    Failed,
    NoAnswer,
}

/// A model that is checked, and what the checks have used.
struct Probe {
    model: Arc<dyn Model>,
    usage: Usage,
}

impl Probe {
    /// Sends a request and prints the outcome.
    async fn ask(
        &mut self,
        request: ModelRequest,
        what: &str,
        check: impl FnOnce(&ModelAnswer) -> Result<String, String>,
    ) -> anyhow::Result<Outcome> {
        let began = Instant::now();
        let spent = request.spent.clone();
        let answer = self.model.ask(request, &mut |_| {}).await;
        let seconds = began.elapsed().as_secs_f64();
        let used = match &answer {
            Ok(answer) => answer.usage,
            Err(_) => spent.take(),
        };
        self.usage.add(used);
        let (outcome, detail) = match answer.map(|answer| check(&answer)) {
            Ok(Ok(detail)) => (Outcome::Passed, detail),
            Ok(Err(detail)) => (Outcome::Failed, detail),
            Err(error) => (Outcome::NoAnswer, error.to_string()),
        };
        let word = if outcome == Outcome::Passed { "ok" } else { "FAILED" };
        print(&format!("  {what:<10} {word} ({seconds:.1} s): {}\n", visible::text(&detail)))?;
        Ok(outcome)
    }
}

fn request(items: Vec<Item>, tools: &[OfferedTool], images: bool) -> ModelRequest {
    let entries = items.into_iter().map(|item| Entry { at: Timestamp(0), item }).collect();
    ModelRequest {
        system: String::new(),
        entries,
        tools: tools.to_vec().into(),
        turn: 1,
        images,
        spent: Spent::default(),
        memory: AnswerMemory::default(),
    }
}

fn tool(name: &str, description: &str, schema: serde_json::Value) -> anyhow::Result<OfferedTool> {
    let schema = InputSchema::new(schema)?;
    Ok(OfferedTool { name: name.into(), description: description.into(), schema })
}

/// Returns a conversation in which a tool has returned an image.
fn image_history() -> anyhow::Result<Vec<Item>> {
    let id = CallId::new("check_1")?;
    let arguments = Arguments::Given(Map::new());
    let call = CallEntry { id: id.clone(), model_id: None, name: "look".into(), arguments, display: None };
    let image = Image { data: RED.into(), media_type: "image/png".into() };
    let content = Body::Content(vec![Content::Image(image)]);
    let result = Item::Result { call_id: id, content, display: Vec::new(), synthetic: false };
    Ok(vec![Item::user(COLOUR), Item::assistant("", vec![call]), result])
}

/// Returns the start of an answer on one line.
fn shown(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let end = line.char_indices().nth(SHOWN_CHARS).map_or(line.len(), |(end, _)| end);
    if end < line.len() { format!("{}…", &line[..end]) } else { line }
}
