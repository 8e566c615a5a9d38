//! How a call is shown to people, where its tool brings a script for that.
//!
//! A script is written by whoever runs the tool server, so it is worth no more trust than a text of theirs. It sees the
//! arguments and nothing else, has no IO, no clock and no sleep, and is bounded in operations, time, depth and in the size
//! of everything it makes. Whatever it does wrong leads to the plain text, never to an error of the call.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rap_protocol::Toolset;
use rhai::packages::{
    ArithmeticPackage, BasicArrayPackage, BasicIteratorPackage, BasicMapPackage, BasicMathPackage,
    BasicStringPackage, LogicPackage, MoreStringPackage, Package,
};
use rhai::{AST, Dynamic, Engine, Module, OptimizationLevel, Scope, Shared};
use serde_json::{Map, Value};

/// How many operations a script may take, and how long.
const OPERATIONS: u64 = 10_000;
const WITHIN: Duration = Duration::from_millis(50);
/// How long all scripts of one answer may take; calls beyond it are shown plainly.
pub(crate) const ALL_WITHIN: Duration = Duration::from_millis(500);
/// The longest text that a call is shown as, in bytes.
const SHOWN_BYTES: usize = 1024;
/// The longest text that a script makes, in bytes. One function can make as much as this times this before it is told.
const TEXT_BYTES: usize = 4 * 1024;
/// How much a script sees of a text in the arguments, in bytes.
const ARGUMENT_BYTES: usize = 2 * 1024;
/// How many items an array or a map has, those within its items included.
const ITEMS: usize = 256;
/// How many items the arguments have altogether; those of a call with more are not given to a script.
const ARGUMENTS: usize = 10_000;
/// How deep expressions nest, outside and inside of functions, and the arguments.
const DEPTH: usize = 32;
/// How many variables and functions there are, and how many calls of functions within each other.
const VARIABLES: usize = 64;
const FUNCTIONS: usize = 16;
const CALLS: usize = 8;
/// How much text all scripts of one toolset have together, in bytes; those beyond it are passed over.
const SCRIPTS_BYTES: usize = 256 * 1024;

/// Words that no script needs and that lead out of its bounds.
const FORBIDDEN: [&str; 6] = ["eval", "print", "debug", "curry", "import", "export"];

/// The scripts of a toolset, compiled once.
#[derive(Default)]
pub(crate) struct Scripts(HashMap<String, AST>);

impl Scripts {
    /// Compiles the scripts of a toolset. One that can not be compiled is logged and left out.
    pub(crate) fn of(toolset: &Toolset) -> Scripts {
        let engine = engine(None);
        let mut scripts = HashMap::new();
        let mut room = SCRIPTS_BYTES;
        for tool in &toolset.tools {
            let Some(script) = &tool.display_script else { continue };
            let compiled = match room.checked_sub(script.len()) {
                None => Err(format!("the scripts of a toolset have {SCRIPTS_BYTES} bytes at most")),
                Some(rest) => {
                    room = rest;
                    engine.compile(script).map_err(|error| error.to_string())
                }
            };
            match compiled {
                Ok(compiled) => {
                    scripts.insert(tool.name.as_str().to_owned(), compiled);
                }
                Err(why) => tracing::warn!(
                    toolset = toolset.name,
                    tool = tool.name.as_str(),
                    why,
                    "a displayScript is not used"
                ),
            }
        }
        Scripts(scripts)
    }

    pub(crate) fn has(&self, tool: &str) -> bool {
        self.0.contains_key(tool)
    }

    /// How a call is shown, by its tool's script; nothing if there is none, or none that works.
    pub(crate) fn show(&self, tool: &str, arguments: &Map<String, Value>) -> Option<String> {
        let shown = run(self.0.get(tool)?, arguments);
        shown
            .inspect_err(|why| tracing::warn!(tool, why, "a displayScript failed; the call is shown plainly"))
            .ok()
    }
}

/// How a call is shown that nobody said how to show: `name(arguments)`.
pub(crate) fn plainly(name: &str, arguments: &Value) -> String {
    ended(format!("{name}({arguments})"), SHOWN_BYTES)
}

/// A text of so many bytes at most, with an ellipsis where it was cut.
fn ended(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        text.truncate(text.floor_char_boundary(bytes - '…'.len_utf8()));
        text.push('…');
    }
    text
}

fn run(script: &AST, arguments: &Map<String, Value>) -> Result<String, String> {
    let engine = engine(Some(Instant::now() + WITHIN));
    let mut scope = Scope::new();
    let taken = Taking { left: ARGUMENTS }.map(arguments, 0);
    scope.push_constant_dynamic("args", taken.ok_or("there are too many arguments, or they nest too deep")?);
    let value: Dynamic =
        engine.eval_ast_with_scope(&mut scope, script).map_err(|error| short(&error.to_string()))?;
    let kind = value.type_name();
    let text = value.into_string().map_err(|_| format!("it gave {kind} and not a string"))?;
    match text.len() {
        0 => Err("it gave an empty string".into()),
        1..=SHOWN_BYTES => Ok(text),
        length => Err(format!("it gave {length} bytes; {SHOWN_BYTES} are the most")),
    }
}

/// An error may repeat what the script made.
fn short(why: &str) -> String {
    why.chars().take(200).collect()
}

/// An engine with what a script may use. It is cheap: the functions are shared.
fn engine(until: Option<Instant>) -> Engine {
    static MODULES: OnceLock<Vec<Shared<Module>>> = OnceLock::new();
    let modules = MODULES.get_or_init(|| {
        vec![
            ArithmeticPackage::new().as_shared_module(),
            LogicPackage::new().as_shared_module(),
            BasicMathPackage::new().as_shared_module(),
            BasicStringPackage::new().as_shared_module(),
            MoreStringPackage::new().as_shared_module(),
            BasicArrayPackage::new().as_shared_module(),
            BasicMapPackage::new().as_shared_module(),
            BasicIteratorPackage::new().as_shared_module(),
        ]
    });
    let mut engine = Engine::new_raw();
    for module in modules {
        engine.register_global_module(Arc::clone(module));
    }
    for word in FORBIDDEN {
        engine.disable_symbol(word);
    }
    engine
        .set_optimization_level(OptimizationLevel::None)
        .set_max_operations(OPERATIONS)
        .set_max_expr_depths(DEPTH, DEPTH)
        .set_max_call_levels(CALLS)
        .set_max_variables(VARIABLES)
        .set_max_functions(FUNCTIONS)
        .set_max_string_size(TEXT_BYTES)
        .set_max_array_size(ITEMS)
        .set_max_map_size(ITEMS);
    if let Some(until) = until {
        engine.on_progress(move |_| (Instant::now() > until).then(|| "it took too long".into()));
    }
    engine
}

/// Takes arguments over into a script: all of them, or none, since a part would be shown as the whole. Only texts are
/// cut, where one can see it.
struct Taking {
    left: usize,
}

impl Taking {
    fn map(&mut self, fields: &Map<String, Value>, depth: usize) -> Option<Dynamic> {
        let mut map = rhai::Map::new();
        for (key, value) in fields {
            map.insert(key.into(), self.value(value, depth + 1)?);
        }
        Some(map.into())
    }

    fn value(&mut self, value: &Value, depth: usize) -> Option<Dynamic> {
        self.left = self.left.checked_sub(1)?;
        Some(match value {
            _ if depth > DEPTH => return None,
            Value::Null => Dynamic::UNIT,
            Value::Bool(bool) => (*bool).into(),
            Value::Number(number) => match number.as_i64() {
                Some(whole) => whole.into(),
                None => Dynamic::from(number.as_f64()?),
            },
            Value::String(text) => ended(text.clone(), ARGUMENT_BYTES).into(),
            Value::Array(items) => {
                let items: Option<rhai::Array> =
                    items.iter().map(|item| self.value(item, depth + 1)).collect();
                items?.into()
            }
            Value::Object(fields) => self.map(fields, depth)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rap_protocol::parse_toolset;
    use serde_json::json;

    fn toolset(scripts: &[&str]) -> Toolset {
        let tool = |(number, script): (usize, &&str)| {
            json!({"name": format!("t{number}"), "description": "", "inputSchema": {"type": "object"},
                "displayScript": script})
        };
        let tools: Vec<Value> = scripts.iter().enumerate().map(tool).collect();
        let document = json!({"name": "s", "endpoint": "http://127.0.0.1:1/", "tools": tools});
        parse_toolset(document.to_string().as_bytes()).unwrap()
    }

    fn show(script: &str, arguments: Value) -> Option<String> {
        let Value::Object(arguments) = arguments else { panic!("not an object") };
        Scripts::of(&toolset(&[script])).show("t0", &arguments)
    }

    #[test]
    fn a_script_shows_a_call() {
        let table = [
            (r#""Read " + args.path"#, json!({"path": "a.txt"}), "Read a.txt"),
            ("`Move ${args.from} to ${args.to}`", json!({"from": "a", "to": "b"}), "Move a to b"),
            (r#"if args.force { "Push hard" } else { "Push" }"#, json!({"force": true}), "Push hard"),
            (r#"let n = args.files.len(); `${n} files`"#, json!({"files": ["a", "b"]}), "2 files"),
            (
                r#"let s = ""; for f in args.files { s += f.name.to_upper() + " "; } s"#,
                json!({"files": [{"name": "a"}, {"name": "b"}]}),
                "A B ",
            ),
            (r#"`${args.n * 2} ${args.x} ${args.y ?? "no y"}`"#, json!({"n": 4, "x": 1.5}), "8 1.5 no y"),
            (r#"`${args.files.map(|f| f + "!")}`"#, json!({"files": ["a"]}), r#"["a!"]"#),
            (r#"args.long.sub_string(0, 3)"#, json!({"long": "x".repeat(1_000_000)}), "xxx"),
        ];
        for (script, arguments, expected) in table {
            assert_eq!(show(script, arguments).as_deref(), Some(expected), "{script}");
        }
    }

    /// Each of them takes no longer than it may and leaves nothing but the plain text.
    #[test]
    fn a_script_that_does_anything_else_is_passed_over() {
        let deep = format!("{}1{}", "(".repeat(4000), ")".repeat(4000));
        let nested = format!("{}{}", "[".repeat(4000), "]".repeat(4000));
        let table = [
            "this is no script",
            "",
            "42",
            "#{a: 1}",
            r#""""#,
            "args.missing.deeper",
            "throw \"no\"",
            "loop {}",
            "while true { let x = 1; }",
            "for i in 0..1_000_000_000 { } \"done\"",
            "let s = \"x\"; loop { s += s; }",
            "let a = [1]; loop { a += a; }",
            "let a = []; loop { a = [a]; }",
            "let a = #{}; loop { a = #{a: a}; }",
            "let a = #{}; let i = 0; loop { a[`k${i}`] = i; i += 1; }",
            r#""x".pad(1_000_000_000, "y")"#,
            r#"let a = []; a.pad(1_000_000_000, 1); "done""#,
            r#"let s = ""; for i in 0..500 { s += "xxxx"; } s"#,
            "fn f() { f() } f()",
            "fn f(n) { `${f(n + 1)}` } f(0)",
            "let f = || 1; loop { let g = f; f = || g.call(); }",
            "eval(\"1\")",
            "print(\"hello\")",
            "debug(\"hello\")",
            "sleep(1000); \"slept\"",
            "import \"std\" as s; \"imported\"",
            "timestamp().elapsed.to_string()",
            "args.path = \"changed\"; args.path",
            &deep,
            &nested,
        ];
        for script in table {
            let began = Instant::now();
            assert_eq!(show(script, json!({"path": "a"})), None, "{}", short(script));
            assert!(began.elapsed() < Duration::from_secs(2), "{}", short(script));
        }
    }

    #[test]
    fn a_script_sees_all_arguments_or_none() {
        let mut deep = json!("end");
        for _ in 0..60 {
            deep = json!([deep]);
        }
        let (long, many) = ("x".repeat(100_000), (0..1000).collect::<Vec<u64>>());
        let large = json!({"path": "a", "long": long, "many": many});
        assert_eq!(show("args.path", large.clone()).as_deref(), Some("a"));
        // What is beyond its bounds it can not touch: a part of it would be shown as the whole.
        assert_eq!(show("`${args.many.len()}`", large.clone()), None);
        assert_eq!(show("args.long.split(\"…\").len().to_string()", large.clone()).as_deref(), Some("2"));
        // The worst that one function can do to memory.
        assert_eq!(show("args.long.replace(\"x\", args.long); args.long", large), None);
        assert_eq!(show("args.path", json!({"path": "a", "deep": deep})), None);
        assert_eq!(show("args.path", json!({"path": "a", "many": vec![0; 20_000]})), None);
    }

    #[test]
    fn a_toolset_has_a_bound_for_all_of_its_scripts() {
        let long = format!("\"ok\" // {}", "x".repeat(15_000));
        let scripts = Scripts::of(&toolset(&vec![&*long; 30]));
        let shown = (0..30).filter(|number| scripts.has(&format!("t{number}"))).count();
        assert_eq!(shown, SCRIPTS_BYTES / long.len());
    }

    #[test]
    fn what_nobody_said_how_to_show_is_shown_plainly() {
        assert_eq!(plainly("read", &json!({"path": "a"})), r#"read({"path":"a"})"#);
        let long = plainly("read", &json!({"path": "ü".repeat(1000)}));
        assert!(long.len() <= SHOWN_BYTES && long.ends_with('…'), "{long}");
    }
}
