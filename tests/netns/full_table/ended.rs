//! What is over in a full table, and what only seems to be.

use rstest::rstest;
use underpass_abi::flow::{protocol, state};
use underpass_tests::{
    flow_table::{self, Then},
    prelude::*,
};

use super::{FLOWS, PORT, small, turn_over};

/// Who has closed last may have to say so again until he hears that it arrived: that is no connection that is over.
#[rstest]
fn what_waits_for_its_last_acknowledgement_stays(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] liberal: bool,
) -> Result<()> {
    /// A port whose clients acknowledge nothing, but with what else they say: the server is the last to close.
    const CLOSES: u16 = 445;
    needs_root!();
    let lab = small()?;
    lab.firewall.set_liberal(liberal)?;
    // Nor does connection tracking hear the last one, which it waits for shorter than the server.
    lab.firewall.tolerate_invalid();
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let closes = family.remote_at(CLOSES);
    let _servers = [
        tcp::Server::start(lab.world.netns(), remote)?,
        tcp::Server::start(lab.world.netns(), closes)?,
    ];
    pod.netns().nft(&format!(
        "table inet silence {{
            chain output {{
                type filter hook output priority 0;
                tcp dport {CLOSES} tcp flags & (fin|syn|rst|psh|ack) == ack drop
            }}
        }}"
    ))?;
    tcp::visit(pod.netns(), closes)?;
    let waiting = || -> Result<usize> {
        let mut found = 0;
        flow_table::walk(&lab.node, family, |entry| {
            let closed = state::FINISHED | state::ASSURED;
            found += usize::from(entry.protocol == protocol::TCP && entry.state & closed == closed);
            Then::Stays
        })?;
        Ok(found)
    };
    eventually("both have closed", || {
        let found = waiting()?;
        ensure!(found == 2, "{found}");
        Ok(())
    })?;
    let meter = Meter::start(&lab.node)?;
    turn_over(&meter, FLOWS / 2, pod.netns(), remote)?;
    // For a moment the last of the others waits as well.
    eventually("it stays", || {
        let found = waiting()?;
        ensure!(found == 2, "{found}");
        Ok(())
    })?;
    meter.expect_none(Counter::TableFull)
}
