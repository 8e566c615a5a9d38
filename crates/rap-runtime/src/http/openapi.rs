//! The operations of the API: which path is served by what, and `/openapi.json`, which describes them. Both come from one
//! list, so that nothing is served that is not described.

use std::sync::Arc;

use axum::extract::State;
use axum::handler::Handler;
use axum::routing::{self, MethodRouter};
use axum::{Json, Router};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::api::{Choose, CreateThread, Fork, Say};
use super::json::{
    Calls, Done, Entries, Inbox, Problem, Subscriptions, Thread, Threads, Timers, Tools, Turn, Views,
};
use super::query::{OF_DELIVERIES, OF_HISTORY, OF_LISTINGS, OF_THREADS, Parameter};
use super::{api, deliveries, stream};
use crate::engine::Engine;
use crate::settings::Settings;

const IDEMPOTENCY_KEY: Parameter = Parameter {
    name: "Idempotency-Key",
    about: "Makes a repeat of the request harmless.",
    schema: || json!({"type": "string", "maxLength": api::KEY_BYTES, "pattern": "^[!-~]([ -~]*[!-~])?$"}),
};
const LAST_EVENT_ID: Parameter = Parameter {
    name: "Last-Event-ID",
    about: "The id of the last entry event that was seen.",
    schema: || json!({"type": "integer", "minimum": 0, "maximum": u32::MAX}),
};

type Describe = fn(&mut SchemaGenerator) -> Schema;

/// Who may ask.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Clients,
    Everybody,
}

/// What an answer is.
enum Media {
    Json(Describe),
    Text,
    Events,
}

/// Something that a client can ask for.
pub(super) struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    handler: MethodRouter<Arc<Engine>>,
    access: Access,
    query: &'static [Parameter],
    headers: &'static [Parameter],
    body: Option<Describe>,
    answer: (u16, Media),
    conflicts: bool,
}

fn get<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, Arc<Engine>>,
    summary: &'static str,
) -> Operation {
    Operation::new("get", path, routing::get(handler), summary)
}

fn post<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, Arc<Engine>>,
    summary: &'static str,
) -> Operation {
    Operation::new("post", path, routing::post(handler), summary)
}

impl Operation {
    fn new(
        method: &'static str,
        path: &'static str,
        handler: MethodRouter<Arc<Engine>>,
        summary: &'static str,
    ) -> Operation {
        let answer = (200, Media::Text);
        Operation {
            method,
            path,
            summary,
            handler,
            access: Access::Clients,
            query: &[],
            headers: &[],
            body: None,
            answer,
            conflicts: false,
        }
    }

    fn for_everybody(self) -> Operation {
        Operation { access: Access::Everybody, ..self }
    }

    fn query(self, query: &'static [Parameter]) -> Operation {
        Operation { query, ..self }
    }

    fn headers(self, headers: &'static [Parameter]) -> Operation {
        Operation { headers, ..self }
    }

    fn takes<T: JsonSchema>(self) -> Operation {
        Operation { body: Some(|generator| generator.subschema_for::<T>()), ..self }
    }

    fn gives<T: JsonSchema>(self, status: u16) -> Operation {
        let describe: Describe = |generator| generator.subschema_for::<T>();
        Operation { answer: (status, Media::Json(describe)), ..self }
    }

    fn streams(self) -> Operation {
        Operation { answer: (200, Media::Events), ..self }
    }

    /// It may be refused with 409.
    fn conflicts(self) -> Operation {
        Operation { conflicts: true, ..self }
    }
}

fn operations() -> Vec<Operation> {
    vec![
        post("/v1/threads", api::create_thread, "Make a thread, and say something in it.")
            .headers(&[IDEMPOTENCY_KEY])
            .takes::<CreateThread>()
            .gives::<Thread>(201)
            .conflicts(),
        get("/v1/threads", api::threads, "List threads.").query(OF_THREADS).gives::<Threads>(200),
        get("/v1/threads/{id}", api::thread, "One thread.").gives::<Thread>(200),
        post("/v1/threads/{id}/messages", api::message, "Say something to an agent.")
            .headers(&[IDEMPOTENCY_KEY])
            .takes::<Say>()
            .gives::<Turn>(202)
            .conflicts(),
        get("/v1/threads/{id}/history", api::history, "The entries of a thread, in order.")
            .query(OF_HISTORY)
            .gives::<Entries>(200),
        get("/v1/threads/{id}/events", stream::thread_events, "What happens in a thread.")
            .headers(&[LAST_EVENT_ID])
            .streams(),
        post("/v1/threads/{id}/interrupt", api::interrupt, "Stop what an agent does.")
            .gives::<Done>(202)
            .conflicts(),
        post("/v1/threads/{id}/close", api::close, "Close a thread and its descendants.").gives::<Done>(202),
        post("/v1/threads/{id}/fork", api::fork, "Make a thread that begins with a part of another one.")
            .headers(&[IDEMPOTENCY_KEY])
            .takes::<Fork>()
            .gives::<Thread>(201)
            .conflicts(),
        post("/v1/threads/{id}/resume", api::resume, "Let a thread go on that has failed or is paused.")
            .gives::<Done>(202)
            .conflicts(),
        post("/v1/threads/{id}/calls/{call_id}/cancel", api::cancel, "Cancel a call or a subscription.")
            .gives::<Done>(202)
            .conflicts(),
        post("/v1/threads/{id}/calls/{call_id}/choice", api::choice, "Answer a question.")
            .takes::<Choose>()
            .gives::<Done>(202)
            .conflicts(),
        get("/v1/threads/{id}/views", api::views, "The latest view of each type.").gives::<Views>(200),
        get("/v1/events", stream::all_events, "What happens in all threads.").streams(),
        get("/v1/calls", api::calls, "Open calls.").query(OF_LISTINGS).gives::<Calls>(200),
        get("/v1/subscriptions", api::subscriptions, "Active subscriptions.")
            .query(OF_LISTINGS)
            .gives::<Subscriptions>(200),
        get("/v1/timers", api::timers, "What happens at a time by itself.")
            .query(OF_LISTINGS)
            .gives::<Timers>(200),
        get("/v1/inbox", api::inbox, "Every question that waits for a person.")
            .query(OF_LISTINGS)
            .gives::<Inbox>(200),
        get("/v1/deliveries", deliveries::deliveries, "What was refused, retried or given up.")
            .query(OF_DELIVERIES)
            .gives::<deliveries::Deliveries>(200),
        get("/v1/deliveries/{id}", deliveries::delivery, "One delivery.").gives::<deliveries::Delivery>(200),
        post("/v1/deliveries/{id}/redeliver", deliveries::redeliver, "Send an invocation again, at once.")
            .gives::<Done>(202)
            .conflicts(),
        get("/v1/tools", api::tools, "The tool servers, and what they offer.").gives::<Tools>(200),
        get("/healthz", async || "ok", "Whether the process serves requests.").for_everybody(),
        get("/readyz", api::ready, "Whether the database can be read.").for_everybody(),
        get("/metrics", api::metrics, "Metrics for Prometheus.").for_everybody(),
        get("/openapi.json", openapi, "This description.").for_everybody().gives::<Map<String, Value>>(200),
    ]
}

/// The router of those that need a token, and of those that do not.
pub(super) fn routers() -> (Router<Arc<Engine>>, Router<Arc<Engine>>) {
    let mut routers = (Router::new(), Router::new());
    for Operation { path, handler, access, .. } in operations() {
        match access {
            Access::Clients => routers.0 = routers.0.route(path, handler),
            Access::Everybody => routers.1 = routers.1.route(path, handler),
        }
    }
    routers
}

async fn openapi(State(engine): State<Arc<Engine>>) -> Json<Value> {
    Json(document(&engine.settings))
}

/// The description of the API as it is configured: with tokens or without, and with these agents.
fn document(settings: &Settings) -> Value {
    let without_tokens = settings.tokens.is_empty();
    let at_components = |settings: &mut SchemaSettings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    };
    let mut given = SchemaSettings::draft2020_12().for_deserialize().with(at_components).into_generator();
    let mut answers = SchemaSettings::draft2020_12().for_serialize().with(at_components).into_generator();
    let mut paths: Map<String, Value> = Map::new();
    for operation in operations() {
        let described = operation.describe(without_tokens, &mut given, &mut answers);
        paths.entry(operation.path).or_insert_with(|| json!({}))[operation.method] = described;
    }
    let mut schemas = given.take_definitions(true);
    schemas.extend(answers.take_definitions(true));
    let agents = settings.agents.iter().map(|agent| json!(agent.name)).chain([Value::Null]);
    schemas[&*CreateThread::schema_name()]["properties"]["agent"]["enum"] = agents.collect();
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "rap",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The client API of a runtime for the Reactive Agent Protocol.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    });
    if !without_tokens {
        document["components"]["securitySchemes"] = json!({"bearer": {"type": "http", "scheme": "bearer"}});
    }
    document
}

impl Operation {
    fn describe(
        &self,
        without_tokens: bool,
        given: &mut SchemaGenerator,
        answers: &mut SchemaGenerator,
    ) -> Value {
        let problem = answers.subschema_for::<Problem>();
        let mut responses = Map::new();
        for (status, about) in self.refusals(without_tokens) {
            let content = json!({"application/json": {"schema": problem}});
            responses.insert(status.to_string(), json!({"description": about, "content": content}));
        }
        let (status, media) = &self.answer;
        let content = match media {
            Media::Json(describe) => json!({"application/json": {"schema": describe(answers)}}),
            Media::Text => json!({"text/plain": {"schema": {"type": "string"}}}),
            Media::Events => json!({"text/event-stream": {"schema": {"type": "string"}}}),
        };
        responses.insert(status.to_string(), json!({"description": "It is done.", "content": content}));
        let mut described =
            json!({"summary": self.summary, "parameters": self.parameters(), "responses": responses});
        if let Some(describe) = self.body {
            let content = json!({"application/json": {"schema": describe(given)}});
            described["requestBody"] = json!({"required": true, "content": content});
        }
        if self.access == Access::Clients && !without_tokens {
            described["security"] = json!([{"bearer": []}]);
        }
        described
    }

    fn parameters(&self) -> Vec<Value> {
        let in_path = self.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let in_path = in_path.map(|name| {
            json!({"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}})
        });
        let more = |place: &'static str| {
            move |parameter: &Parameter| {
                let Parameter { name, about, schema } = parameter;
                json!({"name": name, "in": place, "description": about, "schema": schema()})
            }
        };
        in_path
            .chain(self.query.iter().map(more("query")))
            .chain(self.headers.iter().map(more("header")))
            .collect()
    }

    /// The statuses that a request may be refused with, and what each means.
    fn refusals(&self, without_tokens: bool) -> Vec<(u16, &'static str)> {
        let for_clients = self.access == Access::Clients;
        let takes_something = !self.query.is_empty() || !self.headers.is_empty() || self.body.is_some();
        let table = [
            (400, "Something about the request is not as it should be.", takes_something),
            (401, "The request shows no token, or a wrong one.", for_clients && !without_tokens),
            (403, "The request comes from the page of another site.", for_clients && without_tokens),
            (404, "There is no such thing.", self.path.contains('{')),
            (409, "It can not be done as things are.", self.conflicts),
            (413, "The body is too large.", self.body.is_some()),
            (415, "The body is no JSON.", self.body.is_some()),
            (421, "The request is not for this machine.", for_clients && without_tokens),
            (500, "What is stored can not be read.", self.path != "/healthz"),
            (503, "Try again in a moment.", self.path != "/healthz"),
        ];
        table
            .into_iter()
            .filter(|(.., possible)| *possible)
            .map(|(status, about, _)| (status, about))
            .collect()
    }
}
