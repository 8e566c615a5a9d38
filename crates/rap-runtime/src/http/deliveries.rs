//! API of the delivery log.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use rap_api::{Deliveries, Delivery, DeliveryAttempt, DeliveryKind, DeliveryOutcome};

use super::api::{Accepted, DONE, Parameters};
use super::json::time;
use super::principal::Principal;
use super::query::{self, QueryParams};
use super::{ErrorResponse, PathParams};
use crate::engine::Engine;
use crate::store::{self, DeliveryFilter, Redelivery};

impl From<store::Delivery> for Delivery {
    fn from(row: store::Delivery) -> Delivery {
        let topic = matches!(row.kind, DeliveryKind::Notification | DeliveryKind::Callback)
            .then_some(row.topic.clone());
        // The number after the state only tells two alerts apart.
        let state = || row.topic.split(' ').next().unwrap_or_default().to_owned();
        let topic = topic.or_else(|| (row.kind == DeliveryKind::Alert).then(state));
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
            last_attempts: Vec::new(),
            first_at: time(row.first_at),
            last_at: time(row.last_at),
            next_at: row.next_at.filter(|_| row.outcome == DeliveryOutcome::Retrying).map(time),
        }
    }
}

pub(super) async fn deliveries(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    Query(parameters): Parameters,
) -> Result<Json<Deliveries>, ErrorResponse> {
    let params = QueryParams::check(parameters, query::DELIVERY_PARAMETERS)?;
    let filter = DeliveryFilter {
        thread: params.thread("thread")?,
        outcome: params.one_of("outcome", &DeliveryOutcome::ALL, DeliveryOutcome::as_str)?,
        visible: principal.visible,
        before: params.parsed("cursor")?,
        limit: params.rows()?,
    };
    let page = engine.store.deliveries(filter).await?;
    let next_cursor = page.next.map(|cursor| cursor.to_string());
    Ok(Json(Deliveries { deliveries: page.rows.into_iter().map(Delivery::from).collect(), next_cursor }))
}

fn not_found() -> ErrorResponse {
    ErrorResponse::new(
        StatusCode::NOT_FOUND,
        "no_such_delivery",
        "no such delivery; old ones are removed after a while",
    )
}

pub(super) async fn delivery(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
) -> Result<Json<Delivery>, ErrorResponse> {
    let mut row = engine.store.delivery(&id, &principal.visible).await?.ok_or_else(not_found)?;
    let attempt =
        |attempt: store::DeliveryAttempt| DeliveryAttempt { at: time(attempt.at), detail: attempt.detail };
    let last_attempts = std::mem::take(&mut row.last_attempts).into_iter().map(attempt).collect();
    Ok(Json(Delivery { last_attempts, ..row.into() }))
}

/// Sends an invocation that waits for a retry at once. An invocation that was given up cannot be sent again: its call
/// is settled with an error result that the model has seen. A message to the thread lets the model call again.
pub(super) async fn redeliver(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
) -> Accepted {
    let conflict = |code, message| Err(ErrorResponse::new(StatusCode::CONFLICT, code, message));
    match engine.store.redeliver(&id, &principal.visible, engine.now()).await? {
        Redelivery::Due => {
            engine.wake_clock();
            Ok(DONE)
        }
        Redelivery::NoSuchDelivery => Err(not_found()),
        Redelivery::NotAnInvocation => conflict(
            "not_redeliverable",
            "only invocations can be delivered again: notifications are sent once, answers are retried automatically, \
             and callbacks are repeated by their tool",
        ),
        Redelivery::AlreadyDelivered => {
            conflict("already_delivered", "the tool server has accepted the call; cancel the call to end it")
        }
        Redelivery::CallSettled => conflict(
            "call_settled",
            "the call already has its result; send the thread a message so that it calls again",
        ),
    }
}
