//! Compares what clients asked for with the histories of a thread and its children.

use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tool {
    /// Not restartable: its call may end in an error that says that the outcome is unknown.
    Once,
    Again,
    /// A tool of a server that answers with errors and nonsense.
    Unreliable,
    /// A subscription.
    Ticks,
}

impl Tool {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Tool::Once => "once",
            Tool::Again => "again",
            Tool::Unreliable => "unreliable",
            Tool::Ticks => "ticks",
        }
    }
}

/// A call that a message asks for.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) tool: Tool,
    /// Occurs in the arguments of this call only.
    pub(crate) mark: String,
    pub(crate) ms: u64,
    /// Number of events that it sends.
    pub(crate) ticks: u64,
}

impl Call {
    /// Line of a message that asks for the call.
    pub(crate) fn line(&self) -> String {
        let Call { tool, mark, ms, ticks } = self;
        let count = if *tool == Tool::Ticks { format!(", \"count\": {ticks}") } else { String::new() };
        format!("call {} {{\"mark\": \"{mark}\", \"ms\": {ms}{count}}}", tool.name())
    }
}

/// Returns what is missing or doubled in the histories of a thread (the first one) and its children.
pub(crate) fn violations(thread: &str, calls: &[Call], histories: &[Vec<Value>]) -> Vec<String> {
    let Some((root, children)) = histories.split_first() else {
        return vec![format!("{thread} has no history")];
    };
    let mut violations = Vec::new();
    let mut expect = |is: bool, text: String| {
        if !is {
            violations.push(format!("{thread}: {text}"));
        }
    };
    for call in calls {
        let mark = format!("\"{}\"", call.mark);
        let asked = root
            .iter()
            .filter(|entry| entry["kind"] == "user" && text(&entry["text"]).contains(&mark))
            .count();
        expect(asked == 1, format!("the message with {mark} is there {asked} times"));
        let made: Vec<&Value> = calls_in(root)
            .filter(|made| made["synthetic"] != true && made["arguments"]["mark"] == call.mark)
            .collect();
        expect(made.len() == 1, format!("{mark} was called {} times", made.len()));
        let Some(id) = made.first().map(|made| &made["id"]) else { continue };
        let own = results(root).filter(|result| result["call_id"] == *id).count();
        expect(own == 1, format!("the call of {mark} has {own} results"));
        let outcomes = outcomes(root, call);
        expect(outcomes == 1, format!("{mark} has {outcomes} outcomes"));
    }
    for call in calls.iter().filter(|call| call.tool == Tool::Ticks && confirmed(root, call)) {
        for number in 1..=call.ticks {
            let event = format!("tick {} {number};", call.mark);
            let own = children.iter().flatten().filter(|entry| !root.contains(entry));
            let seen: usize = results(root.iter().chain(own))
                .map(|result| text(&result["content"]).matches(&event).count())
                .sum();
            expect(seen == 1, format!("{event:?} arrived {seen} times"));
        }
    }
    violations
}

fn calls_in(history: &[Value]) -> impl Iterator<Item = &Value> {
    history.iter().filter_map(|entry| entry["calls"].as_array()).flatten()
}

fn results<'a>(history: impl IntoIterator<Item = &'a Value>) -> impl Iterator<Item = &'a Value> {
    history.into_iter().filter(|entry| entry["kind"] == "result")
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn confirmed(root: &[Value], call: &Call) -> bool {
    let done = format!("done {};", call.mark);
    results(root).any(|result| text(&result["content"]).contains(&done))
}

/// Counts the outcomes of a call: its result, which may come late, or an error where the tool permits one.
fn outcomes(root: &[Value], call: &Call) -> usize {
    let done = format!("done {};", call.mark);
    let good: usize = results(root).map(|result| text(&result["content"]).matches(&done).count()).sum();
    let permits_error = matches!(call.tool, Tool::Once | Tool::Ticks);
    if good > 0 || !permits_error {
        return good;
    }
    let ids: Vec<&Value> = calls_in(root)
        .filter(|made| made["arguments"]["mark"] == call.mark)
        .map(|made| &made["id"])
        .collect();
    results(root)
        .filter(|result| ids.contains(&&result["call_id"]) && text(&result["content"]).starts_with("Error"))
        .count()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn calls() -> Vec<Call> {
        let call = |tool: Tool, ticks| Call { tool, mark: format!("{}1", tool.name()), ms: 0, ticks };
        vec![call(Tool::Once, 0), call(Tool::Ticks, 2)]
    }

    fn root() -> Vec<Value> {
        let made =
            |name: &str, id: &str| json!({"id": id, "name": name, "arguments": {"mark": format!("{name}1")}});
        vec![
            json!({"seq": 1, "kind": "user", "text": calls().iter().map(Call::line).collect::<Vec<_>>().join("\n")}),
            json!({"seq": 2, "kind": "assistant", "calls": [made("once", "a"), made("ticks", "b")]}),
            json!({"seq": 3, "kind": "result", "call_id": "a", "content": "done once1;"}),
            json!({"seq": 4, "kind": "result", "call_id": "b", "content": "done ticks1;"}),
        ]
    }

    fn child() -> Vec<Value> {
        let mut history = root();
        history.push(json!({"seq": 5, "kind": "result", "synthetic": true, "call_id": "c", "content": "tick ticks1 1;"}));
        history.push(json!({"seq": 6, "kind": "result", "synthetic": true, "call_id": "d", "content": "tick ticks1 2;"}));
        history
    }

    /// Checks that a change of the histories is noticed.
    fn noticed(change: impl Fn(&mut Vec<Value>, &mut Vec<Value>)) -> String {
        let (mut root, mut child) = (root(), child());
        change(&mut root, &mut child);
        violations("t", &calls(), &[root, child]).join("; ")
    }

    #[test]
    fn a_complete_conversation_has_no_violation() {
        assert_eq!(noticed(|_, _| {}), "");
    }

    #[test]
    fn a_call_that_is_not_restartable_may_end_in_an_error() {
        let failed = |root: &mut Vec<Value>, _: &mut Vec<Value>| {
            root[2]["content"] = json!("Error: the outcome is unknown")
        };
        assert_eq!(noticed(failed), "");
    }

    #[test]
    fn what_is_lost_or_doubled_is_noticed() {
        assert_eq!(
            noticed(|root, _| drop(root.remove(2))),
            "t: the call of \"once1\" has 0 results; t: \"once1\" has 0 outcomes"
        );
        let doubled = noticed(|root, _| root.push(root[2].clone()));
        assert_eq!(doubled, "t: the call of \"once1\" has 2 results; t: \"once1\" has 2 outcomes");
        assert!(noticed(|root, _| root.push(root[0].clone())).contains("is there 2 times"));
        assert!(noticed(|root, _| root.push(root[1].clone())).contains("was called 2 times"));
        assert_eq!(noticed(|_, child| drop(child.pop())), "t: \"tick ticks1 2;\" arrived 0 times");
        let again = json!({"seq": 9, "kind": "result", "synthetic": true, "content": "tick ticks1 1;"});
        assert_eq!(noticed(|root, _| root.push(again.clone())), "t: \"tick ticks1 1;\" arrived 2 times");
    }
}
