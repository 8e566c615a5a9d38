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
use crate::store::{DeliveryFilter, DeliveryRow, Fate, Kind, Redelivery, now};

/// A delivery that did not succeed at its first attempt.
#[derive(Serialize, JsonSchema)]
pub(super) struct Delivery {
    /// Its id.
    id: String,
    kind: Kind,
    /// The thread that it is about, if that is known.
    thread_id: Option<String>,
    /// The call that it is about, if it is about one.
    call_id: Option<String>,
    /// The base URL of the tool server, where it goes to one.
    server: Option<String>,
    /// Which notification it is, or the code of the refusal.
    topic: Option<String>,
    outcome: Fate,
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

impl From<DeliveryRow> for Delivery {
    fn from(row: DeliveryRow) -> Delivery {
        let topic = matches!(row.kind, Kind::Notification | Kind::Callback).then_some(row.topic);
        Delivery {
            id: row.no.to_string(),
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
            next_at: row.next_at.filter(|_| row.outcome == Fate::Retrying).map(Time::from),
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
    let limit = given.rows()?;
    let filter = DeliveryFilter {
        thread: given.thread("thread")?,
        outcome: given.one_of("outcome", &Fate::ALL, Fate::as_str)?,
        before: given.place::<u32>("cursor")?.map(i64::from),
        limit: limit + 1,
    };
    let mut found = engine.store.deliveries(filter).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    let next_cursor = found.last().filter(|_| more).map(|row| row.no.to_string());
    Ok(Json(Deliveries { deliveries: found.into_iter().map(Delivery::from).collect(), next_cursor }))
}

fn none() -> Refused {
    Refused::new(StatusCode::NOT_FOUND, "no_such_delivery", "the ledger has no such delivery, or no longer")
}

pub(super) async fn delivery(
    State(engine): State<Arc<Engine>>,
    InPath(id): InPath<String>,
) -> Result<Json<Delivery>, Refused> {
    let no = id.parse().map_err(|_| none())?;
    Ok(Json(engine.store.delivery(no).await?.ok_or_else(none)?.into()))
}

/// An invocation that waits to be tried again is tried at once. What was given up has settled its call with an error
/// result, which the model has seen; a message to the thread lets it call again.
pub(super) async fn redeliver(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Accepted {
    let no = id.parse().map_err(|_| none())?;
    let conflict = |code, message| Err(Refused::new(StatusCode::CONFLICT, code, message));
    match engine.store.redeliver(no, now()).await? {
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
