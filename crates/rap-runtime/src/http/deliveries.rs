//! The ledger of deliveries in the API.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

use super::api::{Accepted, DONE, Parameters};
use super::json::Time;
use super::query::{self, Given};
use super::{InPath, Refused};
use crate::engine::Engine;
use crate::store::{self, DeliveryFilter, DeliveryKind, DeliveryOutcome, Redelivery};

/// A delivery that did not succeed at its first attempt.
#[derive(Serialize, JsonSchema)]
pub(super) struct Delivery {
    /// Its id.
    id: String,
    kind: DeliveryKind,
    /// The thread that it is about, if that is known.
    thread_id: Option<String>,
    /// The call that it is about, if it is about one.
    call_id: Option<String>,
    /// The base URL of the tool server, where it goes to one.
    server: Option<String>,
    /// Which notification it is, or the code of the refusal.
    topic: Option<String>,
    outcome: DeliveryOutcome,
    /// How often it was tried.
    attempts: u32,
    /// How the last attempt ended.
    detail: String,
    /// When the first attempt that failed ended.
    first_at: Time,
    /// When the last attempt ended.
    last_at: Time,
    /// When it is tried again.
    next_at: Option<Time>,
}

impl From<store::Delivery> for Delivery {
    fn from(row: store::Delivery) -> Delivery {
        let topic =
            matches!(row.kind, DeliveryKind::Notification | DeliveryKind::Callback).then_some(row.topic);
        Delivery {
            id: row.id,
            kind: row.kind,
            thread_id: row.thread.map(|thread| thread.as_str().to_owned()),
            call_id: row.call,
            server: row.server,
            topic,
            outcome: row.outcome,
            attempts: row.attempts,
            detail: row.detail,
            first_at: row.first_at.into(),
            last_at: row.last_at.into(),
            next_at: row.next_at.filter(|_| row.outcome == DeliveryOutcome::Retrying).map(Time::from),
        }
    }
}

/// A page of the ledger, the newest first.
#[derive(Serialize, JsonSchema)]
pub(super) struct Deliveries {
    deliveries: Vec<Delivery>,
    /// Where the next page begins.
    next_cursor: Option<String>,
}

pub(super) async fn deliveries(
    State(engine): State<Arc<Engine>>,
    Query(parameters): Parameters,
) -> Result<Json<Deliveries>, Refused> {
    let given = Given::check(parameters, query::OF_DELIVERIES)?;
    let filter = DeliveryFilter {
        thread: given.thread("thread")?,
        outcome: given.one_of("outcome", &DeliveryOutcome::ALL, DeliveryOutcome::as_str)?,
        before: given.place("cursor")?,
        limit: given.rows()?,
    };
    let page = engine.store.deliveries(filter).await?;
    let next_cursor = page.next.map(|cursor| cursor.to_string());
    Ok(Json(Deliveries { deliveries: page.rows.into_iter().map(Delivery::from).collect(), next_cursor }))
}

fn none() -> Refused {
    Refused::new(StatusCode::NOT_FOUND, "no_such_delivery", "the ledger has no such delivery, or no longer")
}

pub(super) async fn delivery(
    State(engine): State<Arc<Engine>>,
    InPath(id): InPath<String>,
) -> Result<Json<Delivery>, Refused> {
    Ok(Json(engine.store.delivery(&id).await?.ok_or_else(none)?.into()))
}

/// An invocation that waits to be tried again is tried at once. What was given up has settled its call with an error
/// result, which the model has seen; a message to the thread lets it call again.
pub(super) async fn redeliver(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Accepted {
    let conflict = |code, message| Err(Refused::new(StatusCode::CONFLICT, code, message));
    match engine.store.redeliver(&id, engine.now()).await? {
        Redelivery::Due => {
            engine.look_now();
            Ok(DONE)
        }
        Redelivery::NoSuchDelivery => Err(none()),
        Redelivery::NotAnInvocation => conflict(
            "not_redeliverable",
            "only invocations can be delivered again: notifications go out once, answers are retried by themselves, \
             and callbacks are for their tool to repeat",
        ),
        Redelivery::AlreadyDelivered => {
            conflict("already_delivered", "the tool server has taken the call; cancel the call to end it")
        }
        Redelivery::CallSettled => conflict(
            "call_settled",
            "the call is no longer open, and has its result; send the thread a message to have it call again",
        ),
    }
}
