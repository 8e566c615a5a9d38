//! Display scripts: a tool can provide a script that renders its calls for users.
//!
//! Scripts come from tool servers and are not trusted. A script sees only the arguments, has no IO, clock or sleep, and
//! its operations, time, nesting and the size of its values are bounded. If it fails, the call is shown as plain text.
//! A script never makes a call fail.

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

/// Maximum number of operations of a script, and its time limit.
const MAX_OPERATIONS: u64 = 10_000;
const SCRIPT_TIME: Duration = Duration::from_millis(50);
/// Time limit for all scripts of one answer. The remaining calls are shown as plain text.
pub(crate) const ALL_SCRIPTS_TIME: Duration = Duration::from_millis(500);
/// Maximum length of a display text, in bytes.
const SHOWN_BYTES: usize = 1024;
/// Maximum length of a string in a script, in bytes. A single function can produce the square of this before the limit
/// is checked.
const TEXT_BYTES: usize = 4 * 1024;
/// Length to which strings in the arguments are truncated for a script, in bytes.
const ARGUMENT_BYTES: usize = 2 * 1024;
/// Maximum number of items of an array or a map, including nested items.
const MAX_ITEMS: usize = 256;
/// Maximum number of values in the arguments. The script is not run for a call with more.
const MAX_ARGUMENTS: usize = 10_000;
/// Maximum nesting of expressions, outside and inside functions, and of the arguments.
const MAX_DEPTH: usize = 32;
/// Maximum number of variables, of functions, and of nested function calls.
const MAX_VARIABLES: usize = 64;
const MAX_FUNCTIONS: usize = 16;
const MAX_CALL_DEPTH: usize = 8;
/// Maximum total length of the scripts of a toolset, in bytes. Scripts beyond it are ignored.
const SCRIPTS_BYTES: usize = 256 * 1024;

/// Keywords that no script needs and that would escape its limits.
const FORBIDDEN: [&str; 6] = ["eval", "print", "debug", "curry", "import", "export"];

/// The scripts of a toolset, compiled once.
#[derive(Default)]
pub(crate) struct Scripts(HashMap<String, AST>);

impl Scripts {
    /// Compiles the scripts of a toolset. A script that cannot be compiled is logged and ignored.
    pub(crate) fn of(toolset: &Toolset) -> Scripts {
        let engine = engine(None);
        let mut scripts = HashMap::new();
        let mut room = SCRIPTS_BYTES;
        for tool in &toolset.tools {
            let Some(script) = &tool.display_script else { continue };
            let compiled = match room.checked_sub(script.len()) {
                None => Err(format!("the scripts of a toolset exceed {SCRIPTS_BYTES} bytes")),
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
                    "a displayScript is ignored"
                ),
            }
        }
        Scripts(scripts)
    }

    pub(crate) fn has(&self, tool: &str) -> bool {
        self.0.contains_key(tool)
    }

    /// Renders a call with the script of its tool. Returns `None` if there is no script or it fails.
    pub(crate) fn show(&self, tool: &str, arguments: &Map<String, Value>) -> Option<String> {
        let shown = run(self.0.get(tool)?, arguments);
        shown
            .inspect_err(|why| {
                tracing::warn!(tool, why, "a displayScript failed; the call is shown as plain text")
            })
            .ok()
    }
}

/// Renders a call without a script, as `name(arguments)`.
pub(crate) fn plain_text(name: &str, arguments: &Value) -> String {
    truncated(format!("{name}({arguments})"), SHOWN_BYTES)
}

/// Truncates a text to at most `bytes`, with an ellipsis at the end.
fn truncated(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        text.truncate(text.floor_char_boundary(bytes - '…'.len_utf8()));
        text.push('…');
    }
    text
}

fn run(script: &AST, arguments: &Map<String, Value>) -> Result<String, String> {
    let engine = engine(Some(Instant::now() + SCRIPT_TIME));
    let mut scope = Scope::new();
    let converted = ArgumentConverter { left: MAX_ARGUMENTS }.map(arguments, 0);
    scope.push_constant_dynamic("args", converted.ok_or("the arguments are too many or nested too deeply")?);
    let value: Dynamic =
        engine.eval_ast_with_scope(&mut scope, script).map_err(|error| short(&error.to_string()))?;
    let kind = value.type_name();
    let text = value.into_string().map_err(|_| format!("the result is {kind}, not a string"))?;
    match text.len() {
        0 => Err("the result is empty".into()),
        1..=SHOWN_BYTES => Ok(text),
        length => Err(format!("the result has {length} bytes, more than {SHOWN_BYTES}")),
    }
}

/// Truncates an error, which may contain text of the script.
fn short(why: &str) -> String {
    why.chars().take(200).collect()
}

/// Returns an engine with the functions that scripts may use. It is cheap, because the functions are shared.
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
        .set_max_operations(MAX_OPERATIONS)
        .set_max_expr_depths(MAX_DEPTH, MAX_DEPTH)
        .set_max_call_levels(MAX_CALL_DEPTH)
        .set_max_variables(MAX_VARIABLES)
        .set_max_functions(MAX_FUNCTIONS)
        .set_max_string_size(TEXT_BYTES)
        .set_max_array_size(MAX_ITEMS)
        .set_max_map_size(MAX_ITEMS);
    if let Some(until) = until {
        engine.on_progress(move |_| (Instant::now() > until).then(|| "the time limit was exceeded".into()));
    }
    engine
}

/// Converts arguments for a script: all of them or none, because a part would be displayed as if it were everything.
/// Only strings are truncated, which the ellipsis shows.
struct ArgumentConverter {
    left: usize,
}

impl ArgumentConverter {
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
            _ if depth > MAX_DEPTH => return None,
            Value::Null => Dynamic::UNIT,
            Value::Bool(bool) => (*bool).into(),
            Value::Number(number) => match number.as_i64() {
                Some(whole) => whole.into(),
                None => Dynamic::from(number.as_f64()?),
            },
            Value::String(text) => truncated(text.clone(), ARGUMENT_BYTES).into(),
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
    fn a_script_renders_a_call() {
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

    /// Each script ends within its time limit and leaves the plain text.
    #[test]
    fn a_script_that_fails_or_exceeds_its_limits_is_ignored() {
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
        // A value that exceeds the limits cannot be used: a part of it would be displayed as if it were everything.
        assert_eq!(show("`${args.many.len()}`", large.clone()), None);
        assert_eq!(show("args.long.split(\"…\").len().to_string()", large.clone()).as_deref(), Some("2"));
        // The most memory that a single function can use.
        assert_eq!(show("args.long.replace(\"x\", args.long); args.long", large), None);
        assert_eq!(show("args.path", json!({"path": "a", "deep": deep})), None);
        assert_eq!(show("args.path", json!({"path": "a", "many": vec![0; 20_000]})), None);
    }

    #[test]
    fn the_total_size_of_the_scripts_of_a_toolset_is_bounded() {
        let long = format!("\"ok\" // {}", "x".repeat(15_000));
        let scripts = Scripts::of(&toolset(&vec![&*long; 30]));
        let shown = (0..30).filter(|number| scripts.has(&format!("t{number}"))).count();
        assert_eq!(shown, SCRIPTS_BYTES / long.len());
    }

    #[test]
    fn a_call_without_a_script_is_shown_as_plain_text() {
        assert_eq!(plain_text("read", &json!({"path": "a"})), r#"read({"path":"a"})"#);
        let long = plain_text("read", &json!({"path": "ü".repeat(1000)}));
        assert!(long.len() <= SHOWN_BYTES && long.ends_with('…'), "{long}");
    }
}
