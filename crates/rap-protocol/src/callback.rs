//! Callbacks: messages from a tool to the runtime, POSTed to the callback URL of a call.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::content::{Content, Segment, contents, segments};
use crate::invalid::{Invalid, describe, quote};
use crate::read::{self, Object};
use crate::url::{AuthUrl, ResponseUrl};
use crate::{Address, CallId, EventId, ThreadId, limits};

/// Prefix of the text of every error result.
pub const ERROR_PREFIX: &str = "Error: ";

/// Message from a tool to the runtime.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Callback {
    /// Result of a call, or confirmation of a subscription.
    ToolResult(ToolResult),
    /// Event of a subscription.
    SubscriptionEvent(SubscriptionEvent),
    /// Request for the user's authorization.
    Oauth(Oauth),
    /// Question to the user.
    UserChoice(UserChoice),
    /// Content for a client's user interface.
    ViewUpdate(ViewUpdate),
}

/// Result of a call. There is no separate error type: an error is a text that begins with [`ERROR_PREFIX`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolResult {
    /// Thread of the call.
    pub group_id: ThreadId,
    /// Id of the call.
    pub id: CallId,
    /// Secondary id of the invocation; `None` if it had none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// Content for the model.
    #[serde(flatten)]
    pub body: Body,
    /// Representations for users. A client shows the first one that it supports; if the list is empty, it shows `body`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub display_as: Vec<Segment>,
    /// True if the call becomes a subscription with this result.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub subscription: bool,
}

/// Content of a result for the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Body {
    /// Plain text.
    Text(String),
    /// List of texts and images.
    Content(Vec<Content>),
}

impl ToolResult {
    /// Creates a result for the call with this address.
    pub fn new(address: &Address, body: Body) -> Self {
        ToolResult {
            group_id: address.group_id.clone(),
            id: address.id.clone(),
            call_id: address.call_id.clone(),
            body,
            display_as: Vec::new(),
            subscription: false,
        }
    }

    /// Creates an error result for the call with this address.
    pub fn error(address: &Address, message: &str) -> Self {
        ToolResult::new(address, Body::Text(format!("{ERROR_PREFIX}{message}")))
    }
}

/// Event of a subscription.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SubscriptionEvent {
    /// Thread of the subscription.
    pub group_id: ThreadId,
    /// Id of the call that created the subscription.
    pub tool_call_id: CallId,
    /// Description of the event; JSON if it is structured.
    pub text: String,
    /// True if the event is handled in the subscribing thread, false if in an event child.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub associative: bool,
    /// True if this is the last event of the subscription.
    #[serde(rename = "final", skip_serializing_if = "std::ops::Not::not")]
    pub is_final: bool,
    /// Id for deduplication: deliveries with the same id are the same event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_id: Option<EventId>,
}

/// Request for the user's authorization. The call stays open.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Oauth {
    /// Thread of the call.
    pub group_id: ThreadId,
    /// Id of the call.
    pub id: CallId,
    /// Secondary id of the invocation; `None` if it had none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// Page that the user opens to authorize the tool.
    pub auth_url: AuthUrl,
}

/// Question to the user. The call stays open.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UserChoice {
    /// Thread of the call.
    pub group_id: ThreadId,
    /// Id of the call.
    pub id: CallId,
    /// Secondary id of the invocation; `None` if it had none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// Text of the question.
    pub prompt: String,
    /// Possible answers, at least one.
    pub choices: Vec<String>,
    /// Index of the choice that is used if the user dismisses the question.
    pub default: usize,
    /// URL to which the [`ChoiceAnswer`] is posted.
    pub response_url: ResponseUrl,
}

/// User's answer to a [`UserChoice`], POSTed to its `response_url`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChoiceAnswer {
    /// Id of the call that asked the question.
    pub id: CallId,
    /// Index of the selected choice.
    pub selected: usize,
}

/// Content for a client's user interface. It never reaches the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ViewUpdate {
    /// Thread that the view belongs to.
    pub group_id: ThreadId,
    /// Name of the view. New content replaces earlier content of the same type.
    pub view_type: String,
    /// Content of the view, any JSON value.
    pub content: Value,
}

impl Callback {
    /// Returns the thread that the message is for.
    pub fn group_id(&self) -> &ThreadId {
        match self {
            Callback::ToolResult(message) => &message.group_id,
            Callback::SubscriptionEvent(message) => &message.group_id,
            Callback::Oauth(message) => &message.group_id,
            Callback::UserChoice(message) => &message.group_id,
            Callback::ViewUpdate(message) => &message.group_id,
        }
    }
}

/// Parses and validates a callback.
pub fn parse_callback(bytes: &[u8]) -> Result<Callback, Invalid> {
    let mut object = read::message(bytes)?;
    let kind = object.string("type", limits::BODY_BYTES)?;
    match kind.as_str() {
        "tool_result" => tool_result(&mut object).map(Callback::ToolResult),
        "subscription_event" => subscription_event(&mut object).map(Callback::SubscriptionEvent),
        "oauth" => oauth(&mut object).map(Callback::Oauth),
        "user_choice" => user_choice(&mut object).map(Callback::UserChoice),
        "view_update" => view_update(&mut object).map(Callback::ViewUpdate),
        other => {
            let expected = "tool_result, subscription_event, oauth, user_choice or view_update";
            Err(object.value("type", expected, quote(other)))
        }
    }
}

/// Parses and validates the answer to a question with `choices` choices.
pub fn parse_choice_answer(bytes: &[u8], choices: usize) -> Result<ChoiceAnswer, Invalid> {
    let mut object = read::message(bytes)?;
    Ok(ChoiceAnswer { id: object.id("id")?, selected: object.index("selected", choices)? })
}

fn tool_result(object: &mut Object<'_>) -> Result<ToolResult, Invalid> {
    Ok(ToolResult {
        group_id: object.id("group_id")?,
        id: object.id("id")?,
        call_id: object.optional_id("call_id")?,
        body: body(object)?,
        display_as: segments(object)?,
        subscription: object.optional_bool("subscription")?.unwrap_or(false),
    })
}

/// If both `content` and `text` are given, `content` is used.
fn body(object: &mut Object<'_>) -> Result<Body, Invalid> {
    if !object.is_absent("content") {
        return contents(object).map(Body::Content);
    }
    if object.is_absent("text") {
        return Err(Invalid::shape(object.path(), "`text` or `content`", "neither"));
    }
    object.string("text", limits::BODY_BYTES).map(Body::Text)
}

fn subscription_event(object: &mut Object<'_>) -> Result<SubscriptionEvent, Invalid> {
    Ok(SubscriptionEvent {
        group_id: object.id("group_id")?,
        tool_call_id: object.id("tool_call_id")?,
        text: object.string("text", limits::BODY_BYTES)?,
        associative: object.optional_bool("associative")?.unwrap_or(false),
        is_final: object.optional_bool("final")?.unwrap_or(false),
        event_id: object.optional_id("event_id")?,
    })
}

fn oauth(object: &mut Object<'_>) -> Result<Oauth, Invalid> {
    Ok(Oauth {
        group_id: object.id("group_id")?,
        id: object.id("id")?,
        call_id: object.optional_id("call_id")?,
        auth_url: object.url("auth_url")?,
    })
}

fn user_choice(object: &mut Object<'_>) -> Result<UserChoice, Invalid> {
    let choices = choices(object)?;
    Ok(UserChoice {
        group_id: object.id("group_id")?,
        id: object.id("id")?,
        call_id: object.optional_id("call_id")?,
        prompt: object.string("prompt", limits::PROMPT_BYTES)?,
        default: object.index("default", choices.len())?,
        choices,
        response_url: object.url("response_url")?,
    })
}

fn choices(object: &mut Object<'_>) -> Result<Vec<String>, Invalid> {
    let items = object.array("choices", limits::CHOICES)?;
    if items.is_empty() {
        return Err(object.value("choices", "at least one choice", "none"));
    }
    let path = object.path().field("choices");
    let choice = |(index, item)| match item {
        Value::String(text) if text.len() <= limits::CHOICE_BYTES => Ok(text),
        Value::String(text) => {
            let expected = format!("at most {} bytes", limits::CHOICE_BYTES);
            Err(Invalid::value(&path.item(index), expected, format!("{} bytes", text.len())))
        }
        other => Err(Invalid::shape(&path.item(index), "a string", describe(&other))),
    };
    items.into_iter().enumerate().map(choice).collect()
}

fn view_update(object: &mut Object<'_>) -> Result<ViewUpdate, Invalid> {
    let view_type = object.string("view_type", limits::BODY_BYTES)?;
    let fits = (1..=limits::NAME_CHARS).contains(&view_type.chars().count());
    if !fits || view_type.chars().any(char::is_control) {
        let expected = "1 to 128 characters without control characters";
        return Err(object.value("view_type", expected, quote(&view_type)));
    }
    let group_id = object.id("group_id")?;
    // `null` is valid content; only an absent field is an error.
    let content = object.content()?;
    Ok(ViewUpdate { group_id, view_type, content })
}
