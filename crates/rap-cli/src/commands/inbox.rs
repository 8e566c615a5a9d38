//! `rap inbox`: every question that waits for a person.

use anyhow::{anyhow, bail};
use clap::Subcommand;

use super::{Connection, Listing, call_id, known, print};
use crate::age;
use crate::api::{Asked, Question};
use crate::client::Client;
use crate::table::{Table, terminal_width};

/// What to do with questions.
#[derive(Subcommand)]
pub enum Command {
    /// List every question that waits for a person, the oldest first.
    Ls(Listing),
    /// Answer a question, with the number of a choice (from 1) or its words.
    #[command(after_help = "Examples:\n  rap inbox answer t019 3 green\n  \
                            rap inbox answer t019 3 --dismiss")]
    Answer {
        /// The thread.
        thread: String,
        /// The call that asks: its id, or the number at the end of it.
        call: String,
        /// The number of a choice, from 1, or its words.
        #[arg(required_unless_present = "dismiss")]
        choice: Option<String>,
        /// Leave it to the default.
        #[arg(long, conflicts_with = "choice")]
        dismiss: bool,
    },
}

/// Does it.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls(listing) => listing.show(&client, "inbox", &[], show).await,
        Command::Answer { thread, call, choice, .. } => {
            answer(&client, &thread, &call, choice.as_deref()).await
        }
    }
}

fn show(questions: &[Question]) -> anyhow::Result<()> {
    if questions.is_empty() {
        return Ok(print("nothing waits for you\n")?);
    }
    let now = age::now();
    let mut table = Table::new(["THREAD", "CALL", "TOOL", "ASKED", "QUESTION"]);
    for question in questions {
        let Question { thread_id, call_id, tool, asked_at, asked } = question;
        let text = match asked {
            Asked::Choice { prompt, choices, .. } => format!("{prompt} {}", numbered(choices).join(", ")),
            Asked::SignIn { auth_url } => format!("sign in: {auth_url}"),
        };
        table.row([thread_id.clone(), call_id.clone(), tool.clone(), age::ago(*asked_at, now), text]);
    }
    Ok(print(&table.render(terminal_width()))?)
}

/// The choices as a person picks them.
pub(crate) fn numbered(choices: &[String]) -> Vec<String> {
    choices.iter().enumerate().map(|(index, choice)| format!("{}) {choice}", index + 1)).collect()
}

/// The choice that is meant: by its words, or else by its number, from 1.
pub(crate) fn meant(choices: &[String], text: &str) -> Option<usize> {
    let text = text.trim();
    let by_words = || choices.iter().position(|choice| choice.trim().eq_ignore_ascii_case(text));
    let exactly = choices.iter().position(|choice| choice.trim() == text);
    let by_number = || text.parse::<usize>().ok().filter(|number| (1..=choices.len()).contains(number));
    exactly.or_else(by_words).or_else(|| by_number().map(|number| number - 1))
}

async fn answer(client: &Client, thread: &str, call: &str, choice: Option<&str>) -> anyhow::Result<()> {
    let call = &*call_id(client, thread, call).await;
    known(client, thread, client.thread(thread).await).await?;
    let questions = client.inbox().await?;
    let of_thread: Vec<_> = questions.iter().filter(|question| question.thread_id == thread).collect();
    let Some(question) = of_thread.iter().find(|question| question.call_id == call) else {
        let open: Vec<&str> = of_thread.iter().map(|question| question.call_id.as_str()).collect();
        let open = if open.is_empty() { "nothing does there".into() } else { open.join(", ") };
        bail!("call `{call}` of thread {thread} asks nothing; what asks: {open}");
    };
    let Asked::Choice { choices, default, .. } = &question.asked else {
        bail!("call {call} wants you to sign in: rap inbox ls shows where");
    };
    let selected = choice
        .map(|text| {
            let list = numbered(choices).join(", ");
            meant(choices, text).ok_or_else(|| anyhow!("`{text}` is none of the choices: {list}"))
        })
        .transpose()?;
    client.choose(thread, call, selected).await?;
    let taken = choices.get(selected.unwrap_or(*default)).map_or("the default", String::as_str);
    Ok(print(&format!("answered: {taken}\n"))?)
}

#[cfg(test)]
mod tests {
    use super::meant;

    #[test]
    fn words_go_before_numbers() {
        let choices = ["red".to_owned(), "Green".to_owned(), "1".to_owned()];
        let table =
            [("red", Some(0)), ("GREEN", Some(1)), ("2", Some(1)), ("1", Some(2)), ("0", None), ("4", None)];
        for (text, expected) in table {
            assert_eq!(meant(&choices, text), expected, "{text}");
        }
    }
}
