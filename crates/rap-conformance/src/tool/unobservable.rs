//! Requirements that cannot be observed from outside of a tool server, with the reasons.

/// Requirements of tools that no probe can show to be met.
pub const UNOBSERVABLE: &[(&str, &str)] = &[
    ("TC-10", "automatic clean-up happens after hours or days; check the server's code or documentation"),
    ("TC-22", "other ways of cleaning up are visible only inside the server"),
    ("CN-09", "assumptions about a delivery are visible only inside the server"),
    ("CN-11", "timeouts take effect after hours; check the server's documentation"),
    ("CN-12", "aborted work is visible only inside the server"),
    ("CN-13", "sending a result after a cancellation is optional: both behaviours are correct"),
    ("CN-25", "other ways of ending work are visible only inside the server"),
    ("TR-18", "durable storage shows only after a restart, and the checker cannot restart the server"),
    (
        "TR-24",
        "the checker does not know whether this is a production server; a server on a network needs https",
    ),
    ("SE-10", "durable storage shows only after a restart, and the checker cannot restart the server"),
    ("SE-23", "the checker has no access to the source of the events"),
    ("SE-24", "this would need a flood of events at their source"),
    ("SE-27", "only the author knows whether the text of an event represents structured data"),
    ("LC-04", "the checker starts after the server"),
    ("LC-06", "optional: the server decides how many calls it accepts at once"),
    ("LC-13", "recovery shows only after a restart, and the checker cannot restart the server"),
    ("LC-14", "recovery shows only after a restart, and the checker cannot restart the server"),
    ("LC-32", "this would need a flood of real calls"),
    ("LC-34", "how callback URLs are stored and logged is visible only inside the server"),
    ("LC-41", "documentation of execution times is free text; read the descriptions of the tools"),
];
