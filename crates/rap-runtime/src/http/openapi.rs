//! The operations of the API. The routes and `/openapi.json` are generated from one list, so that every route is
//! described.

use std::sync::{Arc, OnceLock};

use axum::body::Bytes;
use axum::extract::State;
use axum::handler::Handler;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::{self, MethodRouter};
use axum::{Extension, Router, middleware};
use rap_api::{
    Answer, ArrivedSession, Calls, CreateThread, CreateToken, CreatedToken, Deliveries, Delivery,
    Destination, Done, Entries, ErrorBody, Figures, Fork, Inbox, Migrate, Move, Nodes, Prune, Pruned,
    SendMessage, SessionUsage, StartSession, Subscriptions, Thread, Threads, Timers, TokenScope, Tokens,
    Tools, Turn, Views,
};
use rap_protocol::limits::CHOICES;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::query::{
    CURSOR_PARAMETERS, DELIVERY_PARAMETERS, FIGURES_PARAMETERS, HISTORY_PARAMETERS, PAGE_PARAMETERS,
    Parameter, RECORD_PARAMETERS, THREAD_PARAMETERS,
};
use super::{api, deletion, deliveries, figures, guard, imports, stream, tokens};
use crate::engine::Engine;
use crate::model::scripted;
use crate::settings::Settings;

const IDEMPOTENCY_KEY: Parameter = Parameter {
    name: "Idempotency-Key",
    about: "Makes it safe to repeat the request.",
    schema: || json!({"type": "string", "maxLength": api::KEY_BYTES, "pattern": "^[!-~]([ -~]*[!-~])?$"}),
};
const LAST_EVENT_ID: Parameter = Parameter {
    name: "Last-Event-ID",
    about: "Id of the last entry event that the client received.",
    schema: || json!({"type": "integer", "minimum": 0, "maximum": u32::MAX}),
};

type Describe = fn(&mut SchemaGenerator) -> Schema;

/// Required authentication of an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    /// The scope that a client's token needs.
    Client(TokenScope),
    Public,
}

/// Content of a response.
enum Media {
    Json(Describe),
    Text,
    Events,
}

/// An operation of the API.
pub(super) struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    handler: MethodRouter<Arc<Engine>>,
    access: Access,
    query: &'static [Parameter],
    headers: &'static [Parameter],
    body: Option<Describe>,
    success: (u16, Media),
    conflicts: bool,
}

fn get<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, Arc<Engine>>,
    summary: &'static str,
) -> Operation {
    Operation::new("get", path, routing::get(handler), summary)
}

fn delete<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, Arc<Engine>>,
    summary: &'static str,
) -> Operation {
    Operation::new("delete", path, routing::delete(handler), summary)
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
        let success = (200, Media::Text);
        Operation {
            method,
            path,
            summary,
            handler,
            access: Access::Client(if method == "get" { TokenScope::Read } else { TokenScope::Write }),
            query: &[],
            headers: &[],
            body: None,
            success,
            conflicts: false,
        }
    }

    fn public(self) -> Operation {
        Operation { access: Access::Public, ..self }
    }

    /// Only administrators may use it.
    fn admin(self) -> Operation {
        Operation { access: Access::Client(TokenScope::Admin), ..self }
    }

    fn query(self, query: &'static [Parameter]) -> Operation {
        Operation { query, ..self }
    }

    fn headers(self, headers: &'static [Parameter]) -> Operation {
        Operation { headers, ..self }
    }

    fn request_body<T: JsonSchema>(self) -> Operation {
        Operation { body: Some(|generator| generator.subschema_for::<T>()), ..self }
    }

    fn response<T: JsonSchema>(self, status: u16) -> Operation {
        let describe: Describe = |generator| generator.subschema_for::<T>();
        Operation { success: (status, Media::Json(describe)), ..self }
    }

    fn event_stream(self) -> Operation {
        Operation { success: (200, Media::Events), ..self }
    }

    /// The operation may fail with 409.
    fn conflicts(self) -> Operation {
        Operation { conflicts: true, ..self }
    }
}

fn operations() -> impl Iterator<Item = Operation> {
    let parts = [of_threads(), of_listings(), of_administrators(), public_operations()];
    parts.into_iter().flatten()
}

/// Operations on one thread.
fn of_threads() -> Vec<Operation> {
    vec![
        post("/v1/threads", api::create_thread, "Create a thread, optionally with a first message.")
            .headers(&[IDEMPOTENCY_KEY])
            .request_body::<CreateThread>()
            .response::<Thread>(201)
            .conflicts(),
        get("/v1/threads", api::threads, "List threads.").query(THREAD_PARAMETERS).response::<Threads>(200),
        get("/v1/threads/{id}", api::thread, "Get a thread.").response::<Thread>(200),
        delete("/v1/threads/{id}", deletion::delete, "Delete a closed session.")
            .response::<Done>(202)
            .conflicts(),
        post("/v1/threads/{id}/messages", api::message, "Send a message to an agent.")
            .headers(&[IDEMPOTENCY_KEY])
            .request_body::<SendMessage>()
            .response::<Turn>(202)
            .conflicts(),
        get("/v1/threads/{id}/history", api::history, "List the entries of a thread, in order.")
            .query(HISTORY_PARAMETERS)
            .response::<Entries>(200),
        get("/v1/threads/{id}/events", stream::thread_events, "Stream the events of a thread.")
            .headers(&[LAST_EVENT_ID])
            .event_stream(),
        post("/v1/threads/{id}/interrupt", api::interrupt, "Interrupt an agent.")
            .response::<Done>(202)
            .conflicts(),
        post("/v1/threads/{id}/close", api::close, "Close a thread and its descendants.")
            .response::<Done>(202),
        post(
            "/v1/threads/{id}/fork",
            api::fork,
            "Create a thread that begins with the history of another one.",
        )
        .headers(&[IDEMPOTENCY_KEY])
        .request_body::<Fork>()
        .response::<Thread>(201)
        .conflicts(),
        post("/v1/threads/{id}/resume", api::resume, "Resume a failed or paused thread.")
            .response::<Done>(202)
            .conflicts(),
        post("/v1/threads/{id}/calls/{call_id}/cancel", api::cancel, "Cancel a call or a subscription.")
            .response::<Done>(202)
            .conflicts(),
        post("/v1/threads/{id}/calls/{call_id}/choice", api::choice, "Answer a question of a tool.")
            .request_body::<Answer>()
            .response::<Done>(202)
            .conflicts(),
        get("/v1/threads/{id}/views", api::views, "Get the latest view of each type.")
            .query(CURSOR_PARAMETERS)
            .response::<Views>(200),
        get("/v1/threads/{id}/usage", api::usage, "Get the tokens and costs of a thread and of its session.")
            .response::<SessionUsage>(200),
    ]
}

/// Operations on all threads, deliveries, tool servers and nodes.
fn of_listings() -> Vec<Operation> {
    vec![
        get("/v1/events", stream::all_events, "Stream the events of all threads.").event_stream(),
        get("/v1/calls", api::calls, "List open calls.").query(PAGE_PARAMETERS).response::<Calls>(200),
        get("/v1/subscriptions", api::subscriptions, "List active subscriptions.")
            .query(PAGE_PARAMETERS)
            .response::<Subscriptions>(200),
        get("/v1/timers", api::timers, "List timers.").query(PAGE_PARAMETERS).response::<Timers>(200),
        get("/v1/inbox", api::inbox, "List the questions that wait for a user.")
            .query(PAGE_PARAMETERS)
            .response::<Inbox>(200),
        get(
            "/v1/deliveries",
            deliveries::deliveries,
            "List deliveries that were refused, retried or given up.",
        )
        .query(DELIVERY_PARAMETERS)
        .response::<Deliveries>(200),
        get("/v1/deliveries/{id}", deliveries::delivery, "Get a delivery.").response::<Delivery>(200),
        post("/v1/deliveries/{id}/redeliver", deliveries::redeliver, "Retry an invocation at once.")
            .response::<Done>(202)
            .conflicts(),
        get("/v1/tools", api::tools, "List the tool servers and their tools.")
            .query(CURSOR_PARAMETERS)
            .response::<Tools>(200),
        get("/v1/figures", figures::figures, "Get statistics of all agents, now and over time.")
            .query(FIGURES_PARAMETERS)
            .response::<Figures>(200),
        get("/v1/nodes", api::nodes, "List the nodes that share the database.")
            .query(PAGE_PARAMETERS)
            .response::<Nodes>(200),
    ]
}

/// Operations that need an admin token.
fn of_administrators() -> Vec<Operation> {
    vec![
        post(
            "/v1/prune",
            deletion::prune,
            "Delete sessions that have been closed for a time, or count them.",
        )
        .admin()
        .request_body::<Prune>()
        .response::<Pruned>(202)
        .conflicts(),
        post("/v1/tokens", tokens::create, "Create a client token.")
            .admin()
            .request_body::<CreateToken>()
            .response::<CreatedToken>(201)
            .conflicts(),
        get("/v1/tokens", tokens::list, "List client tokens.")
            .admin()
            .query(PAGE_PARAMETERS)
            .response::<Tokens>(200),
        delete("/v1/tokens/{id}", tokens::revoke, "Revoke a client token.").admin().response::<Done>(200),
        post("/v1/threads/{id}/migrate", imports::migrate, "Move a session to another runtime.")
            .admin()
            .request_body::<Migrate>()
            .response::<Done>(202)
            .conflicts(),
        get("/v1/threads/{id}/move", imports::last_move, "Get the state of the last move of a session.")
            .admin()
            .response::<Move>(200),
        get("/v1/imports", imports::destination, "Describe this runtime to one that moves a session here.")
            .admin()
            .response::<Destination>(200),
        post("/v1/imports/{id}/records", imports::records, "Take a page of the records of a session.")
            .admin()
            .query(RECORD_PARAMETERS)
            .response::<Done>(202)
            .conflicts(),
        post("/v1/imports/{id}/check", imports::check, "Check that a session has arrived completely.")
            .admin()
            .response::<Done>(202)
            .conflicts(),
        post("/v1/imports/{id}/start", imports::start, "Put a session that has arrived into use.")
            .admin()
            .request_body::<StartSession>()
            .response::<ArrivedSession>(200)
            .conflicts(),
        post("/v1/imports/{id}/discard", imports::discard, "Discard a session that has arrived.")
            .admin()
            .response::<Done>(202),
    ]
}

/// Operations that need no token.
fn public_operations() -> Vec<Operation> {
    vec![
        get("/healthz", async || "ok", "Check that the process serves requests.").public(),
        get("/readyz", api::ready, "Check that the database can be read and written.").public(),
        get("/metrics", api::metrics, "Get metrics in the Prometheus text format.").public(),
        get("/openapi.json", openapi, "Get this description.").public().response::<Map<String, Value>>(200),
    ]
}

/// Returns the router of the operations that need a token, and the router of the public ones.
pub(super) fn routers() -> (Router<Arc<Engine>>, Router<Arc<Engine>>) {
    let mut routers = (Router::new(), Router::new());
    for Operation { path, handler, access, .. } in operations() {
        match access {
            Access::Client(scope) => {
                let require = move |request, next| guard::require_scope(scope, request, next);
                let handler = handler.route_layer(middleware::from_fn(require));
                routers.0 = routers.0.route(path, handler);
            }
            Access::Public => routers.1 = routers.1.route(path, handler),
        }
    }
    routers.1 = routers.1.layer(Extension(Description::default()));
    routers
}

/// The description as JSON. It is made at the first request, and once only, because that takes long and needs no token.
type Description = Arc<OnceLock<Bytes>>;

async fn openapi(
    State(engine): State<Arc<Engine>>,
    Extension(description): Extension<Description>,
) -> impl IntoResponse {
    let made = description.get_or_init(|| document(&engine.settings).to_string().into());
    ([(header::CONTENT_TYPE, "application/json")], made.clone())
}

/// Builds the description of the API for the configured tokens and agents.
fn document(settings: &Settings) -> Value {
    let without_tokens = settings.tokens.is_empty();
    let at_components = |settings: &mut SchemaSettings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    };
    let mut request_schemas =
        SchemaSettings::draft2020_12().for_deserialize().with(at_components).into_generator();
    let mut response_schemas =
        SchemaSettings::draft2020_12().for_serialize().with(at_components).into_generator();
    let mut paths: Map<String, Value> = Map::new();
    for operation in operations() {
        let described = operation.describe(settings, &mut request_schemas, &mut response_schemas);
        paths.entry(operation.path).or_insert_with(|| json!({}))[operation.method] = described;
    }
    let mut schemas = request_schemas.take_definitions(true);
    schemas.extend(response_schemas.take_definitions(true));
    let agents = settings.agents.iter().map(|agent| json!(agent.name)).chain([Value::Null]);
    schemas[&*CreateThread::schema_name()]["properties"]["agent"]["enum"] = agents.collect();
    schemas[&*Answer::schema_name()]["properties"]["selected"]["maximum"] = json!(CHOICES);
    let is_scripted = |name: &&str| settings.model_server(name) == scripted::PROVIDER.name;
    let scripted_agents = settings.agents.iter().map(|agent| agent.name.as_str()).filter(is_scripted);
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "rap",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The client API of a runtime for the Reactive Agent Protocol.",
            // Agents without a language model, so that a client can tell its user.
            "x-scripted-agents": scripted_agents.collect::<Vec<_>>(),
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
        settings: &Settings,
        request_schemas: &mut SchemaGenerator,
        response_schemas: &mut SchemaGenerator,
    ) -> Value {
        let without_tokens = settings.tokens.is_empty();
        let problem = response_schemas.subschema_for::<ErrorBody>();
        let mut responses = Map::new();
        for (status, about) in self.error_responses(settings) {
            let content = json!({"application/json": {"schema": problem}});
            responses.insert(status.to_string(), json!({"description": about, "content": content}));
        }
        let (status, media) = &self.success;
        let content = match media {
            Media::Json(describe) => json!({"application/json": {"schema": describe(response_schemas)}}),
            Media::Text => json!({"text/plain": {"schema": {"type": "string"}}}),
            Media::Events => json!({"text/event-stream": {"schema": {"type": "string"}}}),
        };
        responses.insert(status.to_string(), json!({"description": "Success.", "content": content}));
        let mut described =
            json!({"summary": self.summary, "parameters": self.parameters(), "responses": responses});
        if let Some(describe) = self.body {
            let content = json!({"application/json": {"schema": describe(request_schemas)}});
            described["requestBody"] = json!({"required": true, "content": content});
        }
        if let Access::Client(scope) = self.access
            && !without_tokens
        {
            described["security"] = json!([{"bearer": [scope]}]);
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

    /// Returns the statuses of error responses and their descriptions.
    fn error_responses(&self, settings: &Settings) -> Vec<(u16, &'static str)> {
        let without_tokens = settings.tokens.is_empty();
        let for_clients = self.access != Access::Public;
        let needs_local_host = if for_clients { without_tokens } else { settings.is_local_only() };
        let has_input = !self.query.is_empty() || !self.headers.is_empty() || self.body.is_some();
        let table = [
            (400, "The request is not valid.", has_input),
            (401, "The token is missing, wrong or revoked.", for_clients),
            (
                403,
                "The token does not permit the request. Without a token: the request comes from a page of another site, \
                 or from a runtime or tool server.",
                for_clients,
            ),
            (404, "Not found.", self.path.contains('{')),
            (409, "The request conflicts with the current state.", self.conflicts),
            (413, "The body is too large.", self.body.is_some()),
            (415, "The body is not JSON.", self.body.is_some()),
            (421, "The `Host` header is not local.", needs_local_host),
            (429, "Too many requests of this client; try again later.", for_clients),
            (500, "Stored data cannot be read.", self.path != "/healthz"),
            (503, "Temporarily unavailable; try again.", self.path != "/healthz"),
        ];
        table
            .into_iter()
            .filter(|(.., possible)| *possible)
            .map(|(status, about, _)| (status, about))
            .collect()
    }
}
