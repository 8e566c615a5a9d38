pub(super) const PANIC: &str = "panic";
