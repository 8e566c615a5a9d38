//! Errors of the client. They contain no part of the URL except its host.
//!
//! Error texts of the HTTP libraries are never passed on: each failure is recognised by its type.

use std::error::Error as StdError;
use std::{io, iter};

use hyper_util::client::legacy;
use rap_protocol::Forbidden;

use super::connector;

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The rules do not permit this URL, or any address of its host. No connection was made.
    #[error("the URL is not allowed: {0}")]
    Forbidden(#[from] Forbidden),
    /// The URL cannot be used in an HTTP request.
    #[error("the URL cannot be used in a request")]
    BadUrl,
    /// The URL is https, and the system has no root certificates.
    #[error(
        "https needs root certificates, and this system has none: install ca-certificates, or set SSL_CERT_FILE"
    )]
    NoCertificates,
    /// The credentials for the server are not available, for this reason. The request was not sent.
    #[error("no credentials: {0}")]
    Credentials(String),
    /// The connection could not be established. The request was not sent.
    #[error("could not connect: {0}")]
    Unreachable(String),
    /// The answer did not arrive in time. The server may have received the request.
    #[error("no answer in time")]
    TimedOut,
    /// The connection broke, or the answer is not valid HTTP. The server may have received the request.
    #[error("no valid answer: {0}")]
    Protocol(&'static str),
    /// The answer is longer than the limit of the request.
    #[error("the answer has more than {limit} bytes")]
    TooLong {
        /// The limit, in bytes.
        limit: usize,
    },
}

impl Error {
    pub(super) fn of(error: &legacy::Error) -> Self {
        if let Some(connector::Error::Forbidden(forbidden)) = find(error) {
            return Error::Forbidden(forbidden.clone());
        }
        if error.is_connect() {
            Error::Unreachable(unreachable(error))
        } else {
            Error::Protocol(broken(error))
        }
    }

    /// Converts an error that occurred while the body was read.
    pub(super) fn of_body(error: &hyper::Error) -> Self {
        Error::Protocol(broken(error))
    }
}

fn unreachable(error: &legacy::Error) -> String {
    if let Some(connector::Error::Unresolved(_)) = find(error) {
        return "the host's name could not be resolved".into();
    }
    if let Some(tls) = find::<rustls::Error>(error) {
        return format!("TLS: {tls}");
    }
    match chain(error).filter_map(|error| error.downcast_ref::<io::Error>()).last() {
        Some(io) => io.kind().to_string(),
        None => "the connection could not be established".into(),
    }
}

fn broken(error: &(dyn StdError + 'static)) -> &'static str {
    match find::<hyper::Error>(error) {
        Some(hyper) if hyper.is_parse() => "it is not HTTP/1.1, or its head is too large",
        Some(hyper) if hyper.is_incomplete_message() => "the connection was closed before it was complete",
        _ => "the connection broke",
    }
}

fn find<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    chain(error).find_map(|error| error.downcast_ref())
}

fn chain<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    iter::successors(Some(error), |error| cause(*error))
}

/// Like `source`, except that `source` of an `io::Error` skips the error that it wraps.
fn cause<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a (dyn StdError + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(wrapped) => Some(wrapped),
        None => error.source(),
    }
}
