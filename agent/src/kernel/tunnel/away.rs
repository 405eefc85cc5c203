//! Whether the address that the VXLAN device sends from is there, and since when not.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::health::hold;

/// How long is short: who applies a network's configuration anew takes addresses away and gives them back.
const SHORT: Duration = Duration::from_secs(10);

/// Since when the address has been away, if it is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Away(Arc<Mutex<Option<Instant>>>);

impl Away {
    /// Notes whether it is away now, and tells whether it is and has not been for long.
    pub(super) fn is_short(&self, is_away: bool) -> bool {
        let mut since = hold(&self.0);
        if !is_away {
            *since = None;
        } else if since.is_none() {
            *since = Some(Instant::now());
        }
        since.is_some_and(|since| since.elapsed() < SHORT)
    }

    /// When it will have been away for long; nothing if it is there, or has been.
    pub(crate) fn is_over_at(&self) -> Option<Instant> {
        let over = hold(&self.0).map(|since| since + SHORT);
        over.filter(|over| *over > Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_is_short_until_it_is_over() {
        let away = Away::default();
        assert!(!away.is_short(false) && away.is_over_at().is_none());
        assert!(away.is_short(true));
        let over = away.is_over_at().expect("it is away");
        assert_eq!(over - Instant::now(), SHORT);
        advance(SHORT / 2).await;
        assert!(away.is_short(true) && away.is_over_at() == Some(over));
        advance(SHORT / 2).await;
        assert!(!away.is_short(true) && away.is_over_at().is_none());
        // It has come back, and goes again.
        assert!(!away.is_short(false) && away.is_short(true));
    }
}
