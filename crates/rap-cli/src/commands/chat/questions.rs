//! Open questions of a chat, and the lines that answer them. A question stays open, and on the screen, until it is answered
//! here or elsewhere, whatever else is said in between.
//!
//! Only the first question is answered by a line. The others follow when it is answered or put off.

use std::collections::VecDeque;

use rap_api::{Question, QuestionKind};
use unicode_width::UnicodeWidthStr;

use crate::commands::inbox::{is_approval, numbered, parse_choice};
use crate::table::{cut, one_line};

/// Words that are answers, and so never messages while a question is open.
const ANSWERS: [&str; 6] = ["y", "n", "yes", "no", "allow", "refuse"];

/// Meaning of a line while questions may be open.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Selects a choice of the first question.
    Answer { selected: usize, choice: String },
    /// Looks like an answer, but is none of the choices. The text says what the choices are.
    NoSuchChoice(String),
    /// A message for the agent.
    Message,
}

#[derive(Debug, Default)]
pub(super) struct Questions(VecDeque<Question>);

impl Questions {
    /// Adds a question, unless it is known.
    pub(super) fn add(&mut self, question: Question) {
        if !self.0.contains(&question) {
            self.0.push_back(question);
        }
    }

    /// Removes the questions of a call that has settled.
    pub(super) fn settled(&mut self, call: &str) {
        self.0.retain(|question| question.call_id != call);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Puts a question back that could not be answered.
    pub(super) fn put_back(&mut self, question: Question) {
        self.0.push_front(question);
    }

    /// Moves the first question behind the others. Returns false if there is no other.
    pub(super) fn put_off(&mut self) -> bool {
        if self.choices().nth(1).is_none() {
            return false;
        }
        if let Some(at) = self.first()
            && let Some(question) = self.0.remove(at)
        {
            self.0.push_back(question);
        }
        true
    }

    /// Returns the questions that a line can answer.
    pub(super) fn choices(&self) -> impl Iterator<Item = (&Question, &str, &[String])> {
        self.0.iter().filter_map(|question| match &question.kind {
            QuestionKind::Choice { prompt, choices, .. } => {
                Some((question, prompt.as_str(), choices.as_slice()))
            }
            QuestionKind::SignIn { .. } | QuestionKind::Unknown => None,
        })
    }

    fn first(&self) -> Option<usize> {
        self.0.iter().position(|question| matches!(question.kind, QuestionKind::Choice { .. }))
    }

    /// Removes the first question that a line can answer.
    pub(super) fn take_first(&mut self) -> Option<Question> {
        self.first().and_then(|at| self.0.remove(at))
    }

    pub(super) fn meaning_of(&self, line: &str) -> Meaning {
        let Some((_, _, choices)) = self.choices().next() else { return Meaning::Message };
        if let Some(selected) = parse_choice(choices, line) {
            return Meaning::Answer { selected, choice: choices[selected].clone() };
        }
        let word = line.trim().to_ascii_lowercase();
        let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
        if is_number || ANSWERS.contains(&word.as_str()) {
            let list = one_line(&numbered(choices).join(", "));
            return Meaning::NoSuchChoice(format!(
                "not sent: `{word}` is none of the choices of the open question: {list}; to send it to the agent: /say {word}"
            ));
        }
        Meaning::Message
    }

    /// Returns the rows that show the first question, and how many others wait.
    pub(super) fn rows(&self, width: usize) -> Vec<String> {
        let mut rows = Vec::new();
        if let Some((question, prompt, choices)) = self.choices().next() {
            let keys = if is_approval(choices) {
                "y) Allow, n) Refuse".to_owned()
            } else {
                one_line(&numbered(choices).join(", "))
            };
            let others = self.0.len() - 1;
            let others = if others == 0 { String::new() } else { format!(" (and {others} more: /skip)") };
            let (keys, tool) = (cut(&format!("  {keys}{others}"), width), one_line(&question.tool));
            rows.push(cut(&format!("? {tool}: {}", one_line(prompt)), width.max(keys.width())));
            rows.push(keys);
        }
        let sign_in = |question: &Question| match &question.kind {
            QuestionKind::SignIn { .. } => {
                Some(format!("? {} waits until you sign in", one_line(&question.tool)))
            }
            _ => None,
        };
        rows.extend(self.0.iter().find_map(sign_in).map(|row| cut(&row, width)));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn question(call: &str, choices: &[&str]) -> Question {
        let question = json!({"thread_id": "t", "call_id": call, "tool": "ask", "asked_at": "1970-01-01T00:00:00.000Z",
            "kind": "choice", "prompt": "Which?", "choices": choices, "default": 1});
        serde_json::from_value(question).unwrap()
    }

    fn answer(selected: usize, choice: &str) -> Meaning {
        Meaning::Answer { selected, choice: choice.into() }
    }

    #[test]
    fn a_line_answers_the_first_question_only() {
        let mut questions = Questions::default();
        assert_eq!(questions.meaning_of("2"), Meaning::Message);
        questions.add(question("a", &["Allow", "Refuse"]));
        questions.add(question("b", &["red", "green", "blue"]));
        let table = [
            ("y", answer(0, "Allow")),
            ("No", answer(1, "Refuse")),
            ("2", answer(1, "Refuse")),
            ("allow", answer(0, "Allow")),
            ("blue", Meaning::Message),
            ("What would it do?", Meaning::Message),
        ];
        for (line, expected) in table {
            assert_eq!(questions.meaning_of(line), expected, "{line}");
        }
        assert!(matches!(questions.meaning_of("3"), Meaning::NoSuchChoice(_)));
        assert_eq!(questions.take_first().unwrap().call_id, "a");
        assert_eq!(questions.meaning_of("3"), answer(2, "blue"));
        assert!(matches!(questions.meaning_of("y"), Meaning::NoSuchChoice(_)));
    }

    #[test]
    fn a_question_is_put_off_and_stays() {
        let mut questions = Questions::default();
        questions.add(question("a", &["Allow", "Refuse"]));
        questions.add(question("a", &["Allow", "Refuse"]));
        assert!(!questions.put_off());
        questions.add(question("b", &["red", "green"]));
        assert!(questions.put_off());
        assert_eq!(questions.meaning_of("green"), answer(1, "green"));
        questions.settled("b");
        assert_eq!(questions.rows(40), ["? ask: Which?", "  y) Allow, n) Refuse"]);
    }
}
