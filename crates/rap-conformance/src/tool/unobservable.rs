//! What can not be seen of a tool server from outside, and why.

/// Requirements of tools that no probe can show to be met.
pub const UNOBSERVABLE: &[(&str, &str)] = &[
    ("TC-10", "a clean-up of its own shows after hours or days; read its code or its documentation"),
    ("TC-22", "whether there are other means of cleaning up shows only inside the server"),
    ("CN-09", "what it assumes about a delivery shows only inside the server"),
    ("CN-11", "time-outs of its own show after hours; read its documentation"),
    ("CN-12", "what it aborts shows only inside the server"),
    ("CN-13", "it may send a result after a cancellation, or none: both are right"),
    ("CN-25", "whether there are other means of ending work shows only inside the server"),
    ("TR-18", "durable storage shows after a restart, and the checker did not start the server"),
    (
        "TR-24",
        "whether this is production can not be seen; a server that is reached over a network needs https",
    ),
    ("SE-10", "durable storage shows after a restart, and the checker did not start the server"),
    ("SE-23", "the source of its events is not ours"),
    ("SE-24", "it would take a flood of events at their source"),
    ("SE-27", "whether the text of an event stands for structured data is known to its author alone"),
    ("LC-04", "the checker comes after the server's start"),
    ("LC-06", "it may: how many calls it takes at once is for it to decide"),
    ("LC-13", "recovery shows after a restart, and the checker did not start the server"),
    ("LC-14", "recovery shows after a restart, and the checker did not start the server"),
    ("LC-32", "it would take a flood of real calls"),
    ("LC-34", "how callback URLs are stored and logged shows only inside the server"),
    ("LC-41", "a description may say how long a tool takes; whether it does is for people to read"),
];
