//! Why a call had no answer, told without anything of the URL but its host.
//!
//! The texts of the libraries below never pass through as they are: each failure is recognised by its type.

use std::error::Error as StdError;
use std::{io, iter};

use hyper_util::client::legacy;
use rap_protocol::Forbidden;

use super::resolver;

/// Why a call had no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The policy does not permit this URL, or any address of its host. Nothing was connected to.
    #[error("the URL is not allowed: {0}")]
    Forbidden(#[from] Forbidden),
    /// The request could not be written for this URL.
    #[error("the URL can not be used in a request")]
    BadUrl,
    /// https, on a machine without certificates.
    #[error(
        "https needs the certificates of the machine, which has none: install ca-certificates, or set SSL_CERT_FILE"
    )]
    NoCertificates,
    /// There was no connection; the request was not sent.
    #[error("could not connect: {0}")]
    Unreachable(String),
    /// The answer did not come in time. The request may have arrived.
    #[error("no answer in time")]
    TimedOut,
    /// The connection broke, or what came is not HTTP. The request may have arrived.
    #[error("no usable answer: {0}")]
    Protocol(&'static str),
    /// The answer is longer than was asked for.
    #[error("the answer has more than {limit} bytes")]
    TooLong {
        /// What was asked for.
        limit: usize,
    },
}

impl Error {
    pub(super) fn of(error: &legacy::Error) -> Self {
        if let Some(resolver::Error::Forbidden(forbidden)) = find(error) {
            return Error::Forbidden(forbidden.clone());
        }
        if error.is_connect() {
            Error::Unreachable(unreachable(error))
        } else {
            Error::Protocol(broken(error))
        }
    }

    /// The body of an answer broke off.
    pub(super) fn of_body(error: &hyper::Error) -> Self {
        Error::Protocol(broken(error))
    }
}

fn unreachable(error: &legacy::Error) -> String {
    if let Some(resolver::Error::Unresolved(_)) = find(error) {
        return "the host's name could not be resolved".into();
    }
    if let Some(tls) = find::<rustls::Error>(error) {
        return format!("TLS: {tls}");
    }
    match chain(error).filter_map(|error| error.downcast_ref::<io::Error>()).last() {
        Some(io) => io.kind().to_string(),
        None => "the connection could not be made".into(),
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

/// Like `source`, which for an `io::Error` would pass over the very error that it wraps.
fn cause<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a (dyn StdError + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(wrapped) => Some(wrapped),
        None => error.source(),
    }
}
