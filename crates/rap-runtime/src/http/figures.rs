//! Statistics of all agents, for the overview in the web interface.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::{Extension, Json};
use rap_agent::Status;
use rap_api::{AgentFigures, Cost, Figures, FiguresPoint};
use rap_protocol::Timestamp;

use super::api::{ApiResult, Parameters};
use super::json::time;
use super::principal::Principal;
use super::query::{FIGURES_PARAMETERS, QueryParams};
use crate::engine::Engine;
use crate::store::FiguresRow;

const HOUR: i64 = 3_600_000;
/// Maximum number of intervals that the requested time is divided into.
const POINTS: i64 = 31;
/// Possible lengths of an interval, in hours.
const STEPS: [i64; 6] = [1, 3, 6, 12, 24, 72];

/// A client that sees one user's threads gets their number, and no figures of agents.
pub(super) async fn figures(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    Query(parameters): Parameters,
) -> ApiResult<Figures> {
    let hours = i64::from(QueryParams::check(parameters, FIGURES_PARAMETERS)?.hours()?);
    let step = STEPS.into_iter().find(|step| hours / step <= POINTS).unwrap_or(STEPS[5]) * HOUR;
    let now = engine.now().0;
    let last = now - now.rem_euclid(step);
    let first = last - (hours * HOUR / step - 1).max(0) * step;
    let times = (0..).map(|number| first + number * step).take_while(|at| *at <= last);
    let times = times.map(|at| time(Timestamp(at))).collect();
    let mut threads: BTreeMap<String, i64> =
        Status::ALL.into_iter().map(|status| (status.as_str().to_owned(), 0)).collect();
    let (mut waiting, mut agents) = (BTreeMap::new(), Vec::new());
    match principal.visible.user() {
        Some(user) => threads.extend(engine.store.statuses(user).await?),
        None => {
            let counts = engine.store.counts().await?;
            threads.extend(counts.threads.map(|(status, count)| (status.to_owned(), count)));
            waiting.extend(counts.waiting.into_iter().map(|(kind, count)| (kind.to_owned(), count)));
            agents = by_agent(engine.store.figures(Timestamp(first), step).await?);
        }
    }
    let step_seconds = Duration::from_millis(step.unsigned_abs()).as_secs();
    Ok(Json(Figures { threads, waiting, step_seconds, times, agents }))
}

fn by_agent(rows: Vec<FiguresRow>) -> Vec<AgentFigures> {
    let mut agents: Vec<AgentFigures> = Vec::new();
    for FiguresRow { at, agent, figures } in rows {
        let point = FiguresPoint {
            at: time(at),
            wakes: figures.wakes,
            turns: figures.turns,
            failures: figures.failures,
            model_ms: figures.model_ms,
            input: figures.input,
            output: figures.output,
            cached: figures.cached,
            cost: Cost::from_nanos(figures.cost),
        };
        match agents.last_mut() {
            Some(last) if last.agent == agent => last.points.push(point),
            _ => agents.push(AgentFigures { agent, points: vec![point] }),
        }
    }
    agents
}
