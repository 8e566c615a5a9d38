//! Parses `--operation NAME --arguments JSON` and the flags for other operations. Each `--arguments` belongs to the name
//! before it.

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use rap_conformance::tool::OperationCall;
use serde_json::{Map, Value};

/// Flags that name an operation, with their help.
const FLAGS: [(&str, &str); 4] = [
    ("operation", "Operation to call, with the --arguments that follow it"),
    ("slow-operation", "Operation that works for two seconds or longer, with the --arguments that follow it"),
    ("setup-operation", "Operation to call first in each thread, with the --arguments that follow it"),
    ("subscription", "Subscription to make, with the --arguments that follow it"),
];

/// Operations to call.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Operations {
    pub(super) operation: Option<OperationCall>,
    pub(super) slow_operation: Option<OperationCall>,
    pub(super) setup_operation: Option<OperationCall>,
    pub(super) subscription: Option<OperationCall>,
}

impl Args for Operations {
    fn augment_args(command: Command) -> Command {
        let named = |(id, help)| Arg::new(id).long(id).value_name("NAME").help(help);
        command.args(FLAGS.map(named)).arg(
            Arg::new("arguments")
                .long("arguments")
                .value_name("JSON")
                .action(ArgAction::Append)
                .value_parser(object)
                .help("Arguments of the operation or subscription before it, as a JSON object"),
        )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Operations::augment_args(command)
    }
}

impl FromArgMatches for Operations {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut calls = FLAGS.map(|(id, _)| named(matches, id));
        let indices = matches.indices_of("arguments").into_iter().flatten();
        let values = matches.get_many::<Map<String, Value>>("arguments").into_iter().flatten();
        let mut taken = Vec::new();
        for (index, arguments) in indices.zip(values) {
            let before = |(at, (id, _)): (usize, &(&str, &str))| {
                matches.index_of(id).filter(|position| *position < index).map(|position| (position, at))
            };
            let Some((_, at)) = FLAGS.iter().enumerate().filter_map(before).max() else {
                return Err(wrong("--arguments must follow an --operation or a --subscription"));
            };
            if taken.contains(&at) {
                return Err(wrong(&format!("--{} has more than one --arguments", FLAGS[at].0)));
            }
            taken.push(at);
            if let Some(call) = &mut calls[at] {
                call.arguments.clone_from(arguments);
            }
        }
        let [operation, slow_operation, setup_operation, subscription] = calls;
        Ok(Operations { operation, slow_operation, setup_operation, subscription })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Operations::from_arg_matches(matches)?;
        Ok(())
    }
}

fn named(matches: &ArgMatches, id: &str) -> Option<OperationCall> {
    let operation = matches.get_one::<String>(id)?.clone();
    Some(OperationCall { operation, arguments: Map::new() })
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        Ok(_) => Err("expected a JSON object such as {\"text\": \"hi\"}".into()),
        Err(error) => Err(format!("invalid JSON: {error}")),
    }
}

fn wrong(text: &str) -> Error {
    Error::raw(ErrorKind::ArgumentConflict, format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[&str]) -> Result<Operations, String> {
        let command = Operations::augment_args(Command::new("rap").no_binary_name(true));
        let matches = command.try_get_matches_from(line).map_err(|error| error.to_string())?;
        Operations::from_arg_matches(&matches).map_err(|error| error.to_string())
    }

    fn order(operation: &str, arguments: Value) -> Option<OperationCall> {
        Some(OperationCall { operation: operation.into(), arguments: arguments.as_object().unwrap().clone() })
    }

    #[test]
    fn arguments_belong_to_the_name_before_them() {
        use serde_json::json;
        let (one, two) = (json!({"a": 1}), json!({"b": 2}));
        let line = [
            "--subscription",
            "s",
            "--arguments",
            "{\"b\": 2}",
            "--operation",
            "o",
            "--arguments",
            "{\"a\": 1}",
        ];
        let both =
            |operation, subscription| Ok(Operations { operation, subscription, ..Operations::default() });
        assert_eq!(parse(&line), both(order("o", one.clone()), order("s", two.clone())));
        let line = ["--operation=o", "--arguments={\"a\": 1}", "--subscription=s"];
        assert_eq!(parse(&line), both(order("o", one.clone()), order("s", json!({}))));
        let line = ["--operation", "o", "--subscription", "s", "--arguments", "{\"b\": 2}"];
        assert_eq!(parse(&line), both(order("o", json!({})), order("s", two)));
        let line = ["--setup-operation=f", "--slow-operation=w", "--arguments={\"a\": 1}", "--operation=o"];
        let expected = Operations {
            operation: order("o", json!({})),
            slow_operation: order("w", one),
            setup_operation: order("f", json!({})),
            subscription: None,
        };
        assert_eq!(parse(&line), Ok(expected));
        assert_eq!(parse(&[]), Ok(Operations::default()));
    }

    #[test]
    fn misplaced_repeated_and_invalid_arguments_are_refused() {
        for (line, expected) in [
            (vec!["--arguments", "{}", "--operation", "o"], "must follow"),
            (vec!["--operation", "o", "--arguments", "{}", "--arguments", "{}"], "more than one"),
            (vec!["--operation", "o", "--arguments", "[]"], "expected a JSON object"),
            (vec!["--operation", "o", "--arguments", "{"], "invalid JSON"),
        ] {
            let error = parse(&line).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
