//! Display texts of calls. The display scripts of their tools run once, on a blocking thread, after the answer has
//! arrived and before its step. The step stores the texts, so that reading the history runs no scripts.

use std::time::Instant;

use rap_agent::{Arguments, Plan, PlannedCall};

use crate::display;
use crate::toolsets::SessionTools;
use crate::world::Blocking;

/// Sets the display texts of the calls.
pub(super) async fn show(calls: &mut [PlannedCall], tools: &SessionTools, blocking: Blocking) {
    let mut scripted = Vec::new();
    for (index, call) in calls.iter().enumerate() {
        if let (Plan::Invoke(_), Arguments::Given(arguments)) = (&call.plan, &call.arguments)
            && let Some((server, _, tool)) = tools.find(&call.name)
            && let Some(scripts) = server.scripts.clone().filter(|scripts| scripts.has(tool.name.as_str()))
        {
            scripted.push((index, scripts, tool.name.as_str().to_owned(), arguments.clone()));
        }
    }
    if scripted.is_empty() {
        return;
    }
    let until = Instant::now() + display::ALL_SCRIPTS_TIME;
    let shown = blocking.run(move || {
        let in_time = scripted.into_iter().take_while(|_| Instant::now() < until);
        let shown = in_time.map(|(index, scripts, tool, arguments)| (index, scripts.show(&tool, &arguments)));
        shown.collect::<Vec<_>>()
    });
    // If a script panics or hangs, no call of the answer gets a display text.
    let Ok(Some(shown)) = tokio::time::timeout(2 * display::ALL_SCRIPTS_TIME, shown).await else {
        return tracing::error!("display scripts panicked or did not finish in time");
    };
    for (index, text) in shown {
        calls[index].display = text;
    }
}
