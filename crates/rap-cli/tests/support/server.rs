//! Runs the example tool servers as processes.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// A tool server process. It is killed on drop.
pub struct Server {
    pub url: String,
    child: Child,
    _data: TempDir,
}

impl Server {
    /// Starts the rap-tool example with one tool of each kind.
    pub fn kitchen_sink(environment: &[(&str, &str)]) -> Server {
        let mut path = std::env::current_exe().unwrap();
        path.pop();
        path.pop();
        let path = path.join("examples/kitchen_sink");
        assert!(path.exists(), "{} is missing: cargo build -p rap-tool --examples", path.display());
        let mut command = Command::new(path);
        command.env_clear();
        Server::start(command, environment)
    }

    /// Starts the example in plain Python.
    pub fn python(environment: &[(&str, &str)]) -> Server {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python-tool/tool.py");
        let mut command = Command::new("python3");
        command.arg(program).env_remove("RAP_TOOL_BEARER");
        Server::start(command, environment)
    }

    fn start(mut command: Command, environment: &[(&str, &str)]) -> Server {
        let data = tempfile::tempdir().unwrap();
        command.env("PORT", "0").env("RAP_TOOL_DATA", data.path()).envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let url =
            lines.by_ref().find_map(|line| Some(line.split_once("listening url=")?.1.trim().to_owned()));
        std::thread::spawn(move || lines.for_each(drop));
        Server { url: url.expect("the example did not start"), child, _data: data }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}
