//! The clock of an engine: the system clock, or the clock of a test.

use std::time::SystemTime;

use rap_protocol::Timestamp;
use tokio::runtime::Handle;
use tokio::time::Instant;

#[derive(Debug, Clone)]
pub(crate) enum Clock {
    System,
    /// Advances with tokio's clock, which a test can pause. That clock belongs to the runtime of the test, and other
    /// threads, such as the writer's, have to enter the runtime to read it.
    Virtual {
        from: Timestamp,
        since: Instant,
        runtime: Handle,
    },
}

impl Clock {
    pub(crate) fn virtual_from_now() -> Self {
        let runtime = Handle::current();
        Clock::Virtual { from: SystemTime::now().into(), since: Instant::now(), runtime }
    }

    pub(crate) fn is_virtual(&self) -> bool {
        matches!(self, Clock::Virtual { .. })
    }

    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Clock::System => SystemTime::now().into(),
            Clock::Virtual { from, since, runtime } => {
                let _entered = runtime.enter();
                from.plus(since.elapsed())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_virtual_clock_shows_the_same_time_on_every_thread() {
        let clock = Clock::virtual_from_now();
        tokio::time::advance(Duration::from_secs(3600)).await;
        let (here, other) = (clock.now(), clock.clone());
        assert_eq!(std::thread::spawn(move || other.now()).join().unwrap(), here);
    }
}
