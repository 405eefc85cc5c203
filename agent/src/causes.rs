//! Why something failed, in one sentence for the log.

use std::error::Error;
use std::fmt::Write as _;

/// Says an error and what is behind it. Of a client that can't reach the API server the first sentence is "client error
/// (Connect)"; who refused, and what of its certificate is wrong, is further down. What a sentence says already is not
/// said again.
pub(crate) fn causes(error: &dyn Error) -> String {
    let mut said = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let sentence = cause.to_string();
        if !said.contains(&sentence) {
            // Writing to memory does not fail.
            let _ = write!(said, ": {sentence}");
        }
        next = cause.source();
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_said_once() {
        let refused = std::io::Error::from_raw_os_error(111);
        let refused = anyhow::Error::new(refused).context("tcp connect error");
        let connect = refused.context("client error (Connect)");
        let twice = connect.context("failed to list: client error (Connect)");
        assert_eq!(
            causes(twice.as_ref()),
            "failed to list: client error (Connect): tcp connect error: Connection refused (os error 111)"
        );
    }
}
