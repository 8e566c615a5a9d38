//! Programs that the tests start: the `rap` binary and the example tool servers.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Path of the `rap` binary. Cargo builds it for the integration tests of `rap-cli`.
pub fn rap_path() -> PathBuf {
    built("rap")
}

/// Path of an example of `rap-tool` or `rap-runtime`. Cargo builds it for the tests of that crate.
pub fn example_path(name: &str) -> PathBuf {
    built(&format!("examples/{name}"))
}

/// Path of the example in plain Python.
pub fn python_tool_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python-tool/tool.py")
}

/// Returns the path of a program in the directory of this build.
fn built(name: &str) -> PathBuf {
    let mut directory = std::env::current_exe().unwrap();
    directory.pop();
    if directory.ends_with("deps") {
        directory.pop();
    }
    let path = directory.join(name);
    assert!(path.exists(), "{} is missing: run the tests with --workspace", path.display());
    path
}

/// The `rap` binary with an empty environment.
pub fn rap(arguments: &[&str]) -> Command {
    let mut command = Command::new(rap_path());
    command.args(arguments).env_clear().stdin(Stdio::null());
    command
}

/// Command of an example of `rap-tool`; see [`tool_server`].
pub fn example(name: &str, data: &Path, environment: &[(&str, &str)]) -> Command {
    tool_server(Command::new(example_path(name)), data, environment)
}

/// Command of the example in plain Python; see [`tool_server`].
pub fn python_tool(data: &Path, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new("python3");
    command.arg(python_tool_path());
    tool_server(command, data, environment)
}

/// Makes a tool server listen on any free port and keep its data in a directory.
pub fn tool_server(mut command: Command, data: &Path, environment: &[(&str, &str)]) -> Command {
    for name in ["RAP_TOOL_BEARER", "RAP_TOOL_HMAC", "RAP_TOOL_KEY", "RAP_TOOL_URL", "RUST_LOG"] {
        command.env_remove(name);
    }
    command.env("PORT", "0").env("RAP_TOOL_DATA", data).envs(environment.iter().copied());
    command.stdout(Stdio::null());
    command
}
