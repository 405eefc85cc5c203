//! How long connection tracking remembers what it does not see: seconds here, so that a test sees an entry die.

use std::time::Duration;

use anyhow::Result;

use crate::{netns::Netns, patience};

/// Seconds of each timer, below `net/netfilter/nf_conntrack_`.
const TIMERS: [(&str, u64); 24] = [
    ("generic_timeout", 4),
    ("icmp_timeout", 2),
    ("icmpv6_timeout", 2),
    ("udp_timeout", 2),
    ("udp_timeout_stream", 4),
    ("tcp_timeout_syn_sent", 3),
    ("tcp_timeout_syn_recv", 3),
    ("tcp_timeout_established", 5),
    ("tcp_timeout_fin_wait", 3),
    ("tcp_timeout_close_wait", 3),
    ("tcp_timeout_last_ack", 3),
    ("tcp_timeout_time_wait", 3),
    ("tcp_timeout_close", 3),
    ("tcp_timeout_max_retrans", 5),
    ("tcp_timeout_unacknowledged", 5),
    ("sctp_timeout_closed", 2),
    ("sctp_timeout_cookie_wait", 3),
    ("sctp_timeout_cookie_echoed", 3),
    ("sctp_timeout_established", 4),
    ("sctp_timeout_shutdown_sent", 2),
    ("sctp_timeout_shutdown_recd", 2),
    ("sctp_timeout_shutdown_ack_sent", 2),
    ("sctp_timeout_heartbeat_sent", 3),
    ("sctp_timeout_heartbeat_acked", 4),
];

/// The longest of them: an entry that sees nothing for so long is gone.
pub const LONGEST: Duration = Duration::from_secs(5);

/// Shortens the timers of a namespace, before anybody reads them. Not every kernel has all of them.
pub(super) fn shorten(netns: &Netns) -> Result<()> {
    for (timer, seconds) in TIMERS {
        let key = format!("net/netfilter/nf_conntrack_{timer}");
        if netns.sysctl(&key).is_ok() {
            let length = patience::here(Duration::from_secs(seconds));
            netns.set_sysctl(&key, &length.as_secs().to_string())?;
        }
    }
    Ok(())
}
