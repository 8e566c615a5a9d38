//! Lines of a chat that are for the chat itself. They begin with a slash.

/// Shown by `/help`.
pub(super) const HELP: &str = "\
/image FILE [TEXT]  send an image: at once if TEXT is given, else with the next message
/usage              show the tokens and the cost of this thread
/say TEXT           send TEXT to the agent, even if it looks like an answer
/skip               put the open question off and show the next one
/dismiss            dismiss the open question: its default choice is used
/resume             continue after a failure or a pause
/quit               exit; the agent keeps running
An open question stays open until it is answered: y, n, a number or the text of a choice answers the one that is shown,
and anything else is a message to the agent.";

/// A line for the chat itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command<'a> {
    Help,
    Image {
        file: String,
        text: &'a str,
    },
    Usage,
    Say(&'a str),
    Skip,
    Dismiss,
    Resume,
    Quit,
    /// A slash and a word that is not a command.
    Unknown(&'a str),
}

/// Parses a line. Returns `None` for a message. A line such as `/etc/hosts is wrong` is a message.
pub(super) fn parse(line: &str) -> Option<Command<'_>> {
    let rest = line.strip_prefix('/')?;
    let (word, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let rest = rest.trim();
    Some(match word {
        "help" | "?" => Command::Help,
        "usage" => Command::Usage,
        "say" => Command::Say(rest),
        "skip" => Command::Skip,
        "dismiss" => Command::Dismiss,
        "resume" => Command::Resume,
        "quit" | "exit" => Command::Quit,
        "image" => {
            let (file, text) = first_path(rest);
            Command::Image { file, text }
        }
        word if rest.is_empty() && !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase()) => {
            Command::Unknown(word)
        }
        _ => return None,
    })
}

/// Splits a path from the rest of a line. It may be in quotes, or have spaces with a backslash before them, as a terminal
/// inserts the path of a file that is dropped on it.
pub(super) fn first_path(line: &str) -> (String, &str) {
    if let Some(quote) = line.chars().next().filter(|c| matches!(c, '\'' | '"'))
        && let Some((path, rest)) = line[1..].split_once(quote)
    {
        return (path.to_owned(), rest.trim());
    }
    let (mut path, mut escaped) = (String::new(), false);
    for (at, c) in line.char_indices() {
        match c {
            '\\' if !escaped => escaped = true,
            c if c.is_whitespace() && !escaped => return (path, line[at..].trim()),
            c => {
                path.push(c);
                escaped = false;
            }
        }
    }
    (path, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        let image = |file: &str, text| Some(Command::Image { file: file.into(), text });
        let table = [
            ("/help", Some(Command::Help)),
            ("/usage", Some(Command::Usage)),
            ("/say 2", Some(Command::Say("2"))),
            ("/image a.png", image("a.png", "")),
            ("/image 'my cat.png' what is it?", image("my cat.png", "what is it?")),
            ("/image my\\ cat.png what is it?", image("my cat.png", "what is it?")),
            ("/imagine", Some(Command::Unknown("imagine"))),
            ("/etc/hosts", None),
            ("/etc is a directory", None),
            ("/", None),
            ("hello", None),
        ];
        for (line, expected) in table {
            assert_eq!(parse(line), expected, "{line}");
        }
    }
}
