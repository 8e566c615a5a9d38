//! `--operation NAME --arguments JSON` and `--subscription NAME --arguments JSON`: `--arguments` belongs to
//! the name that it follows.

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use rap_conformance::tool::Order;
use serde_json::{Map, Value};

/// What is called.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Orders {
    pub(super) operation: Option<Order>,
    pub(super) subscription: Option<Order>,
}

impl Args for Orders {
    fn augment_args(command: Command) -> Command {
        let name = |id: &'static str| Arg::new(id).long(id).value_name("NAME");
        command
            .arg(name("operation").help("An operation to call, with the --arguments that follow it"))
            .arg(name("subscription").help("A subscription to make, with the --arguments that follow it"))
            .arg(
                Arg::new("arguments")
                    .long("arguments")
                    .value_name("JSON")
                    .action(ArgAction::Append)
                    .value_parser(object)
                    .help("The arguments of the --operation or --subscription before it, as a JSON object"),
            )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Orders::augment_args(command)
    }
}

impl FromArgMatches for Orders {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut orders =
            Orders { operation: named(matches, "operation"), subscription: named(matches, "subscription") };
        let place = |id: &str| matches.index_of(id);
        let indices = matches.indices_of("arguments").into_iter().flatten();
        let values = matches.get_many::<Map<String, Value>>("arguments").into_iter().flatten();
        let mut taken = Vec::new();
        for (index, arguments) in indices.zip(values) {
            let before = |id: &'static str| place(id).filter(|place| *place < index).map(|place| (place, id));
            let Some((_, id)) = before("operation").max(before("subscription")) else {
                return Err(wrong(
                    "--arguments belongs to the --operation or --subscription before it; there is none",
                ));
            };
            if taken.contains(&id) {
                return Err(wrong(&format!("--{id} has two --arguments")));
            }
            taken.push(id);
            let order = if id == "operation" { &mut orders.operation } else { &mut orders.subscription };
            if let Some(order) = order {
                order.arguments.clone_from(arguments);
            }
        }
        Ok(orders)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Orders::from_arg_matches(matches)?;
        Ok(())
    }
}

fn named(matches: &ArgMatches, id: &str) -> Option<Order> {
    let operation = matches.get_one::<String>(id)?.clone();
    Some(Order { operation, arguments: Map::new() })
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        Ok(_) => Err("arguments are a JSON object, as in {\"text\": \"hi\"}".into()),
        Err(error) => Err(format!("this is no JSON: {error}")),
    }
}

fn wrong(text: &str) -> Error {
    Error::raw(ErrorKind::ArgumentConflict, format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[&str]) -> Result<Orders, String> {
        let command = Orders::augment_args(Command::new("rap").no_binary_name(true));
        let matches = command.try_get_matches_from(line).map_err(|error| error.to_string())?;
        Orders::from_arg_matches(&matches).map_err(|error| error.to_string())
    }

    fn order(operation: &str, arguments: Value) -> Option<Order> {
        Some(Order { operation: operation.into(), arguments: arguments.as_object().unwrap().clone() })
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
        let expected = Orders { operation: order("o", one.clone()), subscription: order("s", two.clone()) };
        assert_eq!(parse(&line), Ok(expected));
        let line = ["--operation=o", "--arguments={\"a\": 1}", "--subscription=s"];
        assert_eq!(
            parse(&line),
            Ok(Orders { operation: order("o", one), subscription: order("s", json!({})) })
        );
        let line = ["--operation", "o", "--subscription", "s", "--arguments", "{\"b\": 2}"];
        assert_eq!(
            parse(&line),
            Ok(Orders { operation: order("o", json!({})), subscription: order("s", two) })
        );
        assert_eq!(parse(&[]), Ok(Orders::default()));
    }

    #[test]
    fn arguments_without_a_name_or_with_two_or_that_are_no_object_are_refused() {
        for (line, expected) in [
            (vec!["--arguments", "{}", "--operation", "o"], "there is none"),
            (vec!["--operation", "o", "--arguments", "{}", "--arguments", "{}"], "has two"),
            (vec!["--operation", "o", "--arguments", "[]"], "are a JSON object"),
            (vec!["--operation", "o", "--arguments", "{"], "no JSON"),
        ] {
            let error = parse(&line).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
