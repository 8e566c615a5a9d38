//! Compiler errors for wrong handlers, which have to be helpful.

use std::path::Path;
use std::process::Command;

/// Runs `cargo check` on a program in a temporary package and returns the compiler's output. Uses the lock file and
/// the profile of this workspace, so that dependencies are not built again.
fn compile(program: &str) -> String {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let package = tempfile::tempdir().unwrap();
    std::fs::copy(here.join("../../Cargo.lock"), package.path().join("Cargo.lock")).unwrap();
    let manifest = format!(
        "[package]\nname = \"wrong\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n\
         [profile.dev]\ndebug = \"line-tables-only\"\n\
         [dependencies]\nrap-tool = {{ path = {here:?} }}\ntokio = {{ version = \"1\", features = [\"macros\"] }}\n\
         serde = \"1\"\nschemars = \"1\"\n"
    );
    std::fs::write(package.path().join("Cargo.toml"), manifest).unwrap();
    std::fs::create_dir(package.path().join("src")).unwrap();
    std::fs::write(package.path().join("src/main.rs"), program).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["check", "--offline", "--quiet", "--color", "never"]).current_dir(package.path());
    let output = cargo.output().unwrap();
    assert!(!output.status.success(), "this must not compile");
    String::from_utf8(output.stderr).unwrap()
}

fn program(handler: &str) -> String {
    format!(
        "use rap_tool::prelude::*;\n\
         #[derive(Deserialize, JsonSchema)]\nstruct Args {{}}\n\
         struct Plain {{}}\n\
         fn main() {{\n    let _ = ToolServer::new(\"x\").tool(\"y\", {handler});\n}}\n"
    )
}

#[test]
fn compiler_errors_explain_what_is_wrong_with_a_handler() {
    let cases = [
        (
            "|_: Args, _: Call| async { Ok(vec![1, 2]) }",
            vec!["a tool cannot return `Vec<{integer}>`", "return a `String`, `Json(value)`"],
        ),
        (
            "|_: Plain, _: Call| async { Ok(\"\") }",
            vec!["`Plain` cannot be the arguments of a tool", "#[derive(Deserialize, JsonSchema)]"],
        ),
    ];
    for (handler, expected) in cases {
        let output = compile(&program(handler));
        for words in expected {
            assert!(output.contains(words), "{handler}\n{output}");
        }
    }
}
