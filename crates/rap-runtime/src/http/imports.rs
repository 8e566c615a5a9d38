//! API that receives sessions from another runtime. Only administrators reach it.
//!
//! Records arrive in pages and become a parcel. Nothing of it is in use until it is started. Every request can be repeated.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::{Extension, Json};
use rap_api::{ArrivedSession, Destination, Migrate, Move, StartSession};
use rap_protocol::ThreadId;

use super::admission::Sender;
use super::api::{Accepted, ApiResult, DONE, Parameters, read};
use super::principal::Principal;
use super::query::{QueryParams, RECORD_PARAMETERS};
use super::{ErrorResponse, PathParams, parse_body, read_body};
use crate::engine::{Engine, MoveRefused, read_arrival};
use crate::store::transfer::Record;
use crate::store::{self, Visibility};
use crate::transfer::{OpenCalls, TransferError};

impl From<TransferError> for ErrorResponse {
    fn from(error: TransferError) -> ErrorResponse {
        let message = error.to_string();
        match error {
            TransferError::Exists(_) => ErrorResponse::new(StatusCode::CONFLICT, "thread_exists", message),
            TransferError::OtherKey { .. } => ErrorResponse::new(StatusCode::CONFLICT, "other_key", message),
            TransferError::Line { .. } => ErrorResponse::invalid(message),
            TransferError::NoSession(_) => {
                ErrorResponse::new(StatusCode::NOT_FOUND, "no_such_thread", message)
            }
            TransferError::Open(_)
            | TransferError::Io(_)
            | TransferError::Store(_)
            | TransferError::Damaged { .. } => {
                ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", message)
            }
        }
    }
}

fn session_id(text: String) -> Result<ThreadId, ErrorResponse> {
    ThreadId::new(text).map_err(|error| ErrorResponse::invalid(format!("session: {error}")))
}

pub(super) async fn destination(State(engine): State<Arc<Engine>>) -> ApiResult<Destination> {
    Ok(Json(engine.as_destination().await?))
}

/// Takes a page of records, one on each line. The first page begins the parcel anew.
pub(super) async fn records(
    State(engine): State<Arc<Engine>>,
    PathParams(session): PathParams<String>,
    Query(parameters): Parameters,
    headers: HeaderMap,
    request: Body,
) -> Accepted {
    let session = session_id(session)?;
    let params = QueryParams::check(parameters, RECORD_PARAMETERS)?;
    let from: u64 = params.parsed::<u32>("from")?.unwrap_or(0).into();
    let received = read_body(&engine, Sender::Runtime, &headers, request).await?;
    let of = session.clone();
    let page = parse_body(&engine, &received, move |bytes| read_page(&of, from, bytes)).await?;
    if from == 0 {
        match engine.store.begin_parcel(&session).await {
            Err(store::Error::Exists) => return Err(TransferError::Exists(session.to_string()).into()),
            done => done?,
        }
    }
    engine.store.add_records(&session, from, page).await?;
    Ok(DONE)
}

/// Returns the records of a page, which are lines. All have to be of the session.
fn read_page(session: &ThreadId, from: u64, bytes: &[u8]) -> Result<Vec<String>, ErrorResponse> {
    let text = std::str::from_utf8(bytes).map_err(|_| ErrorResponse::invalid("the records are not UTF-8"))?;
    let mut page = Vec::new();
    for (line, text) in (from + 1..).zip(text.lines()) {
        let record =
            Record::read(text).map_err(|why| ErrorResponse::from(TransferError::Line { line, why }))?;
        if matches!(&record, Record::Session(header) if header.session != *session) {
            return Err(ErrorResponse::invalid("the records are of another session than the path"));
        }
        page.push(text.to_owned());
    }
    Ok(page)
}

/// Checks that the session is complete and can be started.
pub(super) async fn check(
    State(engine): State<Arc<Engine>>,
    PathParams(session): PathParams<String>,
) -> Accepted {
    let session = session_id(session)?;
    let arrival = read_arrival(&*engine.store, &session).await?;
    let arrival = arrival.ok_or_else(|| TransferError::NoSession(session.to_string()))?;
    arrival.check().await?;
    Ok(DONE)
}

/// Puts a session that has arrived into use. A repeat finds it in use.
pub(super) async fn start(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(session): PathParams<String>,
    headers: HeaderMap,
    request: Body,
) -> ApiResult<ArrivedSession> {
    let session = session_id(session)?;
    let (StartSession { end_calls }, _) = read(&engine, principal.sender(), &headers, request).await?;
    let open_calls = if end_calls { OpenCalls::End } else { OpenCalls::Keep };
    let Some(arrival) = read_arrival(&*engine.store, &session).await? else {
        // It may have been deleted since it was started.
        if !engine.moves.has_arrived(&session) {
            engine.store.thread(&session, &Visibility::All).await?;
        }
        return Ok(Json(ArrivedSession { open_calls: 0, ended_calls: 0 }));
    };
    let imported = arrival.finish(&engine.origin, open_calls).await?;
    tracing::info!(target: "rap::audit", %session, "a session was moved here");
    engine.moves.note_arrival(session.clone());
    engine.resume_all().await;
    Ok(Json(ArrivedSession { open_calls: imported.open_calls, ended_calls: imported.ended_calls }))
}

/// Discards a session that has arrived and was not started.
pub(super) async fn discard(
    State(engine): State<Arc<Engine>>,
    PathParams(session): PathParams<String>,
) -> Accepted {
    let session = session_id(session)?;
    if engine.store.parcel_of(&session).await? == Some(store::transfer::ParcelState::Arriving) {
        engine.store.drop_parcel(&session).await?;
    }
    Ok(DONE)
}

/// Begins to move a session to another runtime.
pub(super) async fn migrate(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(session): PathParams<String>,
    headers: HeaderMap,
    request: Body,
) -> Accepted {
    let session = ThreadId::new(session).map_err(|_| store::Error::NoThread)?;
    let (request, _): (Migrate, _) = read(&engine, principal.sender(), &headers, request).await?;
    match engine.begin_move(session, request).await {
        Ok(()) => Ok(DONE),
        Err(MoveRefused::Store(error)) => Err(error.into()),
        Err(MoveRefused::Invalid(why)) => Err(ErrorResponse::invalid(why)),
        Err(MoveRefused::Busy) => {
            let message = "the session is being moved, or too many sessions are; try again later";
            Err(ErrorResponse::new(StatusCode::CONFLICT, "moving", message))
        }
    }
}

/// Returns the state of the last move of a session.
pub(super) async fn last_move(
    State(engine): State<Arc<Engine>>,
    PathParams(session): PathParams<String>,
) -> ApiResult<Move> {
    let session = ThreadId::new(session).map_err(|_| store::Error::NoThread)?;
    match engine.moves.get(&session) {
        Some(found) => Ok(Json(found)),
        None => {
            let message = "this session was not moved since the runtime was started";
            Err(ErrorResponse::new(StatusCode::NOT_FOUND, "no_such_move", message))
        }
    }
}
