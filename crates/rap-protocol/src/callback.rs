//! Callbacks: what a tool says to the runtime, POSTed to the callback URL of the call.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::content::{Content, Segment, contents, segments};
use crate::invalid::{Invalid, describe, quote};
use crate::read::{self, Object};
use crate::url::{AuthUrl, ResponseUrl};
use crate::{Address, CallId, EventId, ThreadId, limits};

/// Every error result begins with this.
pub const ERROR_PREFIX: &str = "Error: ";

/// A message from a tool.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Callback {
    /// The result of a call, or the confirmation of a subscription.
    ToolResult(ToolResult),
    /// Something happened that the agent had subscribed to.
    SubscriptionEvent(SubscriptionEvent),
    /// The user has to authorise the tool first.
    Oauth(Oauth),
    /// The user has to choose.
    UserChoice(UserChoice),
    /// Something for people to look at.
    ViewUpdate(ViewUpdate),
}

/// The result of a call. There is no error type: an error is a text that begins with [`ERROR_PREFIX`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolResult {
    /// The thread of the call.
    pub group_id: ThreadId,
    /// The call.
    pub id: CallId,
    /// The invocation's secondary id, where it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// What the model sees.
    #[serde(flatten)]
    pub body: Body,
    /// What people see instead: the first segment that their client can show.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub display_as: Vec<Segment>,
    /// Whether the call is a subscription from now on.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub subscription: bool,
}

/// What the model sees of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Body {
    /// Plain text.
    Text(String),
    /// Several items, images among them.
    Content(Vec<Content>),
}

impl ToolResult {
    /// A result for the call at this address.
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

    /// An error result for the call at this address.
    pub fn error(address: &Address, message: &str) -> Self {
        ToolResult::new(address, Body::Text(format!("{ERROR_PREFIX}{message}")))
    }
}

/// An event of a subscription.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SubscriptionEvent {
    /// The thread of the subscription.
    pub group_id: ThreadId,
    /// The call that subscribed.
    pub tool_call_id: CallId,
    /// What happened; JSON where it is structured.
    pub text: String,
    /// Whether it belongs into the subscribing thread itself.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub associative: bool,
    /// Whether it is the last one.
    #[serde(rename = "final", skip_serializing_if = "std::ops::Not::not")]
    pub is_final: bool,
    /// Deliveries with the same id are the same event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_id: Option<EventId>,
}

/// A request for the user's authorisation; the call stays pending.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Oauth {
    /// The thread of the call.
    pub group_id: ThreadId,
    /// The call.
    pub id: CallId,
    /// The invocation's secondary id, where it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// Where the user goes.
    pub auth_url: AuthUrl,
}

/// A question to the user; the call stays pending.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UserChoice {
    /// The thread of the call.
    pub group_id: ThreadId,
    /// The call.
    pub id: CallId,
    /// The invocation's secondary id, where it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// The question.
    pub prompt: String,
    /// The possible answers, at least one.
    pub choices: Vec<String>,
    /// The one that is taken when the user dismisses the question.
    pub default: usize,
    /// Where the answer goes, as a [`ChoiceAnswer`].
    pub response_url: ResponseUrl,
}

/// The user's answer to a [`UserChoice`], POSTed to its `response_url`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChoiceAnswer {
    /// The call that asked.
    pub id: CallId,
    /// The index of the choice.
    pub selected: usize,
}

/// Something for people to look at; it never reaches the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ViewUpdate {
    /// The thread.
    pub group_id: ThreadId,
    /// Which view; the latest content of each type counts.
    pub view_type: String,
    /// What it shows.
    pub content: Value,
}

impl Callback {
    /// The thread that the message is for.
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

/// Parses and validates the answer to a question that had this many choices.
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

/// `content` wins where both are given.
fn body(object: &mut Object<'_>) -> Result<Body, Invalid> {
    if !object.is_empty_of("content") {
        return contents(object).map(Body::Content);
    }
    if object.is_empty_of("text") {
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
    // `null` is content as well; only an absent field is a mistake.
    let content = object.content()?;
    Ok(ViewUpdate { group_id, view_type, content })
}
