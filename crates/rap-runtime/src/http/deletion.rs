//! Deletes closed sessions.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::{Extension, Json};
use rap_api::{Prune, Pruned};

use super::api::{Accepted, DONE, read, thread_id};
use super::principal::Principal;
use super::{ErrorResponse, PathParams};
use crate::engine::Engine;
use crate::store::Expiry;

pub(super) async fn delete(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
) -> Accepted {
    engine.delete_session(&thread_id(id)?, &principal.visible).await?;
    Ok(DONE)
}

/// Deletes sessions that have been closed for a time, or counts them.
pub(super) async fn prune(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    headers: HeaderMap,
    request: Body,
) -> Accepted<Pruned> {
    let (Prune { closed_for, dry_run }, _) = read(&engine, principal.sender(), &headers, request).await?;
    let closed_for = closed_for.map(|seconds| Duration::from_secs(seconds.into()));
    let closed_for = closed_for.or(engine.settings.retention).ok_or_else(|| {
        let message = "set closed_for to a number of seconds (rap prune: --closed-for 30d), because retention.closed_threads is \"never\"";
        ErrorResponse::new(StatusCode::CONFLICT, "no_retention", message)
    })?;
    let expiry = if dry_run { Expiry::Count } else { Expiry::Delete };
    let sessions = engine.expire_sessions(closed_for, expiry).await?;
    Ok((StatusCode::ACCEPTED, Json(Pruned { sessions })))
}
