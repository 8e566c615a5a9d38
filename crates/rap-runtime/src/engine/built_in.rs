//! The runtime's own tools as a model sees them: what is offered, and what a call of one of them asks for. What they do
//! stands in the rules.

use std::sync::LazyLock;
use std::time::Duration;

use rap_agent::{BuiltIn, NextTime, Occurrence, Plan, Subscription, words};
use rap_protocol::{InputSchema, Timestamp};
use serde_json::{Map, Value, json};

use crate::calendar;
use crate::model::Offered;

/// The time zone where none is named.
const TIMEZONE: &str = "UTC";
/// The longest sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
/// The longest text that one thread tells another, or a schedule its thread, in bytes.
const TEXT_BYTES: usize = 256 * 1024;

/// The tools that every thread has, those of a child last.
static TOOLS: LazyLock<Vec<Offered>> = LazyLock::new(|| {
    let text = |description: &str| json!({"type": "string", "description": description});
    let timezone = json!({
        "type": "string", "default": TIMEZONE, "description": "A name like Europe/Berlin.",
    });
    vec![
        tool(
            words::CANCEL_SUBSCRIPTION,
            "End a subscription of this conversation, so that its events do not wake you any more. Cancel \
             subscriptions that are no longer needed before you finish.",
            json!({"tool_call_id": text("The id of the call that created the subscription.")}),
            &["tool_call_id"],
        ),
        tool(
            words::SPAWN_THREAD,
            "Start a thread of its own that sees the conversation up to here and works on its own. Its reports wake \
             you; you need not wait for it.",
            json!({"instructions": text("What the new thread is to do.")}),
            &["instructions"],
        ),
        tool(
            words::SEND_MESSAGE_TO_CHILD,
            "Tell something to a thread that was started from here.",
            json!({
                "thread_id": text("The thread, as the result of the call that started it names it."),
                "message": text("What it is told."),
            }),
            &["thread_id", "message"],
        ),
        tool(
            words::SLEEP,
            "Sleep for some time. Anything that happens meanwhile wakes you before.",
            json!({"seconds": {"type": "number", "minimum": 0}}),
            &["seconds"],
        ),
        tool(
            words::SLEEP_UNTIL,
            "Sleep until a time. Anything that happens meanwhile wakes you before.",
            json!({"time": text("Like 2026-11-16T08:00:00, or with an offset."), "timezone": timezone}),
            &["time"],
        ),
        tool(words::WAIT, "Wait until something happens: a result, an event, a message.", json!({}), &[]),
        tool(
            words::SCHEDULE,
            "Be woken again and again, at the times of a cron expression, with a text of your own. It is a \
             subscription: it goes on until it is cancelled.",
            json!({
                "cron": text("Five fields (minute hour day month weekday), or six with seconds in front."),
                "timezone": timezone,
                "text": text("What you are told each time."),
            }),
            &["cron", "text"],
        ),
        tool(
            words::REPORT_TO_PARENT,
            "Tell the thread that started this one what came out, or how it goes.",
            json!({"report": text("The report.")}),
            &["report"],
        ),
    ]
});

fn tool(name: &str, description: &str, properties: Value, required: &[&str]) -> Offered {
    let schema = json!({"type": "object", "properties": properties, "required": required});
    Offered {
        name: name.into(),
        description: description.into(),
        schema: InputSchema::new(schema).expect("bug: the schema compiles"),
    }
}

/// What a thread is offered, whatever it is doing.
pub(super) fn offered(has_parent: bool) -> impl Iterator<Item = Offered> {
    TOOLS.iter().filter(move |tool| has_parent || tool.name != words::REPORT_TO_PARENT).cloned()
}

/// The tool that closes the thread: it names what would end with it.
// Argued: SE-28 the descriptions ask for it, and this one names what is still active
pub(super) fn close_thread(active: &[Subscription]) -> Offered {
    let mut description =
        "Close this conversation for good, when its work is done. Calls that are made together \
                           with this one are not carried out. Cancel subscriptions first."
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
        "description": "What the thread that started this one hears last.",
    }});
    tool(words::CLOSE_THREAD, &description, report, &[])
}

/// What a call of one of our own tools asks for; nothing, if it is none of them.
pub(super) fn plan(name: &str, arguments: &Map<String, Value>, now: Timestamp) -> Option<Plan> {
    if !words::BUILT_IN.contains(&name) {
        return None;
    }
    let tool = Reading { arguments, now }.tool(name);
    Some(tool.map_or_else(|why| Plan::Refuse(format!("Error: {why}")), Plan::BuiltIn))
}

/// Arguments that are being read. An error names what was expected where.
struct Reading<'a> {
    arguments: &'a Map<String, Value>,
    now: Timestamp,
}

impl Reading<'_> {
    fn tool(&self, name: &str) -> Result<BuiltIn, String> {
        Ok(match name {
            words::CANCEL_SUBSCRIPTION => {
                BuiltIn::CancelSubscription { tool_call_id: self.text("tool_call_id")? }
            }
            words::SPAWN_THREAD => BuiltIn::SpawnThread { instructions: self.text("instructions")? },
            words::REPORT_TO_PARENT => BuiltIn::ReportToParent { report: self.text("report")? },
            words::CLOSE_THREAD => BuiltIn::CloseThread {
                report: self.arguments.contains_key("report").then(|| self.text("report")).transpose()?,
            },
            words::SEND_MESSAGE_TO_CHILD => BuiltIn::SendMessageToChild {
                thread_id: self.text("thread_id")?,
                message: self.text("message")?,
            },
            words::SLEEP => BuiltIn::Sleep { until: self.now.plus(self.seconds()?) },
            words::SLEEP_UNTIL => {
                let until = calendar::moment(&self.text("time")?, &self.timezone()?)?;
                self.not_too_long(until.since(self.now))?;
                BuiltIn::Sleep { until }
            }
            words::WAIT => BuiltIn::Wait,
            _ => self.schedule()?,
        })
    }

    fn schedule(&self) -> Result<BuiltIn, String> {
        let (timezone, _) = (self.timezone()?, self.text("text")?);
        let next = calendar::next(&self.text("cron")?, &timezone, self.now)?;
        let next = next.ok_or("$.cron: such a time never comes")?;
        let confirmation = format!("scheduled; the first time is {}", calendar::shown(next, &timezone));
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

/// What a schedule says when its timer has fired, and its next time.
pub(crate) fn occurrence(arguments: &Map<String, Value>, now: Timestamp) -> Occurrence {
    let reading = Reading { arguments, now };
    let text = reading.text("text").unwrap_or_default();
    let next = reading.timezone().and_then(|zone| calendar::next(&reading.text("cron")?, &zone, now));
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
