//! The configuration: `rap.toml`, `RAP_` variables over it, flags over both.
//!
//! What comes out is valid and complete. What does not fit is told with its place, all mistakes at once. Secrets
//! are neither in errors nor in `Debug`. The process environment is never read here; it arrives as data.

mod agent;
mod base_url;
mod document;
mod limits;
mod mistake;
mod model;
mod outside;
mod read;
mod section;
mod value;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use rap_protocol::Secret;
pub use rap_runtime::model::anthropic::Thinking;
use rap_runtime::model::scripted;
pub use rap_runtime::model::{Options, Provider};
pub use rap_runtime::{ToolGlob, Window};

pub use self::base_url::BaseUrl;
pub use self::limits::Limits;
pub use self::mistake::{Error, Mistake, Place, Problem};
use self::outside::Outside;
use self::read::Reading;

/// The file that is read when none is named, and that `rap init` writes.
pub const FILE_NAME: &str = "rap.toml";

/// The environment variables by name.
pub type Environment = BTreeMap<String, String>;

/// What a runtime is told before it starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where it listens, and for whom.
    pub server: Server,
    /// Where it keeps everything.
    pub store: Store,
    /// What is asked by every agent without a model of its own.
    pub model: Model,
    /// Who asks. There is at least one; the first is the one that is meant when none is named.
    pub agents: Vec<Agent>,
    /// Where tools are.
    pub tool_servers: Vec<ToolServer>,
    /// Every bound.
    pub limits: Limits,
}

/// Where the runtime listens, and for whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// The address to bind.
    pub listen: SocketAddr,
    /// What tool servers can reach, if it was given. There is one whenever `listen` has no address to hand out.
    pub public_url: Option<BaseUrl>,
    /// The tokens of clients. Without any, `listen` is on this machine.
    pub tokens: Vec<Secret>,
}

impl Server {
    /// The base of callback URLs of a server that is bound to this address.
    pub fn url_at(&self, bound: SocketAddr) -> String {
        self.public_url.as_ref().map_or_else(|| format!("http://{bound}"), BaseUrl::to_string)
    }
}

/// Where the runtime keeps everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Store {
    /// In this SQLite file.
    Sqlite(PathBuf),
}

/// What the runtime asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// Who answers.
    pub provider: &'static Provider,
    /// What it is told.
    pub options: Options,
    /// Whether it can be shown images.
    pub images: bool,
    /// How much it can read, and when a conversation is summarised.
    pub window: Window,
}

/// Someone to talk to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// What threads call it: 1 to 128 letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// Its instructions; may be empty.
    pub system: String,
    /// Which tools it may use.
    pub tools: Vec<ToolGlob>,
    /// Which of these it may use in a thread that an event made.
    pub event_tools: Vec<ToolGlob>,
    /// Which of them a person has to allow each time.
    pub approve: Vec<ToolGlob>,
    /// Its own model.
    pub model: Option<Model>,
    /// Every bound as it is for its threads, where it has bounds of its own.
    pub limits: Option<Limits>,
}

/// Where tools are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolServer {
    /// The URL that the discovery path is appended to.
    pub url: BaseUrl,
    /// The token to show, if any.
    pub bearer: Option<Secret>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            server: Server::default(),
            store: Store::Sqlite("rap.db".into()),
            model: Model {
                provider: &scripted::PROVIDER,
                options: Options::default(),
                images: true,
                window: Window::default(),
            },
            agents: vec![Agent::default()],
            tool_servers: Vec::new(),
            limits: Limits::default(),
        }
    }
}

impl Default for Server {
    fn default() -> Self {
        Server { listen: (Ipv4Addr::LOCALHOST, 7420).into(), public_url: None, tokens: Vec::new() }
    }
}

impl Default for Agent {
    fn default() -> Self {
        Agent {
            name: "default".into(),
            system: String::new(),
            tools: vec![ToolGlob::every()],
            event_tools: vec![ToolGlob::every()],
            approve: Vec::new(),
            model: None,
            limits: None,
        }
    }
}

/// Everything that a configuration is made of. There is no `Debug`, since there are secrets in it.
pub struct Sources {
    /// The file.
    pub file: File,
    /// The environment, whose `RAP_SECTION_KEY` variables go over the file.
    pub environment: Environment,
    /// What goes over both.
    pub flags: Vec<Flag>,
}

/// Which file to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum File {
    /// This one. It has to be there.
    Given(PathBuf),
    /// This one, if it is there.
    IfPresent(PathBuf),
}

/// A flag that sets a key. Its value may be a secret, so there is no `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Flag {
    /// The key with its section: `server.listen`.
    pub key: &'static str,
    /// What was given.
    pub value: String,
    /// The flag itself: `--listen`.
    pub name: &'static str,
}

impl Config {
    /// Reads and checks it all.
    pub fn load(sources: &Sources) -> Result<Config, Error> {
        let (text, path) = sources.file.read()?;
        let directory = path.parent().unwrap_or(Path::new(""));
        let mut document = document::parse(&text, &path.display().to_string())?;
        document::lay_variables(&mut document, &sources.environment);
        document::lay_flags(&mut document, &sources.flags);
        Reading::of(document, &Outside { environment: &sources.environment, directory }).outcome()
    }
}

impl File {
    /// The text and the path. An absent file that need not be there is an empty one.
    fn read(&self) -> Result<(String, &Path), Error> {
        let (File::Given(path) | File::IfPresent(path)) = self;
        match std::fs::read_to_string(path) {
            Ok(text) => Ok((text, path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && matches!(self, File::IfPresent(_)) => {
                Ok((String::new(), path))
            }
            Err(why) => Err(Error::Unreadable { path: path.clone(), why }),
        }
    }
}
