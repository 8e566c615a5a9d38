//! Crash points: named places at which a test ends the process as a power failure would. Only debug builds have them;
//! in release builds they compile to nothing.

/// Variable with the name of the point to crash at. `NAME:3` crashes when it is reached for the third time.
pub const VARIABLE: &str = "RAP_CRASH_POINT";

/// Reaches a crash point.
#[inline]
pub fn point(name: &str) {
    #[cfg(debug_assertions)]
    chosen::reach(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}

#[cfg(debug_assertions)]
mod chosen {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// The point that was chosen, and how many times it is still to be reached.
    static CHOSEN: LazyLock<Option<(String, AtomicU32)>> = LazyLock::new(|| {
        let text = std::env::var(super::VARIABLE).ok()?;
        let (name, times) = text.split_once(':').unwrap_or((&text, "1"));
        Some((name.to_owned(), AtomicU32::new(times.parse().ok()?)))
    });

    pub(super) fn reach(name: &str) {
        let Some((chosen, left)) = &*CHOSEN else { return };
        if chosen == name && left.fetch_sub(1, Ordering::SeqCst) == 1 {
            eprintln!("crash point {name}");
            // Nothing is written, closed or answered after this.
            std::process::abort();
        }
    }
}
