//! The stored form of a head. It is flat and has the field names of the first release, so that databases of every
//! release can be opened. A new field must have a default. The names of stored fields never change; where the field of
//! [`Head`] has another name, `serde(rename)` has the stored one.

use std::borrow::Cow;

use rap_protocol::{ThreadId, Timestamp};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::head::{Pause, PauseScope, TurnInProgress, is_zero, is_zero_time};
use crate::{Backlog, Head, InputQueue, OpenCall, Origin, Phase, Question, Seq, Subscription, Usage};

#[derive(Serialize, Deserialize)]
struct StoredHead<'a> {
    phase: StoredPhase<'a>,
    #[serde(default, skip_serializing_if = "Origin::is_root")]
    origin: Cow<'a, Origin>,
    turn: u64,
    #[serde(rename = "turns_awake")]
    turns_since_external_input: u32,
    #[serde(rename = "heard", default, skip_serializing_if = "is_zero_time")]
    external_input_at: Timestamp,
    #[serde(rename = "reset_for", default, skip_serializing_if = "is_zero_time")]
    turns_reset_at: Timestamp,
    #[serde(default, skip_serializing_if = "is_zero_u8")]
    dropped: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failing_since: Option<Timestamp>,
    seq: Seq,
    #[serde(rename = "settled")]
    settled_up_to: Seq,
    #[serde(rename = "answered", default, skip_serializing_if = "is_zero")]
    answered_up_to: Seq,
    #[serde(rename = "summarised", default, skip_serializing_if = "is_zero")]
    summarised_up_to: Seq,
    #[serde(rename = "read", default, skip_serializing_if = "is_zero")]
    prompt_tokens: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    result_bytes: u64,
    #[serde(rename = "minted")]
    ids: u64,
    #[serde(default, skip_serializing_if = "is_empty")]
    batch: Cow<'a, [OpenCall]>,
    #[serde(rename = "running", default, skip_serializing_if = "is_empty")]
    background: Cow<'a, [OpenCall]>,
    #[serde(default, skip_serializing_if = "is_empty")]
    subscriptions: Cow<'a, [Subscription]>,
    #[serde(default, skip_serializing_if = "is_empty")]
    questions: Cow<'a, [Question]>,
    #[serde(default, skip_serializing_if = "InputQueue::is_default")]
    held: Cow<'a, InputQueue>,
    #[serde(default, skip_serializing_if = "InputQueue::is_default")]
    queued: Cow<'a, InputQueue>,
    #[serde(rename = "children", default, skip_serializing_if = "is_empty")]
    counted_children: Cow<'a, [ThreadId]>,
    #[serde(rename = "resting", default, skip_serializing_if = "is_empty")]
    idle_event_children: Cow<'a, [ThreadId]>,
    #[serde(default, skip_serializing_if = "is_empty")]
    backlogs: Cow<'a, [Backlog]>,
    #[serde(rename = "rests", default, skip_serializing_if = "std::ops::Not::not")]
    reported_idle: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    owes_report: bool,
    usage: Usage,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    title: Option<Cow<'a, str>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredPhase<'a> {
    Idle,
    Asking {
        up_to: Seq,
    },
    Waiting,
    Failed {
        why: Cow<'a, str>,
        retry_at: Option<Timestamp>,
    },
    Paused {
        why: Cow<'a, str>,
        #[serde(default)]
        scope: PauseScope,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Timestamp>,
    },
    Closed,
}

fn is_zero_u8(number: &u8) -> bool {
    *number == 0
}

fn is_empty<T>(list: &[T]) -> bool {
    list.is_empty()
}

impl Serialize for Head {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (mut dropped, mut failing_since) = (0, None);
        let phase = match &self.phase {
            Phase::Idle => StoredPhase::Idle,
            Phase::Asking(asking) => {
                (dropped, failing_since) = (asking.dropped, asking.failing_since);
                StoredPhase::Asking { up_to: asking.up_to }
            }
            Phase::Waiting { .. } => StoredPhase::Waiting,
            Phase::Failed { why, since, retry_at } => {
                failing_since = Some(*since);
                StoredPhase::Failed { why: why.into(), retry_at: *retry_at }
            }
            Phase::Paused(Pause { why, scope, until }) => {
                StoredPhase::Paused { why: why.into(), scope: *scope, until: *until }
            }
            Phase::Closed => StoredPhase::Closed,
        };
        let stored = StoredHead {
            phase,
            origin: Cow::Borrowed(&self.origin),
            turn: self.turn,
            turns_since_external_input: self.turns_since_external_input,
            external_input_at: self.external_input_at,
            turns_reset_at: self.turns_reset_at,
            dropped,
            failing_since,
            seq: self.seq,
            settled_up_to: self.settled_up_to,
            answered_up_to: self.answered_up_to,
            summarised_up_to: self.summarised_up_to,
            prompt_tokens: self.prompt_tokens,
            result_bytes: self.result_bytes,
            ids: self.ids_made,
            batch: self.batch().into(),
            background: (&self.background).into(),
            subscriptions: (&self.subscriptions).into(),
            questions: (&self.questions).into(),
            held: Cow::Borrowed(&self.held),
            queued: Cow::Borrowed(&self.queued),
            counted_children: (&self.counted_children).into(),
            idle_event_children: (&self.idle_event_children).into(),
            backlogs: (&self.backlogs).into(),
            reported_idle: self.reported_idle,
            owes_report: self.owes_report,
            usage: self.usage,
            title: self.title.as_deref().map(Cow::Borrowed),
        };
        stored.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Head {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Head, D::Error> {
        let stored = StoredHead::deserialize(deserializer)?;
        let phase = match stored.phase {
            StoredPhase::Idle => Phase::Idle,
            StoredPhase::Asking { up_to } => Phase::Asking(TurnInProgress {
                up_to,
                dropped: stored.dropped,
                failing_since: stored.failing_since,
            }),
            StoredPhase::Waiting => Phase::Waiting { batch: stored.batch.into_owned() },
            StoredPhase::Failed { why, retry_at } => {
                let since = stored.failing_since.unwrap_or(Timestamp(0));
                // In the first release an event child could fail without a retry time. It kept its slot forever.
                // Retry it now.
                let retry_at = retry_at.or_else(|| stored.origin.is_event().then_some(since));
                Phase::Failed { why: why.into_owned(), since, retry_at }
            }
            StoredPhase::Paused { why, scope, until } => {
                Phase::Paused(Pause { why: why.into_owned(), scope, until })
            }
            StoredPhase::Closed => Phase::Closed,
        };
        Ok(Head {
            phase,
            origin: stored.origin.into_owned(),
            turn: stored.turn,
            turns_since_external_input: stored.turns_since_external_input,
            external_input_at: stored.external_input_at,
            turns_reset_at: stored.turns_reset_at,
            seq: stored.seq,
            settled_up_to: stored.settled_up_to,
            answered_up_to: stored.answered_up_to,
            summarised_up_to: stored.summarised_up_to,
            prompt_tokens: stored.prompt_tokens,
            result_bytes: stored.result_bytes,
            ids_made: stored.ids,
            background: stored.background.into_owned(),
            subscriptions: stored.subscriptions.into_owned(),
            questions: stored.questions.into_owned(),
            held: stored.held.into_owned(),
            queued: stored.queued.into_owned(),
            counted_children: stored.counted_children.into_owned(),
            idle_event_children: stored.idle_event_children.into_owned(),
            backlogs: stored.backlogs.into_owned(),
            reported_idle: stored.reported_idle,
            owes_report: stored.owes_report,
            usage: stored.usage,
            title: stored.title.map(Cow::into_owned),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The JSON is what the first release wrote.
    #[test]
    fn heads_of_the_first_release_are_read() {
        let idle = r#"{"phase":"idle","turn":2,"turns_awake":1,"seq":4,"settled":4,"minted":1,
            "usage":{"input":1,"output":2,"cached":0}}"#;
        let head: Head = serde_json::from_str(idle).unwrap();
        assert_eq!((head.turn, head.seq, head.ids_made, &head.phase), (2, 4, 1, &Phase::Idle));
        let waiting = r#"{"phase":"waiting","turn":1,"turns_awake":1,"seq":2,"settled":0,"minted":0,
            "batch":[{"id":"a","name":"look","server":"http://127.0.0.1:9","seq":2,"since":7}],
            "running":[{"id":"b","name":"look","server":"http://127.0.0.1:9","seq":1,"since":5,"until":9}],
            "held":{"first":0,"next":2,"inputs":1,"since":8},"usage":{"input":0,"output":0}}"#;
        let head: Head = serde_json::from_str(waiting).unwrap();
        assert_eq!((head.batch().len(), head.background.len(), head.held.entries()), (1, 1, 2));
        let failed = r#"{"phase":{"failed":{"why":"503","retry_at":90}},"turn":1,"turns_awake":0,
            "failing_since":60,"seq":1,"settled":0,"minted":0,"usage":{"input":0,"output":0}}"#;
        let head: Head = serde_json::from_str(failed).unwrap();
        let expected =
            Phase::Failed { why: "503".into(), since: Timestamp(60), retry_at: Some(Timestamp(90)) };
        assert_eq!(head.phase, expected);
        let paused = r#"{"phase":{"paused":{"why":"spent"}},"turn":1,"turns_awake":0,"seq":1,"settled":0,
            "minted":0,"usage":{"input":0,"output":0}}"#;
        let head: Head = serde_json::from_str(paused).unwrap();
        let expected = Pause { why: "spent".into(), scope: PauseScope::Session, until: None };
        assert_eq!(head.phase, Phase::Paused(expected));
    }
}
