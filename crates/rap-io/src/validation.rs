//! Validates the arguments of calls without blocking async workers.
//!
//! A small validation runs at once. One that needs more steps runs on a blocking thread. Only [`PERMITS`] of these run at
//! the same time, and only one for each owner (a tool server, or a caller), so an owner with expensive validations
//! delays its own ones, and others by at most one. A validation stops when nobody waits for it any more.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rap_protocol::InputSchema;
use rap_protocol::schema::{Budget, Rejected};
use serde_json::Value;
use tokio::sync::Semaphore;

/// Maximum number of validations that run on blocking threads at the same time.
pub const PERMITS: usize = 2;
/// Number of owners above which those without validations are forgotten.
const OWNERS: usize = 64;

/// Runs validations for owners that are identified by a key. See the module.
pub struct Validations<K> {
    permits: Arc<Semaphore>,
    /// One permit for each owner that has or recently had a validation.
    owners: Mutex<HashMap<K, Arc<Semaphore>>>,
}

/// Stops a validation when the future that waits for it is dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl<K: Clone + Eq + Hash> Validations<K> {
    /// Validates arguments for an owner. `inline` holds the steps that may run on the calling task.
    pub async fn validate(
        &self,
        owner: &K,
        schema: &InputSchema,
        arguments: &Arc<Value>,
        inline: &mut Budget,
    ) -> Result<(), Rejected> {
        match schema.validate_within(arguments, inline) {
            Err(Rejected::TooCostly) => {}
            ended => return ended,
        }
        // A permit of the owner comes first, so that an owner has at most one validation that waits for the others.
        let turn = self.owner(owner).acquire_owned().await;
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let (schema, arguments) = (schema.clone(), Arc::clone(arguments));
        let stop = Arc::new(AtomicBool::new(false));
        let _stop_on_drop = StopOnDrop(Arc::clone(&stop));
        let job = move || {
            let ended = schema.validate_within(&arguments, &mut Budget::stopped_by(stop));
            // Both are held until the thread is free, even if nobody waits.
            drop((turn, permit));
            ended
        };
        let ended = tokio::task::spawn_blocking(job).await;
        ended.unwrap_or_else(|error| {
            tracing::error!(%error, "a validation panicked");
            Err(Rejected::Stopped)
        })
    }

    fn owner(&self, owner: &K) -> Arc<Semaphore> {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        if owners.len() >= OWNERS {
            // Validations that run or wait hold a reference.
            owners.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        Arc::clone(owners.entry(owner.clone()).or_insert_with(|| Arc::new(Semaphore::new(1))))
    }
}

impl<K> Default for Validations<K> {
    fn default() -> Self {
        Validations { permits: Arc::new(Semaphore::new(PERMITS)), owners: Mutex::default() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rap_protocol::limits;
    use serde_json::json;
    use tokio::time::timeout;

    use super::*;

    fn inline() -> Budget {
        Budget::new(limits::INLINE_VALIDATION_STEPS)
    }

    /// Arguments that take nearly all steps of a budget, so that a validation takes long.
    fn costly() -> (InputSchema, Arc<Value>) {
        let constants: Vec<Value> = (0..2_000).map(|n| json!({ "const": n })).collect();
        let schema = json!({"properties": {"a": {"items": {"anyOf": constants}}}});
        (InputSchema::new(schema).unwrap(), Arc::new(json!({"a": vec![1_999; 8_000]})))
    }

    #[tokio::test]
    async fn a_large_validation_has_the_result_of_a_small_one() {
        let schema = json!({"properties": {"a": {"items": {"type": "integer"}}}});
        let schema = InputSchema::new(schema).unwrap();
        let validations = Validations::default();
        let mut items = vec![json!(1); 100_000];
        let valid = Arc::new(json!({ "a": items }));
        assert_eq!(validations.validate(&"o", &schema, &valid, &mut inline()).await, Ok(()));
        items[99_999] = json!("x");
        let invalid = Arc::new(json!({ "a": items }));
        let rejected = validations.validate(&"o", &schema, &invalid, &mut inline()).await.unwrap_err();
        assert_eq!(rejected.to_string(), "$.a[99999]: \"x\" is not of type \"integer\"");
        assert_eq!(validations.permits.available_permits(), PERMITS);
    }

    #[tokio::test]
    async fn a_validation_that_nobody_waits_for_stops_and_frees_its_permits() {
        let (schema, arguments) = costly();
        let validations = Validations::default();
        let began = Instant::now();
        assert_eq!(validations.validate(&"o", &schema, &arguments, &mut inline()).await, Ok(()));
        let whole = began.elapsed();
        let mut inline = inline();
        let waiting = validations.validate(&"o", &schema, &arguments, &mut inline);
        assert!(timeout(Duration::from_millis(1), waiting).await.is_err(), "it takes longer");
        let began = Instant::now();
        let turn = validations.owner(&"o").acquire_owned().await;
        let permits = Arc::clone(&validations.permits).acquire_many_owned(PERMITS as u32).await;
        assert!(turn.is_ok() && permits.is_ok());
        assert!(began.elapsed() < whole / 2, "{:?} of {whole:?}", began.elapsed());
    }

    #[tokio::test]
    async fn an_owner_with_many_costly_validations_has_one_permit_at_most() {
        let (schema, arguments) = costly();
        let validations = Arc::new(Validations::default());
        // As if one of them were running.
        let turn = validations.owner(&"bad").acquire_owned().await;
        let permit = Arc::clone(&validations.permits).acquire_owned().await;
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (validations, schema, arguments) =
                (Arc::clone(&validations), schema.clone(), Arc::clone(&arguments));
            waiting
                .spawn(async move { validations.validate(&"bad", &schema, &arguments, &mut inline()).await });
        }
        while Arc::strong_count(&arguments) < 9 {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        assert_eq!(validations.permits.available_permits(), PERMITS - 1, "the eight wait for their owner");
        let one = Arc::new(json!({"a": [1_999]}));
        let (mut none, other) = (Budget::new(0), "good");
        assert_eq!(
            validations.validate(&other, &schema, &one, &mut none).await,
            Ok(()),
            "others do not wait"
        );
        waiting.shutdown().await;
        drop((turn, permit));
    }
}
