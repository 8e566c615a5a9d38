//! The runtime's built-in tools: their descriptions for the model, and parsing of their arguments. Their behaviour is
//! defined by the rules in `rap-agent`.

use std::sync::LazyLock;
use std::time::Duration;

use rap_agent::{BuiltIn, NextTime, Occurrence, Plan, Subscription, texts};
use rap_protocol::{InputSchema, Timestamp};
use serde_json::{Map, Value, json};

use crate::calendar;
use crate::model::OfferedTool;

/// Time zone that is used if a call names none.
const TIMEZONE: &str = "UTC";
/// Longest sleep that a call can ask for.
const LONGEST_SLEEP: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
/// Maximum length of a text argument, in bytes.
const TEXT_BYTES: usize = 256 * 1024;

/// The built-in tools except `close_thread`. The last one is offered only to child threads.
static TOOLS: LazyLock<Vec<OfferedTool>> = LazyLock::new(|| {
    let text = |description: &str| json!({"type": "string", "description": description});
    let timezone = json!({
        "type": "string", "default": TIMEZONE, "description": "A name like Europe/Berlin.",
    });
    vec![
        tool(
            texts::CANCEL_SUBSCRIPTION,
            "End a subscription of this conversation, so that its events no longer wake you. Cancel \
             subscriptions that are no longer needed before you finish.",
            json!({"tool_call_id": text("The id of the call that created the subscription.")}),
            &["tool_call_id"],
        ),
        tool(
            texts::SPAWN_THREAD,
            "Start a new thread that sees the conversation so far and works independently. Its reports wake you, so \
             you need not wait for it.",
            json!({"instructions": text("Task of the new thread.")}),
            &["instructions"],
        ),
        tool(
            texts::SEND_MESSAGE_TO_CHILD,
            "Send a message to a thread that was started from here.",
            json!({
                "thread_id": text("Id of the thread, from the result of the call that started it."),
                "message": text("Text of the message."),
            }),
            &["thread_id", "message"],
        ),
        tool(
            texts::SLEEP,
            "Sleep for some time. Any other input wakes you earlier.",
            json!({"seconds": {"type": "number", "minimum": 0}}),
            &["seconds"],
        ),
        tool(
            texts::SLEEP_UNTIL,
            "Sleep until a time. Any other input wakes you earlier.",
            json!({"time": text("A time like 2026-11-16T08:00:00, or with an offset."), "timezone": timezone}),
            &["time"],
        ),
        tool(texts::WAIT, "Wait until something happens: a result, an event, a message.", json!({}), &[]),
        tool(
            texts::SCHEDULE,
            "Be woken repeatedly, at the times of a cron expression, with a text of your choice. This is a \
             subscription that continues until it is cancelled.",
            json!({
                "cron": text("Five fields (minute hour day month weekday), or six with seconds in front."),
                "timezone": timezone,
                "text": text("Text that you receive each time."),
            }),
            &["cron", "text"],
        ),
        tool(
            texts::REPORT_TO_PARENT,
            "Report a result or progress to the thread that started this one.",
            json!({"report": text("Text of the report.")}),
            &["report"],
        ),
    ]
});

fn tool(name: &str, description: &str, properties: Value, required: &[&str]) -> OfferedTool {
    let schema = json!({"type": "object", "properties": properties, "required": required});
    OfferedTool {
        name: name.into(),
        description: description.into(),
        schema: InputSchema::new(schema).expect("bug: the schema compiles"),
    }
}

/// Returns the tools whose description does not depend on the state of the thread.
pub(super) fn offered(has_parent: bool) -> impl Iterator<Item = OfferedTool> {
    TOOLS.iter().filter(move |tool| has_parent || tool.name != texts::REPORT_TO_PARENT).cloned()
}

/// Returns the tool that closes the thread. Its description names the subscriptions that are still active.
// Argued: SE-28 the descriptions ask for it, and this one names what is still active
pub(super) fn close_thread(active: &[Subscription]) -> OfferedTool {
    let mut description =
        "Close this conversation permanently when its work is done. Calls to tool servers in the same \
         answer, and calls after this one, are not carried out. Cancel subscriptions first."
            .to_owned();
    if !active.is_empty() {
        let names: Vec<String> = active
            .iter()
            .map(|subscription| format!("{} ({})", subscription.id, subscription.name))
            .collect();
        description.push_str(&format!(" Still active: {}.", names.join(", ")));
    }
    let report = json!({"report": {
        "type": "string",
        "description": "Last report to the thread that started this one.",
    }});
    tool(texts::CLOSE_THREAD, &description, report, &[])
}

/// Returns the plan for a call of a built-in tool, or `None` if `name` is not built in.
pub(super) fn plan(name: &str, arguments: &Map<String, Value>, now: Timestamp) -> Option<Plan> {
    if !texts::BUILT_IN.contains(&name) {
        return None;
    }
    let tool = ArgumentReader { arguments, now }.tool(name);
    Some(tool.map_or_else(|why| Plan::Refuse(format!("Error: {why}")), Plan::BuiltIn))
}

/// Reads the arguments of a call. An error names the argument and what was expected.
struct ArgumentReader<'a> {
    arguments: &'a Map<String, Value>,
    now: Timestamp,
}

impl ArgumentReader<'_> {
    fn tool(&self, name: &str) -> Result<BuiltIn, String> {
        Ok(match name {
            texts::CANCEL_SUBSCRIPTION => {
                BuiltIn::CancelSubscription { tool_call_id: self.text("tool_call_id")? }
            }
            texts::SPAWN_THREAD => BuiltIn::SpawnThread { instructions: self.text("instructions")? },
            texts::REPORT_TO_PARENT => BuiltIn::ReportToParent { report: self.text("report")? },
            texts::CLOSE_THREAD => BuiltIn::CloseThread {
                report: self.arguments.contains_key("report").then(|| self.text("report")).transpose()?,
            },
            texts::SEND_MESSAGE_TO_CHILD => BuiltIn::SendMessageToChild {
                thread_id: self.text("thread_id")?,
                message: self.text("message")?,
            },
            texts::SLEEP => BuiltIn::Sleep { duration: self.seconds()? },
            texts::SLEEP_UNTIL => {
                let until = calendar::parse_time(&self.text("time")?, &self.timezone()?)?;
                self.not_too_long(until.since(self.now))?;
                BuiltIn::SleepUntil { until }
            }
            texts::WAIT => BuiltIn::Wait,
            _ => self.schedule()?,
        })
    }

    fn schedule(&self) -> Result<BuiltIn, String> {
        let (timezone, _) = (self.timezone()?, self.text("text")?);
        let next = calendar::next(&self.text("cron")?, &timezone, self.now)?;
        let next = next.ok_or("$.cron: the expression matches no date")?;
        let confirmation = format!("scheduled; the first time is {}", calendar::format(next, &timezone));
        Ok(BuiltIn::Schedule { next, confirmation })
    }

    fn text(&self, name: &str) -> Result<String, String> {
        match self.arguments.get(name).and_then(Value::as_str) {
            Some(text) if text.len() > TEXT_BYTES => {
                Err(format!("$.{name}: expected at most {TEXT_BYTES} bytes"))
            }
            Some(text) => Ok(text.to_owned()),
            None => Err(format!("$.{name}: expected a string")),
        }
    }

    fn timezone(&self) -> Result<String, String> {
        if self.arguments.contains_key("timezone") { self.text("timezone") } else { Ok(TIMEZONE.into()) }
    }

    fn seconds(&self) -> Result<Duration, String> {
        let seconds = self.arguments.get("seconds").and_then(Value::as_f64);
        let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let duration = duration.ok_or("$.seconds: expected a number of seconds, 0 or more")?;
        self.not_too_long(duration)?;
        Ok(duration)
    }

    fn not_too_long(&self, sleep: Duration) -> Result<(), String> {
        let longest = LONGEST_SLEEP.as_secs() / 86_400;
        if sleep > LONGEST_SLEEP { Err(format!("a sleep lasts at most {longest} days")) } else { Ok(()) }
    }
}

/// Returns the text and the next time of a schedule whose timer has fired.
pub(crate) fn occurrence(arguments: &Map<String, Value>, now: Timestamp) -> Occurrence {
    let reader = ArgumentReader { arguments, now };
    let text = reader.text("text").unwrap_or_default();
    let next = reader.timezone().and_then(|zone| calendar::next(&reader.text("cron")?, &zone, now));
    let next = match next {
        Ok(Some(at)) => NextTime::At(at),
        Ok(None) => NextTime::Never,
        Err(why) => {
            tracing::warn!(why, "the next time of a schedule cannot be computed");
            NextTime::Unknown
        }
    };
    Occurrence { text, next }
}
