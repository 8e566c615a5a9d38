//! Delivery of messages between threads, in commit order within each session.

use std::sync::Arc;

use rap_agent::Input;

use super::Engine;
use super::clock::{MAX_QUERIES, More, POSTPONE_BY, ROWS, Shares};
use crate::store::{self, Message, MessageClass, OutboxMessage, Target};

impl Engine {
    pub(super) async fn deliver_messages(self: Arc<Self>) {
        loop {
            match self.deliver_due().await {
                Ok(More::Maybe) if !self.stop.is_cancelled() => continue,
                Ok(_) => {}
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(
                        why = error.with_sources(),
                        "messages between threads cannot be delivered; retrying"
                    );
                    self.pause_for_store().await;
                    self.messages_due.notify_one();
                }
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.messages_due.notified() => {}
            }
        }
    }

    async fn deliver_due(&self) -> Result<More, store::Error> {
        let mut shares = Shares::default();
        let mut messages: Vec<OutboxMessage> = Vec::new();
        for _ in 0..MAX_QUERIES {
            let found = self.store.due_messages(self.now(), &shares.full(), ROWS).await?;
            if shares.take(
                found,
                |message: &OutboxMessage| (message.session, message.key),
                &mut messages,
                ROWS,
            ) == More::No
            {
                break;
            }
        }
        if messages.is_empty() {
            return Ok(More::No);
        }
        let keys: Vec<_> =
            messages.iter().map(|message| (message.key, Target::Id(message.receiver.clone()))).collect();
        let batch =
            messages.into_iter().map(|OutboxMessage { key, sender, receiver, message, .. }| Message {
                outbox: Some(key),
                ..Message::new(Target::Id(receiver), Input::FromThread { sender, message })
            });
        rap_io::crash::point("before_message");
        let results = self.store.apply(MessageClass::Internal, batch.collect()).await;
        let mut postponed = Vec::new();
        for ((key, receiver), result) in keys.into_iter().zip(results) {
            match result {
                // The store has removed the message, even if its receiver is closed, is unknown or ignored it.
                Ok(_) | Err(store::Error::Ignored(_) | store::Error::NoThread) => {}
                Err(error @ (store::Error::Closed | store::Error::Unavailable(_))) => return Err(error),
                Err(error) => {
                    self.set_aside_if_damaged(&receiver, &error).await;
                    postponed.push(key);
                }
            }
        }
        if !postponed.is_empty() {
            let now = self.now();
            self.store.postpone_due(Vec::new(), postponed, now, now.plus(POSTPONE_BY)).await?;
        }
        Ok(More::Maybe)
    }
}
