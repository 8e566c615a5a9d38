//! How calls are shown to people: the scripts of their tools are run once, when the answer is here and before its step,
//! on a thread of their own. The step only writes down what they gave, and whoever reads the history runs nothing.

use std::time::Instant;

use rap_agent::{Arguments, Plan, PlannedCall};

use crate::display;
use crate::toolsets::SessionTools;
use crate::world::Blocking;

/// Fills in what people see of these calls.
pub(super) async fn show(calls: &mut [PlannedCall], tools: &SessionTools, blocking: Blocking) {
    let mut scripted = Vec::new();
    for (place, call) in calls.iter().enumerate() {
        if let (Plan::Invoke(_), Arguments::Given(arguments)) = (&call.plan, &call.arguments)
            && let Some((server, _, tool)) = tools.find(&call.name)
            && let Some(scripts) = server.scripts.clone().filter(|scripts| scripts.has(tool.name.as_str()))
        {
            scripted.push((place, scripts, tool.name.as_str().to_owned(), arguments.clone()));
        }
    }
    if scripted.is_empty() {
        return;
    }
    let until = Instant::now() + display::ALL_WITHIN;
    let shown = blocking.run(move || {
        let in_time = scripted.into_iter().take_while(|_| Instant::now() < until);
        let shown = in_time.map(|(place, scripts, tool, arguments)| (place, scripts.show(&tool, &arguments)));
        shown.collect::<Vec<_>>()
    });
    // A script that panics or hangs leaves its answer without any of them.
    let Ok(Some(shown)) = tokio::time::timeout(2 * display::ALL_WITHIN, shown).await else {
        return tracing::error!("the scripts that show calls did not end as they should");
    };
    for (place, text) in shown {
        calls[place].display = text;
    }
}
