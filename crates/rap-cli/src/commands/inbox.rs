//! `rap inbox`: lists and answers questions that wait for a person.

use anyhow::{anyhow, bail};
use clap::Subcommand;
use rap_agent::texts;
use rap_api::client::Client;
use rap_api::{Answer, Inbox, Question, QuestionKind, Time};

use super::{Connection, Listing, print, resolve_call_id, with_suggestion};
use crate::table::{Table, one_line};
use crate::time_format;

/// Subcommands of `rap inbox`.
#[derive(Subcommand)]
pub enum Command {
    /// List all questions that wait for a person, oldest first.
    Ls(Listing),
    /// Answer a question with the number of a choice (from 1) or its text.
    #[command(after_help = "Examples:\n  rap inbox answer t019 3 green\n  \
                            rap inbox answer t019 3 --dismiss")]
    Answer {
        /// Thread of the question.
        thread: String,
        /// Id of the call that asks, or the number at its end.
        call: String,
        /// Number of a choice, from 1, or its text; y or n for an approval.
        #[arg(required_unless_present = "dismiss")]
        choice: Option<String>,
        /// Dismiss the question; the default choice is used.
        #[arg(long, conflicts_with = "choice")]
        dismiss: bool,
    },
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls(listing) => listing.show::<Inbox>(&client, &[], show).await,
        Command::Answer { thread, call, choice, .. } => {
            answer(&client, &thread, &call, choice.as_deref()).await
        }
    }
}

fn show(questions: &[Question]) -> anyhow::Result<()> {
    if questions.is_empty() {
        return Ok(print("no questions\n")?);
    }
    let now = Time::now();
    let mut table = Table::new(["THREAD", "CALL", "TOOL", "ASKED", "QUESTION"]);
    for question in questions {
        let Question { thread_id, call_id, tool, asked_at, kind, .. } = question;
        let text = match kind {
            QuestionKind::Choice { prompt, choices, .. } => {
                format!("{prompt} {}", numbered(choices).join(", "))
            }
            QuestionKind::SignIn { auth_url } => format!("sign in: {auth_url}"),
            QuestionKind::Unknown => "a kind of question that this version of rap does not know".into(),
        };
        table.row([
            thread_id.clone(),
            call_id.clone(),
            tool.clone(),
            time_format::relative(*asked_at, now),
            text,
        ]);
    }
    // Questions are not cut to the width of the terminal: what a person decides about must not be hidden.
    Ok(print(&table.render(None))?)
}

/// Formats the choices with their numbers.
pub(crate) fn numbered(choices: &[String]) -> Vec<String> {
    choices.iter().enumerate().map(|(index, choice)| format!("{}) {choice}", index + 1)).collect()
}

/// Returns true if these are the choices of an approval that the runtime asks for.
pub(crate) fn is_approval(choices: &[String]) -> bool {
    choices == texts::APPROVAL_CHOICES
}

/// Returns the index of the choice that the text selects: by its text, by its number from 1, or by `y` or `n` if the choices
/// are those of an approval, or `yes` and `no`.
pub(crate) fn parse_choice(choices: &[String], text: &str) -> Option<usize> {
    let text = text.trim();
    let by_text = || choices.iter().position(|choice| choice.trim().eq_ignore_ascii_case(text));
    let exactly = choices.iter().position(|choice| choice.trim() == text);
    let by_number = || text.parse::<usize>().ok().filter(|number| (1..=choices.len()).contains(number));
    let named = |name: &str| choices.iter().position(|choice| choice.trim().eq_ignore_ascii_case(name));
    let by_word = || match text.to_ascii_lowercase().as_str() {
        "y" | "yes" if is_approval(choices) => Some(texts::ALLOW),
        "n" | "no" if is_approval(choices) => Some(texts::REFUSE),
        "y" => named("yes"),
        "n" => named("no"),
        _ => None,
    };
    exactly.or_else(by_text).or_else(|| by_number().map(|number| number - 1)).or_else(by_word)
}

async fn answer(client: &Client, thread: &str, call: &str, choice: Option<&str>) -> anyhow::Result<()> {
    let call = &*resolve_call_id(client, thread, call).await;
    with_suggestion(client, thread, client.thread(thread).await).await?;
    let questions = client.list::<Inbox>(&[], None).await?.items;
    let of_thread: Vec<_> = questions.iter().filter(|question| question.thread_id == thread).collect();
    let Some(question) = of_thread.iter().find(|question| question.call_id == call) else {
        let open: Vec<&str> = of_thread.iter().map(|question| question.call_id.as_str()).collect();
        let open = if open.is_empty() { "none".into() } else { open.join(", ") };
        bail!("call `{call}` of thread {thread} has no open question; calls with questions: {open}");
    };
    let QuestionKind::Choice { choices, default, .. } = &question.kind else {
        bail!("call {call} asks you to sign in; the URL is shown by: rap inbox ls");
    };
    let selected = choice
        .map(|text| {
            let list = numbered(choices).join(", ");
            parse_choice(choices, text).ok_or_else(|| anyhow!("`{text}` is not one of the choices: {list}"))
        })
        .transpose()?;
    client
        .answer(thread, call, &selected.map_or(Answer::dismiss(), |index| Answer::select(index as u32)))
        .await?;
    let taken = choices.get(selected.unwrap_or(*default)).map_or("the default", String::as_str);
    Ok(print(&format!("answered: {}\n", one_line(taken)))?)
}

#[cfg(test)]
mod tests {
    use super::parse_choice;

    #[test]
    fn text_is_matched_before_numbers() {
        let choices = ["red".to_owned(), "Green".to_owned(), "1".to_owned()];
        let table =
            [("red", Some(0)), ("GREEN", Some(1)), ("2", Some(1)), ("1", Some(2)), ("0", None), ("4", None)];
        for (text, expected) in table {
            assert_eq!(parse_choice(&choices, text), expected, "{text}");
        }
    }

    #[test]
    fn y_and_n_answer_approvals_and_yes_or_no_questions() {
        let [approval, yes_or_no, colours] =
            [["Allow", "Refuse"], ["No", "Yes"], ["red", "green"]].map(|choices| choices.map(str::to_owned));
        let table = [
            ("y", Some(0), Some(1)),
            ("N", Some(1), Some(0)),
            ("yes", Some(0), Some(1)),
            ("maybe", None, None),
        ];
        for (text, of_approval, of_other) in table {
            assert_eq!(parse_choice(&approval, text), of_approval, "{text}");
            assert_eq!(parse_choice(&yes_or_no, text), of_other, "{text}");
            assert_eq!(parse_choice(&colours, text), None, "{text}");
        }
    }
}
