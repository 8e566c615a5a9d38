//! Models that use a fake server with canned responses.

use std::sync::Arc;

use rap_agent::{Entry, Item};
use rap_protocol::{InputSchema, Timestamp};
use rap_runtime::model::{AnswerMemory, Error, Model, ModelAnswer, ModelRequest, OfferedTool, Spent};
pub use rap_testkit::canned::{Canned, Server, events_of, failing, ok};
use serde_json::{Value, json};
use url::Url;

pub const KEY: &str = "sk-very-secret-key";
pub const LONG_NAME: &str = "a.tool/with a name that no provider takes";

/// A fake server and a model that uses it.
pub struct Harness {
    pub server: Server,
    pub model: Arc<dyn Model>,
}

impl Harness {
    /// Asks the default request. Returns the answer and its streamed text.
    pub async fn ask(&self) -> (Result<ModelAnswer, Error>, String) {
        self.ask_with(request()).await
    }

    pub async fn ask_with(&self, request: ModelRequest) -> (Result<ModelAnswer, Error>, String) {
        let mut streamed = String::new();
        let answer = self.model.ask(request, &mut |delta| streamed.push_str(delta)).await;
        if let Ok(answer) = &answer {
            assert_eq!(answer.text, streamed);
        }
        if let Err(error) = &answer {
            assert!(!format!("{error} {error:?}").contains(KEY), "{error}");
        }
        (answer, streamed)
    }
}

/// Starts a server that returns these responses at a path, and the model that uses it.
pub async fn start(
    path: &str,
    answers: impl IntoIterator<Item = Canned>,
    model: impl FnOnce(Url) -> Arc<dyn Model>,
) -> Harness {
    let (server, address) = Server::start(path, answers).await;
    Harness { server, model: model(Url::parse(&format!("http://{address}/")).unwrap()) }
}

/// Maximum length of a stream that is cut at every byte. Some streams are long on purpose.
const CUT_BYTES: usize = 4096;

/// Asks a model whose server returns this response. If it is a stream, it is also cut at every byte: what is left of it is
/// retried, or it has the same outcome as the whole stream.
pub async fn ask_and_cut(
    canned: Canned,
    start: impl AsyncFn(Vec<Canned>) -> Harness,
) -> Result<ModelAnswer, Error> {
    let whole = start(vec![canned.clone()]).await.ask().await.0;
    let stream = &canned.body;
    let is_stream = ["data:", "event:"].iter().any(|field| stream.starts_with(field.as_bytes()));
    if canned.status != 200 || !is_stream || stream.len() > CUT_BYTES {
        return whole;
    }
    let harness = start((0..stream.len()).map(|cut| events_of(&stream[..cut])).collect()).await;
    for cut in 0..stream.len() {
        let answer = harness.ask().await.0;
        let is_same = match (&answer, &whole) {
            (Ok(answer), Ok(whole)) => (&answer.text, &answer.calls) == (&whole.text, &whole.calls),
            (Err(error), Err(whole)) => std::mem::discriminant(error) == std::mem::discriminant(whole),
            _ => false,
        };
        let is_retried = matches!(answer, Err(Error::Retry { .. }));
        assert!(is_same || is_retried, "cut at {cut}: {answer:?} instead of {whole:?}");
    }
    whole
}

pub fn request() -> ModelRequest {
    let entries = vec![Entry { at: Timestamp(0), item: Item::user("hi") }];
    let schema = InputSchema::new(json!({"type": "object"})).unwrap();
    let tools = ["read", LONG_NAME].map(|name| OfferedTool {
        name: name.into(),
        description: "does it".into(),
        schema: schema.clone(),
    });
    ModelRequest {
        system: "be good".into(),
        entries,
        tools: tools.into(),
        turn: 7,
        images: true,
        spent: Spent::default(),
        memory: AnswerMemory::default(),
    }
}

/// Returns id, name and arguments of each call.
pub fn call_fields(answer: &ModelAnswer) -> Vec<(&str, &str, Value)> {
    let arguments = |arguments: &Result<_, String>| match arguments {
        Ok(map) => Value::Object(serde_json::Map::clone(map)),
        Err(raw) => json!({"unusable": raw}),
    };
    answer.calls.iter().map(|call| (&*call.id, &*call.name, arguments(&call.arguments))).collect()
}

/// Returns responses with status 200 that are not answers of a model, and the expected error of each.
pub fn non_answers() -> Vec<(Canned, String)> {
    let typed = |kind: &'static str, body: &str| Canned { content_type: Some(kind), ..ok(body) };
    let page = "\r\n<!DOCTYPE html>\n<html><title>Hello</title></html>";
    let page_begin = "<!DOCTYPE html> <html><title>Hello</title></html>";
    let (long, long_begin) = (format!("<p>{}", "x".repeat(5_000_000)), format!("<p>{}…", "x".repeat(77)));
    let key_at_the_end = format!("<p>{} {KEY}", "x".repeat(70));
    let hidden = format!("<p>{} [key]", "x".repeat(70));
    let begins = |kind: &str, begin: &str| format!("200 {kind}, not with an answer (it begins `{begin}`)");
    let empty = |kind: &str| format!("200 with an empty body{kind}, not with an answer");
    let table = [
        (typed("text/html; charset=utf-8", page), begins("with text/html", page_begin)),
        (typed("text/html", &long), begins("with text/html", &long_begin)),
        (typed("text/plain", &key_at_the_end), begins("with text/plain", &hidden)),
        (ok(page), begins("without a content type", page_begin)),
        (Canned { breaks: true, ..ok(page) }, begins("without a content type", page_begin)),
        (typed("text/plain", "\x1b[2JOK\0\n"), begins("with text/plain", "[2JOK")),
        (typed("text/html", ""), empty(" (text/html)")),
        (ok(" \r\n"), empty("")),
        (ok(""), empty("")),
    ];
    let expected =
        |(canned, what)| (canned, format!("the model's server answered {what}; check model.base_url"));
    table.into_iter().map(expected).collect()
}
