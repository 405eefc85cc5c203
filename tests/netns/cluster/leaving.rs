//! The way back of a node: all of ours goes, and what is others' stays.

use nix::sys::signal::Signal;
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{BIN, Member, NET, TUNNEL},
};

/// What the agent says when it is to take all of its own away.
fn uninstall(member: &Member) -> Result<std::process::Output> {
    let mut command = member.command(&["--uninstall"])?;
    member.node.netns().output(&mut command, &[])
}

fn refused(member: &Member, why: &str) -> Result<()> {
    let before = member.routes()?;
    let output = uninstall(member)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && said.contains(why), "{said}");
    ensure!(
        member.routes()? == before && member.conflist()?.is_some(),
        "it changed something: {said}"
    );
    Ok(())
}

#[test]
fn uninstall_leaves_what_is_others() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 0, 1])?;
    cluster.settle()?;
    let member = &mut cluster.members[0];
    let pod = member.pod("last")?;
    let foreign = [
        "10.99.0.0/16 via 198.18.10.254 proto 118",
        "fd00:99::/64 via 2001:db8:a::fe proto 118",
    ];
    let netns = member.node.netns().clone();
    netns.ip(&foreign.map(|route| format!("route add {route}")))?;
    netns.run(|| std::fs::write(format!("{BIN}/macvlan"), "of others"))?;

    refused(member, "is in use")?;
    member.stop_agent(Signal::SIGTERM);
    refused(member, "1 container is attached")?;
    pod.del()?;
    let output = uninstall(member)?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );

    ensure!(member.routes()?.is_empty(), "{:?}", member.routes()?);
    ensure!(netns.ifindex(TUNNEL).is_err(), "the device is there");
    ensure!(member.names(NET)?.is_empty(), "{:?}", member.names(NET)?);
    ensure!(
        member.names(BIN)?.into_iter().eq(["macvlan".to_owned()]),
        "{:?}",
        member.names(BIN)?
    );
    let pins = member.node.bpf_root().display().to_string();
    ensure!(
        member.names(&pins)?.is_empty(),
        "{:?}",
        member.names(&pins)?
    );
    for (family, range) in [("-4", "10.99.0.0/16"), ("-6", "fd00:99::/64")] {
        let found = netns.ip_json(&[family, "route", "show", range])?;
        ensure!(
            found.as_array().is_some_and(|routes| routes.len() == 1),
            "{found}"
        );
    }
    // Once more, and there is nothing to do.
    let output = uninstall(member)?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
