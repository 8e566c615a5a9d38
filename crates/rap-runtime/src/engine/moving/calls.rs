//! The open calls of a session that moves.

use std::collections::{HashMap, HashSet};

use rap_api::Destination;
use rap_protocol::{CallId, ThreadId};

use super::super::Engine;
use super::MoveFailed;
use super::peer::Peer;
use crate::store::ThreadKey;
use crate::store::transfer::{CALL, Record, TokenThread};

/// Calls whose first attempt was in progress when their session was stopped: they may have been sent.
pub(super) type InProgress = HashSet<(ThreadKey, CallId)>;

/// Open calls and subscriptions of tool servers in a parcel.
#[derive(Default)]
struct OpenCalls {
    /// Their results have to arrive at a URL that was sent.
    awaited: usize,
    /// They may have been sent, and their tool server has not confirmed that.
    unacknowledged: usize,
}

/// Marks the calls of records that may have been sent.
pub(super) struct Marker<'a> {
    in_progress: &'a InProgress,
    threads: HashMap<ThreadId, ThreadKey>,
}

impl Marker<'_> {
    pub(super) fn new(in_progress: &InProgress) -> Marker<'_> {
        Marker { in_progress, threads: HashMap::new() }
    }

    /// Takes the next record of a parcel. Returns true if it was changed.
    pub(super) fn take(&mut self, record: &mut Record) -> bool {
        match record {
            Record::Thread(thread) if !self.in_progress.is_empty() => {
                self.threads.insert(thread.id.clone(), ThreadKey::new(thread.key));
                false
            }
            Record::Row(row) if row.table == CALL && !self.in_progress.is_empty() => {
                let Some((thread, call, _)) = row.open_call() else { return false };
                let key = self.threads.get(&thread).copied();
                key.is_some_and(|key| self.in_progress.contains(&(key, call))) && row.mark_sent()
            }
            _ => false,
        }
    }
}

impl Engine {
    /// Checks that the results of open calls can arrive after the move.
    pub(super) async fn check_calls(
        &self,
        session: &ThreadId,
        peer: &Peer,
        destination: &Destination,
        in_progress: &InProgress,
    ) -> Result<(), MoveFailed> {
        let same_keys = self.origin.is_known_by(&destination.key_id, &destination.key_ids);
        let same_url = destination.public_url == self.origin.public_url;
        if peer.end_calls || (same_keys && same_url) {
            return Ok(());
        }
        let OpenCalls { awaited, unacknowledged } = self.open_calls_in(session, in_progress).await?;
        if !same_keys && awaited > 0 {
            return Err(MoveFailed(format!(
                "the session has {awaited} open calls and subscriptions whose results cannot arrive at the destination, \
                 because it has another key, or not all keys of this runtime: give it the same keys, or end those \
                 calls with --end-calls"
            )));
        }
        // The destination would send them again with another URL, and a tool server takes that for another call.
        if !same_url && unacknowledged > 0 {
            return Err(MoveFailed(format!(
                "the session has {unacknowledged} calls that no tool server has acknowledged yet. The destination would \
                 send them again with another callback URL, because it has another server.public_url, and they could run \
                 twice: try again when they are acknowledged, or end the open calls with --end-calls"
            )));
        }
        Ok(())
    }

    async fn open_calls_in(
        &self,
        session: &ThreadId,
        in_progress: &InProgress,
    ) -> Result<OpenCalls, MoveFailed> {
        let (mut calls, mut from, mut marker) = (OpenCalls::default(), 0, Marker::new(in_progress));
        loop {
            let records = self.store.records(session, from).await?;
            if records.is_empty() {
                return Ok(calls);
            }
            from += records.len() as u64;
            for record in &records {
                let mut record = Record::read(record).map_err(MoveFailed)?;
                marker.take(&mut record);
                if let Record::Row(row) = &record
                    && row.table == CALL
                {
                    calls.awaited += usize::from(row.awaits_callback());
                    calls.unacknowledged += usize::from(row.is_unacknowledged());
                }
            }
        }
    }

    /// Returns the threads of a parcel, each with its name in callback tokens.
    pub(super) async fn threads_in(
        &self,
        session: &ThreadId,
    ) -> Result<Vec<(ThreadId, TokenThread)>, MoveFailed> {
        let (mut threads, mut from) = (Vec::new(), 0);
        loop {
            let records = self.store.records(session, from).await?;
            let mut found = false;
            for record in &records {
                from += 1;
                match Record::read(record).map_err(MoveFailed)? {
                    Record::Session(_) => found = true,
                    Record::Thread(thread) => {
                        found = true;
                        let key = ThreadKey::new(thread.token_key);
                        let named = TokenThread { key, incarnation: thread.incarnation };
                        threads.push((thread.id.clone(), named));
                    }
                    // Threads come first.
                    _ => return Ok(threads),
                }
            }
            if !found {
                return Ok(threads);
            }
        }
    }
}
