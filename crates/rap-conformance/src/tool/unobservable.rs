//! Requirements of tool servers that cannot be observed from outside, completely or in part, with the reasons.

use crate::report::Gap;

/// Requirements of tools that no probe can show to be met, or not completely.
pub const GAPS: &[Gap] = &[
    Gap::part("TC-05", "a clean-up that fails"),
    Gap::whole(
        "TC-10",
        "automatic clean-up happens after hours or days; check the server's code or documentation",
    ),
    Gap::part("TC-11", "sandboxes, workspaces and temporary files, which are inside the server"),
    Gap::part("TC-14", "the server's log"),
    Gap::whole(
        "TC-21",
        "what the server does with a thread_id is visible only inside it; hostile ids showed no failure",
    ),
    Gap::whole("TC-22", "other ways of cleaning up are visible only inside the server"),
    Gap::whole("CN-09", "assumptions about a delivery are visible only inside the server"),
    Gap::whole("CN-11", "timeouts take effect after hours; check the server's documentation"),
    Gap::whole("CN-12", "aborted work is visible only inside the server"),
    Gap::whole("CN-13", "sending a result after a cancellation is optional: both behaviours are correct"),
    Gap::part("CN-16", "the server's log"),
    Gap::whole(
        "CN-23",
        "what the server does with ids is visible only inside it; hostile ids showed no failure",
    ),
    Gap::whole("CN-25", "other ways of ending work are visible only inside the server"),
    Gap::whole(
        "TR-18",
        "durable storage shows only after a restart, and the checker cannot restart the server",
    ),
    Gap::part("TR-23", "which payloads the server validates, and against what"),
    Gap::whole(
        "TR-24",
        "the checker does not know whether this is a production server; a server on a network needs https",
    ),
    Gap::whole("TR-25", "how a tool server protects callback URLs is visible only inside the server"),
    Gap::whole(
        "SE-10",
        "durable storage shows only after a restart, and the checker cannot restart the server",
    ),
    Gap::whole("SE-23", "the checker has no access to the source of the events"),
    Gap::whole("SE-24", "this would need a flood of events at their source"),
    Gap::whole("SE-27", "only the author knows whether the text of an event represents structured data"),
    Gap::whole("LC-04", "the checker starts after the server"),
    Gap::whole("LC-06", "optional: the server decides how many calls it accepts at once"),
    Gap::part(
        "LC-08",
        "an oauth message and the result that follows it: no call needed the user's authorization",
    ),
    Gap::part("LC-10", "an unrecoverable error: the errors were about invalid calls"),
    Gap::whole("LC-13", "recovery shows only after a restart, and the checker cannot restart the server"),
    Gap::whole("LC-14", "recovery shows only after a restart, and the checker cannot restart the server"),
    Gap::part("LC-26", "an operation that fails while it works: the errors were about invalid calls"),
    Gap::part("LC-27", "an operation that fails while it works: the errors were about invalid calls"),
    Gap::part("LC-31", "ranges and injection: the checker knows only the schemas"),
    Gap::whole("LC-32", "this would need a flood of real calls"),
    Gap::part("LC-33", "results other than those of invalid calls"),
    Gap::whole("LC-34", "how callback URLs are stored and logged is visible only inside the server"),
    Gap::whole("LC-41", "documentation of execution times is free text; read the descriptions of the tools"),
];
