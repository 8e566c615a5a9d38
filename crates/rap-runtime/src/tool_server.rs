//! Address of a tool server: a fixed URL, or the current port of its process.
//!
//! The program around the runtime may start tool servers itself. Such a server gets another port whenever it is started
//! again, so no address of it is stored: `url` is a name that stays the same, and every request asks for the current
//! address. The server has one port. Therefore every URL on loopback that it has named, in a toolset or with a question, is
//! taken to lead to the port that it has now.

use std::time::Duration;

use rap_io::credentials::Credentials;
use rap_io::secret_box::Key;
use rap_protocol::url::is_on_loopback;
use tokio::sync::watch;
use url::Url;

/// Time for discovery of a server that answers only when it has started. A model request waits for it, too, since a session
/// would otherwise begin without its tools.
const SLOW_START: Duration = Duration::from_secs(20);

/// A tool server and the runtime's credentials for it.
#[derive(Debug, Clone)]
pub struct ToolServer {
    /// Base URL, without a trailing slash. For a server that is started, `command:` and a name that stays the same.
    pub url: String,
    /// Credentials that requests to the server's own origin and to [`Settings::allow_hosts`](crate::Settings::allow_hosts)
    /// show.
    pub credentials: Credentials,
    /// Credentials that callbacks of the server's calls have to show, besides the callback URL. `None` requires none.
    pub callback_auth: Option<CallbackAuth>,
    /// State of a server that the program around the runtime starts. `None` for a server at a fixed URL.
    pub started: Option<Started>,
    /// Key that a server that is started shares with the server of the same toolset at another runtime. With it, the runtime
    /// passes on the state of sessions that move here. `None` if it takes none.
    pub migration_key: Option<Key>,
    /// Time for discovery, and for which the first model request of a session waits for it. `None` if the limits of the
    /// runtime apply.
    pub discovery_within: Option<Duration>,
}

/// Credentials that callbacks have to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallbackAuth {
    /// A signature with one of the keys with which the runtime signs its requests to the server.
    Hmac,
    /// A client certificate with the host name of the server's URL, which the authority in
    /// [`Settings::tls`](crate::Settings::tls) has signed, or which one of [`Settings::proxies`](crate::Settings::proxies)
    /// has verified.
    Tls,
}

/// State of a tool server that the program around the runtime starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerState {
    /// It has not named its port yet.
    Starting,
    /// It listens on this port of 127.0.0.1.
    Running {
        /// The port.
        port: u16,
    },
    /// It could not be started or has ended, for this reason. It may be started again.
    Failed(String),
}

/// The current state of a tool server that the program around the runtime starts.
#[derive(Debug, Clone)]
pub struct Started {
    state: watch::Receiver<ServerState>,
    /// Path below which the server is, without a trailing slash. Several servers may share a process.
    path: String,
}

impl Started {
    /// Creates a server that is starting. The sender sets its state.
    pub fn channel() -> (watch::Sender<ServerState>, Started) {
        let (sender, receiver) = watch::channel(ServerState::Starting);
        (sender, Started { state: receiver, path: String::new() })
    }

    /// Returns its port, if it is running.
    pub(crate) fn port(&self) -> Option<u16> {
        match *self.state.borrow() {
            ServerState::Running { port } => Some(port),
            _ => None,
        }
    }
}

impl ToolServer {
    /// Returns a server at a fixed URL that needs no credentials.
    pub fn new(url: impl Into<String>) -> ToolServer {
        ToolServer {
            url: url.into(),
            credentials: Credentials::default(),
            callback_auth: None,
            started: None,
            migration_key: None,
            discovery_within: None,
        }
    }

    /// Returns a server in the same process, below the path `/NAME`. It may take longer to answer discovery than others
    /// while it starts.
    #[must_use]
    pub fn below(&self, url: impl Into<String>, name: &str) -> ToolServer {
        let started = self.started.clone().map(|started| Started { path: format!("/{name}"), ..started });
        ToolServer { url: url.into(), started, discovery_within: Some(SLOW_START), ..self.clone() }
    }

    /// Returns the base URL at this moment, or the reason why there is none.
    pub(crate) fn base(&self) -> Result<Url, String> {
        let Some(Started { state, path }) = &self.started else {
            return Url::parse(&self.url)
                .map_err(|error| format!("the URL of the tool server is not valid: {error}"));
        };
        match &*state.borrow() {
            ServerState::Running { port } => Ok(local(*port, path)),
            ServerState::Starting => Err("the tool server is starting".into()),
            ServerState::Failed(why) => Err(why.clone()),
        }
    }

    /// Returns the URL of a path of the server at this moment.
    pub(crate) fn at(&self, path: &str) -> Result<Url, String> {
        let base = self.base()?;
        let base = base.as_str().trim_end_matches('/');
        Url::parse(&format!("{base}{path}"))
            .map_err(|error| format!("the URL of the tool server is not valid: {error}"))
    }

    /// Returns the current address of a URL that the server has named.
    pub(crate) fn resolve(&self, named: &Url) -> Result<Url, String> {
        if self.started.is_none() || !is_on_loopback(named) {
            return Ok(named.clone());
        }
        let mut url = self.base()?;
        url.set_path(named.path());
        url.set_query(named.query());
        Ok(url)
    }

    /// Waits until a server that is starting has its port or has failed.
    pub(crate) async fn settled(&self) {
        if let Some(Started { state, .. }) = &self.started {
            // An error means that the task that starts the server has ended. The last state stays.
            state.clone().wait_for(|state| *state != ServerState::Starting).await.ok();
        }
    }

    /// Returns why a server that is started does not run.
    pub(crate) fn failure(&self) -> Option<String> {
        match &*self.started.as_ref()?.state.borrow() {
            ServerState::Failed(why) => Some(why.clone()),
            _ => None,
        }
    }

    /// Returns the state of the process of a server that is started.
    pub(crate) fn process_state(&self) -> Option<ServerState> {
        self.started.as_ref().map(|started| started.state.borrow().clone())
    }

    /// Returns true if the server is started and runs.
    pub(crate) fn is_running(&self) -> bool {
        self.started.as_ref().is_some_and(|started| started.port().is_some())
    }
}

fn local(port: u16, path: &str) -> Url {
    Url::parse(&format!("http://127.0.0.1:{port}{path}")).expect("bug: such URLs are valid")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn what_a_started_server_named_leads_to_its_current_port() {
        let (state, started) = Started::channel();
        let server = ToolServer { started: Some(started), ..ToolServer::new("command:shell") };
        let named = url("http://127.0.0.1:4000/invoke?x=1");
        assert!(server.resolve(&named).is_err());
        for port in [4000, 5000] {
            state.send_replace(ServerState::Running { port });
            assert_eq!(
                server.resolve(&named).unwrap().as_str(),
                format!("http://127.0.0.1:{port}/invoke?x=1")
            );
            let discovery = server.at("/.well-known/x").unwrap();
            assert_eq!(discovery.as_str(), format!("http://127.0.0.1:{port}/.well-known/x"));
        }
        let elsewhere = url("https://tools.example/invoke");
        assert_eq!(server.resolve(&elsewhere).unwrap(), elsewhere);
        state.send_replace(ServerState::Failed("it ended".into()));
        assert_eq!(server.resolve(&named), Err("it ended".into()));
    }

    #[test]
    fn servers_of_one_process_are_told_apart_by_their_paths() {
        let (state, started) = Started::channel();
        state.send_replace(ServerState::Running { port: 4000 });
        let process = ToolServer { started: Some(started), ..ToolServer::new("command:all") };
        let server = process.below("mcp:files", "files");
        assert_eq!(server.url, "mcp:files");
        assert_eq!(server.at("/close_thread").unwrap().as_str(), "http://127.0.0.1:4000/files/close_thread");
        let named = url("http://127.0.0.1:3000/files/invoke");
        assert_eq!(server.resolve(&named).unwrap().as_str(), "http://127.0.0.1:4000/files/invoke");
    }

    #[test]
    fn what_another_server_named_stays() {
        let server = ToolServer::new("http://127.0.0.1:7501/tools");
        let named = url("http://127.0.0.1:4000/invoke");
        assert_eq!(server.resolve(&named).unwrap(), named);
        assert_eq!(server.at("/close_thread").unwrap().as_str(), "http://127.0.0.1:7501/tools/close_thread");
    }
}
