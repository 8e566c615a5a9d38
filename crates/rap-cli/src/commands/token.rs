//! `rap token`: creates, lists and revokes tokens of clients.

use clap::Subcommand;
use rap_api::client::Client;
use rap_api::{CreateToken, CreatedToken, ListedToken, Time, TokenScope, Tokens};
use serde_json::json;

use super::{Connection, Listing, OutputFormat, WrongUsage, print, print_json};
use crate::table::{Table, one_line, terminal_width};
use crate::time_format;

/// Subcommands of `rap token`.
#[derive(Subcommand)]
pub enum Command {
    /// Create a token and print it. It is shown only once.
    ///
    /// The token itself is printed to stdout, everything else to stderr.
    #[command(after_help = "Example: rap token create phone --user ann")]
    Create {
        /// Name for people, such as the program that will use the token.
        name: String,
        /// Requests that the token permits.
        #[arg(long, value_enum, default_value_t = TokenScope::Write)]
        scope: TokenScope,
        /// Only threads of this user: the token sees no others, and the threads that it creates belong to the user.
        #[arg(long, value_name = "ID")]
        user: Option<String>,
        /// Output format.
        #[command(flatten)]
        output: OutputFormat,
    },
    /// List the tokens that were created, oldest first. Those of server.tokens are not among them.
    Ls(Listing),
    /// Revoke a token. Requests with it are refused from now on, and its event streams end.
    #[command(after_help = "Example: rap token revoke 3")]
    Revoke {
        /// Id of the token, as `rap token ls` shows it.
        id: String,
    },
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Create { name, scope, user, output } => {
            create(&client, CreateToken { name, scope, user_id: user }, output).await
        }
        Command::Ls(listing) => listing.show::<Tokens>(&client, &[], list).await,
        Command::Revoke { id } => revoke(&client, &id).await,
    }
}

async fn create(client: &Client, new: CreateToken, output: OutputFormat) -> anyhow::Result<()> {
    if new.scope == TokenScope::Admin && new.user_id.is_some() {
        let why = "an admin token sees all threads: leave --user out, or use --scope write or read";
        return Err(WrongUsage(why.into()).into());
    }
    let CreatedToken { id, token, open } = client.create_token(&new).await?;
    if output.json {
        print_json(&json!({"id": id, "token": token, "open": open}))?;
    } else {
        print(&format!("{token}\n"))?;
    }
    let user = new.user_id.map_or(String::new(), |user| format!(" for threads of user {}", one_line(&user)));
    eprintln!("created token {id} ({}) with the scope {}{user}", one_line(&new.name), new.scope);
    eprintln!("this is the only time that it is shown; revoke it with: rap token revoke {id}");
    if open {
        eprintln!("note: this machine can still use the API without a token, until server.tokens is set");
    }
    Ok(())
}

fn list(tokens: &[ListedToken]) -> anyhow::Result<()> {
    if tokens.is_empty() {
        return Ok(print("no tokens\n")?);
    }
    let now = Time::now();
    let mut table = Table::new(["ID", "NAME", "SCOPE", "USER", "CREATED", "LAST USED"]);
    for ListedToken { id, name, scope, user_id, created_at, last_used_at } in tokens {
        table.row([
            id.clone(),
            name.clone(),
            scope.to_string(),
            user_id.clone().unwrap_or_default(),
            time_format::relative(*created_at, now),
            last_used_at.map_or_else(|| "never".into(), |at| time_format::relative(at, now)),
        ]);
    }
    Ok(print(&table.render(terminal_width()))?)
}

async fn revoke(client: &Client, id: &str) -> anyhow::Result<()> {
    match client.revoke_token(id).await {
        Err(error) if error.code() == Some("no_such_token") => {
            Err(anyhow::anyhow!("no token `{id}`; list tokens with: rap token ls"))
        }
        outcome => {
            outcome?;
            Ok(print(&format!("revoked token {id}\n"))?)
        }
    }
}
