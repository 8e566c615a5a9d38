//! Strict models of what providers accept. They share no code with the builders of requests, and are stricter than any
//! real server, so that a request that passes here is accepted by all known servers.

// Each test program uses a different part of this module.
#![allow(dead_code)]

use std::collections::HashSet;

use serde_json::{Map, Value};

type Checked = Result<(), String>;

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(why()) }
}

fn object<'a>(value: &'a Value, keys: &[&str]) -> Result<&'a Map<String, Value>, String> {
    let object = value.as_object().ok_or_else(|| format!("not an object: {value}"))?;
    for key in object.keys() {
        ensure(keys.contains(&key.as_str()), || format!("unexpected key {key} in {value}"))?;
    }
    Ok(object)
}

fn array<'a>(value: &'a Value, key: &str) -> Result<&'a Vec<Value>, String> {
    let list = value[key].as_array().ok_or_else(|| format!("{key} is not an array in {value}"))?;
    ensure(!list.is_empty(), || format!("{key} is empty in {value}"))?;
    Ok(list)
}

fn string<'a>(value: &'a Value, key: &str) -> Result<&'a str, String> {
    value[key].as_str().ok_or_else(|| format!("{key} is not a string in {value}"))
}

fn non_blank(value: &Value, key: &str) -> Checked {
    let text = string(value, key)?;
    ensure(!text.trim().is_empty(), || format!("{key} is blank in {value}"))?;
    ensure(!text.contains('\0'), || format!("{key} holds a NUL"))
}

fn plain(value: &Value, key: &str, longest: usize) -> Checked {
    let text = string(value, key)?;
    let rest = text.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    ensure(rest.is_empty() && !text.is_empty() && text.len() <= longest, || format!("bad {key} {text:?}"))
}

fn image(media_type: &str, data: &str) -> Checked {
    let known = ["image/jpeg", "image/png", "image/gif", "image/webp"].contains(&media_type);
    ensure(known, || format!("bad media type {media_type:?}"))?;
    let groups: Vec<_> = data.as_bytes().chunks(4).collect();
    ensure(!groups.is_empty() && data.len() <= 5_242_880, || "an image is empty or too large".into())?;
    for (index, group) in groups.iter().enumerate() {
        let tail =
            if index + 1 == groups.len() { group.iter().filter(|byte| **byte == b'=').count() } else { 0 };
        let body = &group[..group.len() - tail.min(2)];
        let good = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'+' || *byte == b'/';
        ensure(group.len() == 4 && body.iter().all(good), || "an image is not base64".into())?;
    }
    Ok(())
}

/// Form of call ids, and whether a server accepts fields of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Plain ids, and no other fields.
    Usual,
    /// Ids of nine letters and digits, and fields that the server sent.
    Short,
}

/// Checks that a body for `/chat/completions`, without model and settings, is accepted.
pub fn openai_accepts(body: &Value) -> Checked {
    openai_accepts_with(body, Form::Usual)
}

/// Checks the same for a server with ids and fields of its own.
pub fn openai_accepts_with(body: &Value, form: Form) -> Checked {
    object(body, &["messages", "tools"])?;
    if body.get("tools").is_some() {
        openai_tools(array(body, "tools")?)?;
    }
    let messages = array(body, "messages")?;
    let mut ids = HashSet::new();
    let mut waiting: HashSet<&str> = HashSet::new();
    let mut last = "system";
    for (index, message) in messages.iter().enumerate() {
        let role = string(message, "role")?;
        if role == "tool" {
            object(message, &["role", "tool_call_id", "content"])?;
            non_blank(message, "content")?;
            let id = string(message, "tool_call_id")?;
            ensure(waiting.remove(id), || format!("a result without a call: {id}"))?;
            last = role;
            continue;
        }
        ensure(waiting.is_empty(), || format!("calls without results before message {index}: {waiting:?}"))?;
        match role {
            "system" => {
                object(message, &["role", "content"])?;
                ensure(index == 0, || "the system message is not the first".into())?;
                non_blank(message, "content")?;
            }
            "user" => {
                ensure(last != "user", || "two user messages in a row".into())?;
                openai_user(message)?;
            }
            "assistant" => {
                ensure(last == "user" || last == "tool", || format!("an assistant message after {last}"))?;
                for id in openai_assistant(message, form)? {
                    ensure(ids.insert(id), || format!("the id {id} is not unique"))?;
                    waiting.insert(id);
                }
            }
            other => return Err(format!("bad role {other}")),
        }
        last = role;
    }
    ensure(waiting.is_empty(), || format!("calls without results at the end: {waiting:?}"))?;
    ensure(last == "user" || last == "tool", || format!("the last message is of role {last}"))
}

fn openai_user(message: &Value) -> Checked {
    object(message, &["role", "content"])?;
    if message["content"].is_string() {
        return non_blank(message, "content");
    }
    for part in array(message, "content")? {
        if part["type"] == "text" {
            object(part, &["type", "text"])?;
            non_blank(part, "text")?;
            continue;
        }
        ensure(part["type"] == "image_url", || format!("bad part {part}"))?;
        object(part, &["type", "image_url"])?;
        let url = string(object(&part["image_url"], &["url"]).map(|_| &part["image_url"])?, "url")?;
        let data = url.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,"));
        let (media_type, data) = data.ok_or("not a data URL")?;
        image(media_type, data)?;
    }
    Ok(())
}

fn openai_assistant(message: &Value, form: Form) -> Result<Vec<&str>, String> {
    let own = |keys: &[&'static str]| match form {
        Form::Usual => keys.to_vec(),
        Form::Short => {
            [keys, &["reasoning_content", "extra_content", "id", "role", "tool_calls"][..]].concat()
        }
    };
    object(message, &own(&["role", "content", "tool_calls"]))?;
    if message.get("tool_calls").is_none() {
        non_blank(message, "content")?;
        return Ok(Vec::new());
    }
    if !message["content"].is_null() {
        non_blank(message, "content")?;
    }
    let calls = array(message, "tool_calls")?;
    ensure(calls.len() <= 128, || "too many calls".into())?;
    let mut ids = Vec::new();
    for call in calls {
        object(call, &own(&["id", "type", "function"]))?;
        let id = string(call, "id")?;
        let is_short = id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        ensure(form == Form::Usual || is_short, || format!("the id {id} is not short"))?;
        ensure(call["type"] == "function", || format!("bad call {call}"))?;
        object(&call["function"], &["name", "arguments"])?;
        plain(&call["function"], "name", 64)?;
        plain(call, "id", 40)?;
        let arguments = string(&call["function"], "arguments")?;
        serde_json::from_str::<Map<String, Value>>(arguments)
            .map_err(|error| format!("arguments: {error}"))?;
        ensure(!arguments.contains("\\u0000"), || format!("arguments hold a NUL: {arguments}"))?;
        ids.push(string(call, "id")?);
    }
    Ok(ids)
}

fn openai_tools(tools: &[Value]) -> Checked {
    ensure(tools.len() <= 128, || "too many tools".into())?;
    let mut names = HashSet::new();
    for tool in tools {
        object(tool, &["type", "function"])?;
        ensure(tool["type"] == "function", || format!("bad tool {tool}"))?;
        let function = &tool["function"];
        object(function, &["name", "description", "parameters"])?;
        plain(function, "name", 64)?;
        ensure(names.insert(string(function, "name")?), || format!("a tool name is not unique: {function}"))?;
        if function.get("description").is_some() {
            non_blank(function, "description")?;
            ensure(string(function, "description")?.chars().count() <= 1024, || {
                "a description is too long".into()
            })?;
        }
        top_schema(&function["parameters"])?;
        schema(&function["parameters"], false)?;
    }
    Ok(())
}

/// Checks that a body for `/responses`, without model and settings, is accepted.
pub fn responses_accepts(body: &Value) -> Checked {
    object(body, &["input", "tools", "instructions"])?;
    if body.get("instructions").is_some() {
        non_blank(body, "instructions")?;
    }
    for tool in body["tools"].as_array().into_iter().flatten() {
        object(tool, &["type", "name", "description", "parameters", "strict"])?;
        ensure(tool["type"] == "function" && tool["strict"] == false, || format!("bad tool {tool}"))?;
        plain(tool, "name", 64)?;
        top_schema(&tool["parameters"])?;
    }
    let (mut ids, mut waiting) = (HashSet::new(), HashSet::new());
    let items = array(body, "input")?;
    for (index, item) in items.iter().enumerate() {
        let kind = item["type"].as_str().unwrap_or("message");
        let answers = ["function_call", "function_call_output", "reasoning"].contains(&kind);
        ensure(answers || waiting.is_empty(), || format!("calls without results before item {index}"))?;
        match kind {
            "function_call" => {
                object(item, &["type", "call_id", "name", "arguments"])?;
                plain(item, "call_id", 64)?;
                plain(item, "name", 64)?;
                serde_json::from_str::<Map<String, Value>>(string(item, "arguments")?)
                    .map_err(|error| format!("arguments: {error}"))?;
                let id = string(item, "call_id")?;
                ensure(ids.insert(id), || format!("the id {id} is not unique"))?;
                waiting.insert(id);
            }
            "function_call_output" => {
                object(item, &["type", "call_id", "output"])?;
                non_blank(item, "output")?;
                let id = string(item, "call_id")?;
                ensure(waiting.remove(id), || format!("a result without a call: {id}"))?;
            }
            "reasoning" => {
                let next = items.get(index + 1).ok_or("reasoning at the end")?;
                let follows = ["function_call", "reasoning"].map(|kind| next["type"] == kind).contains(&true)
                    || next["role"] == "assistant";
                ensure(follows, || format!("reasoning before {next}"))?;
            }
            "message" if item["role"] == "assistant" => {
                object(item, &["role", "content"])?;
                non_blank(item, "content")?;
            }
            "message" => {
                object(item, &["type", "role", "content"])?;
                ensure(item["role"] == "user", || format!("bad role in {item}"))?;
                array(item, "content")?.iter().try_for_each(responses_part)?;
            }
            other => return Err(format!("bad item {other}")),
        }
    }
    ensure(waiting.is_empty(), || format!("calls without results at the end: {waiting:?}"))?;
    let last = items.last().ok_or("no items")?;
    ensure(last["role"] == "user" || last["type"] == "function_call_output", || format!("{last} at the end"))
}

fn responses_part(part: &Value) -> Checked {
    if part["type"] == "input_text" {
        object(part, &["type", "text"])?;
        return non_blank(part, "text");
    }
    object(part, &["type", "image_url", "detail"])?;
    ensure(part["type"] == "input_image" && part["detail"] == "auto", || format!("bad part {part}"))?;
    let data = string(part, "image_url")?.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,"));
    let (media_type, data) = data.ok_or("not a data URL")?;
    image(media_type, data)
}

fn top_schema(top: &Value) -> Checked {
    ensure(top["type"] == "object", || format!("the schema's type: {top}"))?;
    ensure(top["properties"].is_object(), || format!("the schema has no properties: {top}"))?;
    for keyword in ["oneOf", "anyOf", "allOf", "enum", "const", "not", "$ref"] {
        ensure(top.get(keyword).is_none(), || format!("{keyword} at the top of {top}"))?;
    }
    Ok(())
}

fn schema(part: &Value, plain_keys: bool) -> Checked {
    let keywords = part.as_object().ok_or_else(|| format!("not an object as schema: {part}"))?;
    let is_array =
        part["type"] == "array" || part["type"].as_array().is_some_and(|t| t.contains(&"array".into()));
    ensure(!is_array || keywords.contains_key("items"), || format!("an array without items: {part}"))?;
    if let Some(items) = keywords.get("items") {
        schema(items, plain_keys)?;
    }
    for list in ["oneOf", "anyOf", "allOf"] {
        for one in keywords.get(list).and_then(Value::as_array).into_iter().flatten() {
            schema(one, plain_keys)?;
        }
    }
    for (key, one) in keywords.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let good = key.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b));
        let fits = good && !key.is_empty() && key.len() <= 64;
        ensure(fits || !plain_keys, || format!("a bad key {key:?}"))?;
        schema(one, plain_keys)?;
    }
    Ok(())
}

/// Thinking mode of the model, which determines the rules for thinking blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking {
    Off,
    Optional,
    Always,
}

/// Checks that a body for `/v1/messages`, without model and settings, is accepted.
pub fn anthropic_accepts(body: &Value, thinking: Thinking) -> Checked {
    object(body, &["messages", "tools", "system"])?;
    if body.get("system").is_some() {
        for block in array(body, "system")? {
            object(block, &["type", "text", "cache_control"])?;
            ensure(block["type"] == "text", || format!("bad block {block}"))?;
            non_blank(block, "text")?;
        }
    }
    let marks = body.to_string().matches("\"cache_control\":{\"type\":\"ephemeral\"}").count();
    ensure(marks <= 4, || format!("{marks} cache breakpoints"))?;
    if body.get("tools").is_some() {
        anthropic_tools(array(body, "tools")?)?;
    }
    let mut ids = HashSet::new();
    let mut waiting = HashSet::new();
    let messages = array(body, "messages")?;
    for (index, message) in messages.iter().enumerate() {
        object(message, &["role", "content"])?;
        let expected = if index % 2 == 0 { "user" } else { "assistant" };
        ensure(message["role"] == expected, || format!("message {index} is not of role {expected}"))?;
        let content = array(message, "content")?;
        if expected == "user" {
            anthropic_user(content, &mut waiting)?;
            ensure(waiting.is_empty(), || format!("calls without results: {waiting:?}"))?;
        } else {
            waiting = anthropic_assistant(content, thinking)?;
            for id in &waiting {
                ensure(ids.insert(*id), || format!("the id {id} is not unique"))?;
            }
        }
    }
    ensure(messages.len() % 2 == 1, || "the last message is the assistant's".into())?;
    if thinking == Thinking::Always {
        begins_with_thinking(messages)?;
    }
    ensure(ids.is_empty() || body.get("tools").is_some(), || "calls without tools".into())
}

fn has(message: &Value, kind: &str) -> bool {
    message["content"].as_array().is_some_and(|blocks| blocks.iter().any(|block| block["type"] == kind))
}

/// Checks that results at the end belong to a turn that begins with thinking. A turn may be taken to begin after the last
/// user message with a text or after the last one without results; the rule holds for both.
fn begins_with_thinking(messages: &[Value]) -> Checked {
    if messages.last().is_none_or(|last| !has(last, "tool_result")) {
        return Ok(());
    }
    let users = || (0..messages.len() - 1).rev().step_by(2).map(|at| at - 1);
    let begins = [
        users().find(|at| has(&messages[*at], "text")),
        users().find(|at| !has(&messages[*at], "tool_result")),
    ];
    for begin in begins {
        let first = &messages[begin.ok_or("no turn begins")? + 1]["content"][0]["type"];
        let thought = first == "thinking" || first == "redacted_thinking";
        ensure(thought, || format!("results in a turn that begins with {first}"))?;
    }
    Ok(())
}

fn anthropic_user(content: &[Value], waiting: &mut HashSet<&str>) -> Checked {
    let mut texts = 0;
    for block in content {
        match string(block, "type")? {
            "text" => {
                object(block, &["type", "text", "cache_control"])?;
                non_blank(block, "text")?;
                texts += 1;
            }
            "tool_result" => {
                ensure(texts == 0, || "a text before a result".into())?;
                object(block, &["type", "tool_use_id", "content", "cache_control"])?;
                let id = string(block, "tool_use_id")?;
                ensure(waiting.remove(id), || format!("a result without a call: {id}"))?;
                array(block, "content")?.iter().try_for_each(anthropic_result)?;
            }
            other => return Err(format!("bad block {other}")),
        }
    }
    Ok(())
}

fn anthropic_result(block: &Value) -> Checked {
    if block["type"] == "text" {
        object(block, &["type", "text"])?;
        return non_blank(block, "text");
    }
    ensure(block["type"] == "image", || format!("bad block {block}"))?;
    object(block, &["type", "source"])?;
    let source = &block["source"];
    object(source, &["type", "media_type", "data"])?;
    ensure(source["type"] == "base64", || format!("bad source {source}"))?;
    image(string(source, "media_type")?, string(source, "data")?)
}

fn anthropic_assistant(content: &[Value], thinking: Thinking) -> Result<HashSet<&str>, String> {
    let mut ids = HashSet::new();
    let last = content.last().map(|block| &block["type"]);
    ensure(last.is_some_and(|last| last == "text" || last == "tool_use"), || format!("{last:?} at the end"))?;
    for block in content {
        match string(block, "type")? {
            "text" => {
                object(block, &["type", "text", "cache_control"])?;
                ensure(ids.is_empty(), || "a text after a call".into())?;
                non_blank(block, "text")?;
            }
            "thinking" | "redacted_thinking" => {
                ensure(thinking != Thinking::Off, || "thinking of a model that does not think".into())?;
                let proof = if block["type"] == "thinking" { "signature" } else { "data" };
                object(block, &["type", "thinking", proof])?;
                ensure(!string(block, proof)?.is_empty(), || format!("no {proof} in {block}"))?;
            }
            "tool_use" => {
                object(block, &["type", "id", "name", "input"])?;
                plain(block, "id", 64)?;
                plain(block, "name", 64)?;
                ensure(block["input"].is_object(), || format!("bad input in {block}"))?;
                ensure(ids.insert(string(block, "id")?), || format!("an id is not unique: {block}"))?;
            }
            other => return Err(format!("bad block {other}")),
        }
    }
    Ok(ids)
}

fn anthropic_tools(tools: &[Value]) -> Checked {
    let mut names = HashSet::new();
    for tool in tools {
        object(tool, &["name", "description", "input_schema", "cache_control"])?;
        plain(tool, "name", 64)?;
        ensure(names.insert(string(tool, "name")?), || format!("a tool name is not unique: {tool}"))?;
        if tool.get("description").is_some() {
            non_blank(tool, "description")?;
        }
        top_schema(&tool["input_schema"])?;
        schema(&tool["input_schema"], true)?;
    }
    Ok(())
}
