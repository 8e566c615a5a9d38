//! Waiting for a call: questions to the user, progress, and what happens when it takes long.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rap_protocol::ERROR_PREFIX;
use rmcp::model::{
    CallToolResponse, CallToolResult, ContentBlock, CreateTaskResult, ElicitRequest, ElicitResult,
    InputRequest, InputRequests, InputRequiredResult, InputResponses, ProgressNotificationParam,
    ProgressToken, Task,
};
use rmcp::service::{Peer, RequestContext, ServiceError};
use rmcp::task_manager::{TaskContext, TaskExit, TaskOptions};
use rmcp::{ErrorData, RoleServer};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::bridge::{Bridge, TASK_TTL, Waiting};
use super::call::{Call, Change, Progress, Question};
use super::convert::{self, Abilities, PersonsAnswer};
use super::random_hex;
use super::session::{NotStarted, Running, uri};

/// Time that a person has for an answer. After that, the question counts as dismissed.
pub(super) const QUESTION_TIME: Duration = Duration::from_secs(30 * 60);
/// Pause between two notifications that a call is still running.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Maximum time to send the last progress of a call before its result.
const LAST_PROGRESS: Duration = Duration::from_secs(1);
/// Pause that a client should make between two requests for the state of a task.
pub(super) const POLL_MS: u64 = 1_000;
/// Smallest increase of progress. Each notification must have a greater number than the last one.
const PROGRESS_STEP: f64 = 1e-6;
/// Name of the question in requests for input.
const QUESTION: &str = "question";

/// Calls whose client has to send its request again with an answer, by the text that identifies the request.
#[derive(Clone, Default)]
pub(super) struct Parked(Arc<Mutex<HashMap<String, (Running, Question)>>>);

impl Parked {
    /// Keeps a call until its request is repeated. It is cancelled if that does not happen in time.
    fn park(&self, running: Running, question: Question) -> Result<String, String> {
        let state = random_hex::<32>().map_err(|error| error.to_string())?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(state.clone(), (running, question));
        let (parked, expired) = (self.clone(), state.clone());
        tokio::spawn(async move {
            sleep(QUESTION_TIME).await;
            drop(parked.take(&expired));
        });
        Ok(state)
    }

    fn take(&self, state: &str) -> Option<(Running, Question)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(state)
    }

    /// Continues the call of a repeated request with the answers that it carries.
    pub(super) async fn resume(&self, state: &str, answers: &InputResponses) -> Result<Running, NotStarted> {
        let Some((running, question)) = self.take(state) else {
            let why = "the question of this call is not open any more; call the tool again";
            return Err(NotStarted::Failed(why.into()));
        };
        let Some(answer) = answers.get(QUESTION) else {
            running.call.ask_again(question);
            return Ok(running);
        };
        match serde_json::from_value::<ElicitResult>(answer.clone()) {
            Ok(result) => deliver(&running, &question, convert::answer(&question, &result)).await,
            Err(error) => return Err(NotStarted::Failed(format!("the answer is not valid: {error}"))),
        }
        Ok(running)
    }
}

/// Delivers the answer of a person to the tool server. A call that cannot continue gets an error result.
pub(super) async fn deliver(running: &Running, question: &Question, answer: PersonsAnswer) {
    let failed = match (question, answer) {
        (Question::Choice(choice), answer) => {
            let selected = match answer {
                PersonsAnswer::Accepted(Some(selected)) => selected,
                PersonsAnswer::Accepted(None) | PersonsAnswer::Dismissed => choice.default,
            };
            let delivered = running.server().answer(choice, selected).await;
            delivered.err().map(|why| format!("the user's answer could not be delivered to the tool: {why}"))
        }
        (Question::SignIn(_), PersonsAnswer::Accepted(_)) => None,
        (Question::SignIn(_), PersonsAnswer::Dismissed) => Some("the user did not sign in".into()),
    };
    if let Some(why) = failed {
        running.fail(format!("{ERROR_PREFIX}{why}"));
    }
}

/// A client that waits for a call.
pub(super) struct Caller<'a> {
    pub(super) bridge: &'a Bridge,
    pub(super) parked: &'a Parked,
    pub(super) abilities: Abilities,
    pub(super) context: RequestContext<RoleServer>,
}

/// Next action after a question was answered.
enum AfterQuestion {
    Continue(Running),
    Return(Box<CallToolResponse>),
}

impl Caller<'_> {
    /// Waits until the call has a result, becomes a task, or has taken too long.
    pub(super) async fn wait_for(self, mut running: Running) -> Result<CallToolResponse, ErrorData> {
        let Waiting { task_after, at_most } = self.bridge.waiting;
        let last = Instant::now() + at_most;
        let mut until = last.min(Instant::now() + task_after);
        let reporter = Reporter::start(&running.call, &self.context);
        let mut notes = Vec::new();
        loop {
            match running.call.next(until, &self.context.ct).await {
                Change::Settled(outcome) => {
                    reporter.finish().await;
                    return Ok(convert::result(&running.call, &outcome, notes, self.abilities).into());
                }
                Change::Question(question) => match self.ask(running, question, &mut notes).await {
                    AfterQuestion::Continue(call) => running = call,
                    AfterQuestion::Return(response) => return Ok(*response),
                },
                Change::StillRunning if self.abilities.tasks && self.bridge.may_create_task() => {
                    return Ok(CreateTaskResult::new(self.task(running, notes)).into());
                }
                Change::StillRunning if until < last => until = last,
                Change::StillRunning => {
                    let call = running.detach();
                    return Ok(convert::error(&format!(
                        "the call {id} has been running for {} seconds and continues. Read its result later with \
                         read_call {{\"id\": \"{id}\"}} or from the resource {uri}, or cancel it with cancel_call.",
                        at_most.as_secs(),
                        id = call.id,
                        uri = uri(&call)
                    ))
                    .into());
                }
                // Dropping the call cancels it. The client does not wait for this answer.
                Change::Cancelled => return Err(ErrorData::internal_error("the call was cancelled", None)),
            }
        }
    }

    async fn ask(&self, running: Running, question: Question, notes: &mut Vec<String>) -> AfterQuestion {
        if !self.abilities.can_show(&question) {
            return match cannot_ask(&running, &question, notes).await {
                None => AfterQuestion::Continue(running),
                Some(result) => {
                    running.detach();
                    AfterQuestion::Return(Box::new(result.into()))
                }
            };
        }
        let params = match convert::elicitation(&running.call, &question) {
            Ok(params) => params,
            Err(why) => {
                running.fail(format!("{ERROR_PREFIX}the question of the tool cannot be shown: {why}"));
                return AfterQuestion::Continue(running);
            }
        };
        if self.abilities.asks_by_result {
            let request = InputRequest::Elicitation(ElicitRequest::new(params));
            let requests = InputRequests::from([(QUESTION.to_owned(), request)]);
            return match self.parked.park(running, question) {
                Ok(state) => AfterQuestion::Return(Box::new(
                    InputRequiredResult::new(Some(requests), Some(state)).into(),
                )),
                Err(why) => AfterQuestion::Return(Box::new(convert::error(&why).into())),
            };
        }
        let elicited = tokio::select! {
            elicited = self.context.peer.create_elicitation_with_timeout(params, Some(QUESTION_TIME)) => elicited,
            // The tool does not need the answer any more.
            () = running.call.settled() => return AfterQuestion::Continue(running),
            () = self.context.ct.cancelled() => return AfterQuestion::Continue(running),
        };
        let answer = match elicited {
            Ok(result) => convert::answer(&question, &result),
            Err(error) => {
                notes.push(format!("The question of the tool was dismissed, because it failed: {error}"));
                PersonsAnswer::Dismissed
            }
        };
        deliver(&running, &question, answer).await;
        AfterQuestion::Continue(running)
    }

    /// Makes the call a task.
    fn task(&self, running: Running, notes: Vec<String>) -> Task {
        let ttl = u64::try_from(TASK_TTL.as_millis()).unwrap_or(u64::MAX);
        let message = format!("{} is running as the call {}", running.call.tool, running.call.id);
        let options =
            TaskOptions::new().with_ttl_ms(ttl).with_poll_interval_ms(POLL_MS).with_status_message(message);
        let abilities = self.abilities;
        self.bridge
            .tasks
            .spawn(options, move |context| Box::pin(run_task(context, running, notes, abilities)))
    }
}

/// Answers a question that the client cannot show. Returns a result if the call has to continue without its caller.
pub(super) async fn cannot_ask(
    running: &Running,
    question: &Question,
    notes: &mut Vec<String>,
) -> Option<CallToolResult> {
    match question {
        Question::Choice(choice) => {
            notes.push(format!(
                "The tool asked: {} This client cannot show questions, so the default was used: {}",
                choice.prompt, choice.choices[choice.default]
            ));
            deliver(running, question, PersonsAnswer::Dismissed).await;
            None
        }
        Question::SignIn(auth_url) => Some(CallToolResult::success(vec![ContentBlock::text(format!(
            "{} needs the user's permission, and this client cannot open pages. Ask the user to open {} The call goes \
             on after that; read its result with read_call {{\"id\": \"{}\"}}.",
            running.call.tool,
            auth_url.expose(),
            running.call.id
        ))])),
    }
}

/// Waits for a call as a task. Dropping it cancels the call.
async fn run_task(
    context: TaskContext,
    running: Running,
    mut notes: Vec<String>,
    abilities: Abilities,
) -> Result<CallToolResult, TaskExit> {
    let (never, until) = (CancellationToken::new(), Instant::now() + TASK_TTL);
    let mut changes = running.call.watch();
    for number in 1_u64.. {
        let change = tokio::select! {
            change = running.call.next(until, &never) => change,
            () = context.cancelled() => return Err(TaskExit::Cancelled),
            Ok(()) = changes.changed() => {
                if let Some(progress) = running.call.progress() {
                    context.set_status_message(progress.text);
                }
                continue;
            }
        };
        match change {
            Change::Settled(outcome) => {
                return Ok(convert::result(&running.call, &outcome, notes, abilities));
            }
            Change::Question(question) if abilities.can_show(&question) => {
                let params = convert::elicitation(&running.call, &question)
                    .map_err(|why| ErrorData::internal_error(why, None))?;
                let request = InputRequest::Elicitation(ElicitRequest::new(params));
                let answer = tokio::select! {
                    answer = context.request_input(format!("{QUESTION}-{number}"), request) => answer?,
                    () = running.call.settled() => continue,
                };
                let answer = serde_json::from_value::<ElicitResult>(answer)
                    .map_or(PersonsAnswer::Dismissed, |result| convert::answer(&question, &result));
                deliver(&running, &question, answer).await;
            }
            Change::Question(question) => {
                if let Question::SignIn(auth_url) = &question {
                    context.set_status_message(format!("the user has to open {}", auth_url.expose()));
                } else {
                    cannot_ask(&running, &question, &mut notes).await;
                }
            }
            Change::StillRunning | Change::Cancelled => return Err(TaskExit::Cancelled),
        }
    }
    Err(TaskExit::Cancelled)
}

/// Sends progress notifications while somebody waits for a call.
pub(super) struct Reporter(Option<JoinHandle<()>>);

impl Reporter {
    pub(super) fn start(call: &Arc<Call>, context: &RequestContext<RoleServer>) -> Reporter {
        let Some(token) = context.meta.get_progress_token() else { return Reporter(None) };
        let (call, peer) = (Arc::clone(call), context.peer.clone());
        Reporter(Some(tokio::spawn(async move {
            let mut changes = call.watch();
            let (mut last, mut known) = (f64::NEG_INFINITY, 0);
            loop {
                let is_settled = call.outcome().is_some();
                let (count, reports) = call.progress_after(known);
                known = count;
                for progress in reports {
                    if notify(&peer, &token, &mut last, Some(progress)).await.is_err() {
                        return;
                    }
                }
                if is_settled {
                    return;
                }
                let sent = tokio::select! {
                    changed = changes.changed() => changed.map_err(drop),
                    () = sleep(HEARTBEAT) => notify(&peer, &token, &mut last, call.progress()).await.map_err(drop),
                };
                if sent.is_err() {
                    return;
                }
            }
        })))
    }

    /// Waits until the last progress is sent.
    pub(super) async fn finish(mut self) {
        if let Some(task) = &mut self.0 {
            // A client that does not read gets the result without it.
            timeout(LAST_PROGRESS, task).await.ok();
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// Sends one progress notification.
async fn notify(
    peer: &Peer<RoleServer>,
    token: &ProgressToken,
    last: &mut f64,
    progress: Option<Progress>,
) -> Result<(), ServiceError> {
    let fraction = progress.as_ref().and_then(|progress| progress.fraction);
    *last = next_number(*last, fraction);
    let mut params = ProgressNotificationParam::new(token.clone(), *last);
    params.total = fraction.map(|_| 1.0);
    params.message = progress.map(|progress| progress.text).filter(|text| !text.is_empty());
    peer.notify_progress(params).await
}

/// Returns the number of a progress notification, which has to be greater than the last one.
fn next_number(last: f64, fraction: Option<f64>) -> f64 {
    let wanted = fraction.unwrap_or(0.0);
    if wanted > last { wanted } else { last + PROGRESS_STEP }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_progress_increase() {
        let first = next_number(f64::NEG_INFINITY, None);
        assert!((first - 0.0).abs() < f64::EPSILON);
        let second = next_number(first, Some(0.5));
        assert!((second - 0.5).abs() < f64::EPSILON);
        let smaller = next_number(second, Some(0.25));
        assert!(smaller > 0.5 && smaller < 0.51);
        assert!(next_number(smaller, None) > smaller);
        assert!((next_number(smaller, Some(1.0)) - 1.0).abs() < f64::EPSILON);
    }
}
