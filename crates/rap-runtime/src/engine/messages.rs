//! Messages between threads: delivered in commit order, session by session.

use std::sync::Arc;

use rap_agent::Input;

use super::Engine;
use super::clock::{More, PUT_OFF, QUERIES, ROWS, Shares};
use crate::store::{self, Lane, Message, OutboxMessage, Target};

impl Engine {
    pub(super) async fn deliver_messages(self: Arc<Self>) {
        loop {
            match self.deliver_due().await {
                Ok(More::Perhaps) if !self.stop.is_cancelled() => continue,
                Ok(_) => {}
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(why = error.with_sources(), "messages between threads wait for the store");
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
        for _ in 0..QUERIES {
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
        let keys: Vec<_> = messages.iter().map(|message| message.key).collect();
        let batch =
            messages.into_iter().map(|OutboxMessage { key, sender, receiver, message, .. }| Message {
                outbox: Some(key),
                ..Message::new(Target::Id(receiver), Input::FromThread { sender, message })
            });
        let results = self.store.apply(Lane::Internal, batch.collect()).await;
        let mut put_off = Vec::new();
        for (key, result) in keys.into_iter().zip(results) {
            match result {
                // A receiver that is gone, or refuses it, has had it.
                Ok(_) | Err(store::Error::Ignored(_) | store::Error::NoThread) => {}
                Err(error @ (store::Error::Closed | store::Error::Unavailable(_))) => return Err(error),
                Err(_) => put_off.push(key),
            }
        }
        if !put_off.is_empty() {
            let now = self.now();
            self.store.put_off(Vec::new(), put_off, now, now.plus(PUT_OFF)).await?;
        }
        Ok(More::Perhaps)
    }
}
