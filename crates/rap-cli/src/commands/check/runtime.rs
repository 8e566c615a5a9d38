//! `rap check runtime`: checks a runtime that it starts, or that is already running. It acts as the tool servers, the
//! model and the user.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use rap_api::client::DEFAULT_URL;
use rap_conformance::Report;
use rap_conformance::runtime::placeholders::{CommandTemplate, Error as Placeholder};
use rap_conformance::runtime::{
    Api, Checker, Error, Launch, Process, RuntimeHost, SayCommand, Timeouts, User,
};
use tokio::net::TcpListener;
use url::Url;

use super::{ReportOptions, base_url, clear_progress, show_progress};
use crate::commands::{Token, WrongUsage};
use crate::table::plain;

/// Arguments of `rap check runtime`.
#[derive(Args)]
pub struct Runtime {
    /// URL of the client API [default: http://{listen}, or http://127.0.0.1:7420 without a command].
    #[arg(long, value_name = "URL", value_parser = base_url)]
    url: Option<Url>,
    /// Token for the client API, if it requires one; prefer RAP_TOKEN.
    #[arg(long, env = "RAP_TOKEN", hide_env_values = true)]
    token: Option<Token>,
    /// Command that sends a message to an agent, used instead of the client API. It must contain {thread} and {text}, and
    /// may contain {data}, {config}, {listen}, {port} and {url}.
    #[arg(long, value_name = "COMMAND", value_parser = SayCommand::new, conflicts_with = "url")]
    say: Option<SayCommand>,
    /// Template of {config}; its placeholders are filled [default: a configuration of rap serve].
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Environment variable for the command; its placeholders are filled.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Address that the tool servers and the model listen on.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// URL under which the runtime reaches them, if it differs from their address.
    #[arg(long, value_name = "URL", value_parser = base_url)]
    public_url: Option<Url>,
    /// Maximum time to wait for an expected request, in seconds.
    #[arg(long, alias = "patience", value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    timeout: f64,
    /// Time to wait before concluding that no further request comes, in seconds.
    #[arg(long, alias = "settle", value_name = "SECONDS", default_value_t = 3.0, value_parser = seconds)]
    quiet_period: f64,
    #[command(flatten)]
    report_options: ReportOptions,
    /// Command that starts the runtime, with placeholders in it.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub(super) async fn check(flags: Runtime) -> anyhow::Result<()> {
    let report_options = flags.report_options;
    // On ^C, dropping the future also kills the runtime.
    let report = tokio::select! {
        report = flags.run() => report,
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
    };
    clear_progress();
    match report {
        Ok(report) => report_options.show(&report),
        Err(error @ (Error::Template { .. } | Error::Placeholder(_))) => {
            Err(WrongUsage(error.to_string()).into())
        }
        Err(error) => Err(error.into()),
    }
}

impl Runtime {
    async fn run(self) -> Result<Report, Error> {
        let timeouts = Timeouts {
            arrival: Duration::from_secs_f64(self.timeout),
            quiet_period: Duration::from_secs_f64(self.quiet_period),
        };
        let listener = TcpListener::bind(self.listen).await.map_err(Error::Listen)?;
        let public = self.public_url.as_ref().map(Url::as_str);
        let checker = Checker::listen(listener, public, timeouts).await?;
        let (values, profile) = (checker.values(), self.report_options.profile.into());
        if self.command.is_empty() {
            let user = self.user(None, Vec::new())?;
            eprintln!("Configure the runtime with these values and start it:\n\n{}", listed(&values));
            checker.wait_for_contact(&user).await;
            return checker.run(&self.target(), profile, user, None, &show_progress).await;
        }
        let launch = Launch {
            command: CommandTemplate::from_words(self.command.clone())?,
            environment: self.env.clone(),
            template: self.template.clone(),
            address: self.url.as_ref().and_then(address),
            start_timeout: timeouts.arrival,
        };
        let process = Process::prepare(&launch, &values)?;
        let user = self.user(process.address(), process.values())?;
        process.start().await?;
        let host: &dyn RuntimeHost = &process;
        let report = checker.run(&self.target(), profile, user, Some(host), &show_progress).await;
        if matches!(report, Err(Error::NoContact(_))) {
            eprintln!("Last output of the runtime:\n{}\n", plain(&process.log()));
        }
        process.kill().await;
        report
    }

    fn target(&self) -> String {
        match (self.command.first(), &self.url) {
            (Some(program), _) => program.clone(),
            (None, Some(url)) => url.to_string(),
            (None, None) => "the runtime".into(),
        }
    }

    /// The user. `values` are the placeholders of the runtime's process, for the command of `--say`.
    fn user(&self, address: Option<&str>, values: Vec<(&'static str, String)>) -> Result<User, Error> {
        if let Some(say) = &self.say {
            return Ok(User::Command(say.clone().with_values(values)));
        }
        let url = match (&self.url, address) {
            (Some(url), _) => Ok(url.clone()),
            (None, Some(address)) => Url::parse(&format!("http://{address}")),
            (None, None) if self.command.is_empty() => Url::parse(DEFAULT_URL),
            (None, None) => return Err(Error::Placeholder(Placeholder::NoAddress)),
        };
        let url = url.map_err(|error| Error::NoContact(format!("no URL of the client API: {error}")))?;
        let token = self.token.as_ref().map(|Token(secret)| secret.clone());
        Ok(User::Api(Api::new(url, token.filter(|token| !token.expose().is_empty()))))
    }
}

fn listed(values: &[(&'static str, String)]) -> String {
    values.iter().map(|(name, value)| format!("  {{{name}}}  {value}\n")).collect()
}

/// Host and port of a URL.
fn address(url: &Url) -> Option<String> {
    Some(format!("{}:{}", url.host_str()?, url.port_or_known_default()?))
}

fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    if name.is_empty() {
        Err("the name of the variable is empty".into())
    } else {
        Ok((name.into(), value.into()))
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected a number of seconds from 0.1 to 3600".into()),
    }
}
