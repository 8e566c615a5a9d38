//! Health of tool servers: what discovery and invocations have shown since this process started. No request is sent to
//! find it out.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use rap_api::HealthState;
use rap_protocol::Timestamp;

use super::Toolsets;
use crate::settings::ToolServer;
use crate::tool_server::ServerState;

/// Outcomes of requests, by server.
#[derive(Default)]
pub(super) struct Outcomes(Mutex<HashMap<String, ServerOutcomes>>);

/// Outcomes of the requests to a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServerOutcomes {
    pub(crate) success_at: Option<Timestamp>,
    pub(crate) failure: Option<(Timestamp, String)>,
    /// Time at which an invocation that failed is sent again. It may have passed.
    pub(crate) retry_at: Option<Timestamp>,
    /// True if the last request failed.
    pub(crate) is_failing: bool,
}

impl Toolsets {
    /// Notes that a server has accepted a request.
    pub(crate) fn note_success(&self, server: &str) {
        let at = self.world.now();
        self.change(server, |outcomes| {
            outcomes.success_at = Some(at);
            outcomes.retry_at = None;
            outcomes.is_failing = false;
        });
    }

    /// Notes that a server has failed or refused a request, and when the request is sent again.
    pub(crate) fn note_failure(&self, server: &str, why: &str, retry_at: Option<Timestamp>) {
        let at = self.world.now();
        self.change(server, |outcomes| {
            outcomes.failure = Some((at, why.to_owned()));
            outcomes.retry_at = retry_at;
            outcomes.is_failing = true;
        });
    }

    fn change(&self, server: &str, change: impl FnOnce(&mut ServerOutcomes)) {
        // Requests to servers that are no longer configured are of no interest, so the map is bounded.
        if self.server(server).is_some() {
            let mut all = self.outcomes.0.lock().unwrap_or_else(PoisonError::into_inner);
            change(all.entry(server.to_owned()).or_default());
        }
    }

    fn server(&self, url: &str) -> Option<&ToolServer> {
        self.servers.iter().find(|server| server.url == url)
    }

    /// Returns the health of a server, and the outcomes of the requests to it.
    pub(crate) fn health(&self, server: &str) -> (HealthState, ServerOutcomes) {
        let process = self.server(server).and_then(ToolServer::process_state);
        let all = self.outcomes.0.lock().unwrap_or_else(PoisonError::into_inner);
        let outcomes = all.get(server).cloned().unwrap_or_default();
        let state = match process {
            Some(ServerState::Starting) => HealthState::Starting,
            Some(ServerState::Failed(_)) => HealthState::Stopped,
            _ if outcomes.is_failing => HealthState::Failing,
            _ if outcomes.success_at.is_some() => HealthState::Ok,
            _ => HealthState::NotAsked,
        };
        (state, outcomes)
    }
}
