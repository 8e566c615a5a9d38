//! Parses `--operation NAME --arguments JSON` and `--subscription NAME --arguments JSON`. Each `--arguments` belongs to
//! the name before it.

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use rap_conformance::tool::OperationCall;
use serde_json::{Map, Value};

/// Operation and subscription to call.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Operations {
    pub(super) operation: Option<OperationCall>,
    pub(super) subscription: Option<OperationCall>,
}

impl Args for Operations {
    fn augment_args(command: Command) -> Command {
        let name = |id: &'static str| Arg::new(id).long(id).value_name("NAME");
        command
            .arg(name("operation").help("Operation to call, with the --arguments that follow it"))
            .arg(name("subscription").help("Subscription to make, with the --arguments that follow it"))
            .arg(
                Arg::new("arguments")
                    .long("arguments")
                    .value_name("JSON")
                    .action(ArgAction::Append)
                    .value_parser(object)
                    .help("Arguments of the --operation or --subscription before it, as a JSON object"),
            )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Operations::augment_args(command)
    }
}

impl FromArgMatches for Operations {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut operations = Operations {
            operation: named(matches, "operation"),
            subscription: named(matches, "subscription"),
        };
        let position = |id: &str| matches.index_of(id);
        let indices = matches.indices_of("arguments").into_iter().flatten();
        let values = matches.get_many::<Map<String, Value>>("arguments").into_iter().flatten();
        let mut taken = Vec::new();
        for (index, arguments) in indices.zip(values) {
            let before = |id: &'static str| {
                position(id).filter(|position| *position < index).map(|position| (position, id))
            };
            let Some((_, id)) = before("operation").max(before("subscription")) else {
                return Err(wrong("--arguments must follow an --operation or a --subscription"));
            };
            if taken.contains(&id) {
                return Err(wrong(&format!("--{id} has more than one --arguments")));
            }
            taken.push(id);
            let order =
                if id == "operation" { &mut operations.operation } else { &mut operations.subscription };
            if let Some(order) = order {
                order.arguments.clone_from(arguments);
            }
        }
        Ok(operations)
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
        let expected =
            Operations { operation: order("o", one.clone()), subscription: order("s", two.clone()) };
        assert_eq!(parse(&line), Ok(expected));
        let line = ["--operation=o", "--arguments={\"a\": 1}", "--subscription=s"];
        assert_eq!(
            parse(&line),
            Ok(Operations { operation: order("o", one), subscription: order("s", json!({})) })
        );
        let line = ["--operation", "o", "--subscription", "s", "--arguments", "{\"b\": 2}"];
        assert_eq!(
            parse(&line),
            Ok(Operations { operation: order("o", json!({})), subscription: order("s", two) })
        );
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
