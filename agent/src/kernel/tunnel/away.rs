//! Whether the address that the VXLAN device sends from is there, and since when not.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::health::hold;

/// How long is short: who applies a network's configuration anew takes addresses away and gives them back.
const SHORT: Duration = Duration::from_secs(10);

/// Since when the address has been away, if it is, and whether somebody was told that it is long.
#[derive(Clone, Debug, Default)]
pub(crate) struct Away(Arc<Mutex<Option<(Instant, bool)>>>);

impl Away {
    /// Notes whether it is away now, and tells whether it is and has not been for long.
    pub(super) fn is_short(&self, is_away: bool) -> bool {
        let mut state = hold(&self.0);
        if !is_away {
            *state = None;
            return false;
        }
        let (since, is_told) = state.get_or_insert((Instant::now(), false));
        *is_told = since.elapsed() >= SHORT;
        !*is_told
    }

    /// When it will have been away for long, or has been and nobody was told; else nothing.
    pub(crate) fn is_over_at(&self) -> Option<Instant> {
        let state = *hold(&self.0);
        state.and_then(|(since, is_told)| (!is_told).then_some(since + SHORT))
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
        // Whoever was about to be told looks once more.
        assert_eq!(away.is_over_at(), Some(over));
        assert!(!away.is_short(true) && away.is_over_at().is_none());
        // It has come back, and goes again.
        assert!(!away.is_short(false) && away.is_short(true));
    }
}
