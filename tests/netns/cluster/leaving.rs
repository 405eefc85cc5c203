//! The way back of a node: all of ours goes, and what is others' stays.

use std::{collections::BTreeSet, fs, net::SocketAddr};

use nix::sys::signal::Signal;
use underpass_tests::{prelude::*, traffic::serve};

use super::{
    fixture::Cluster,
    member::{BIN, Member, NET, TUNNEL},
};
use look::look;

mod look;

/// The port of the node that leads to a pod.
const HOST: u16 = 8_080;
const INSIDE: u16 = 80;

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
    netns.run(|| fs::write(format!("{BIN}/macvlan"), "of others"))?;

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

/// What others have on a node, beside what the agent will make.
fn furnish(member: &Member) -> Result<()> {
    member.node.netns().ip(&[
        "route add 10.99.0.0/16 via 198.18.10.254 proto 118".to_owned(),
        "route add fd00:99::/64 via 2001:db8:a::fe proto 118".to_owned(),
        format!(
            "neighbour add 198.18.10.77 lladdr 02:00:00:00:00:77 dev {} nud permanent",
            Node::UPLINK
        ),
        "link add others type veth peer name theirs".to_owned(),
    ])?;
    let leases = "/var/lib/cni/networks/others";
    member.node.netns().run(|| {
        for folder in [BIN, NET, leases] {
            fs::create_dir_all(folder)?;
        }
        let network = r#"{"cniVersion": "1.0.0", "name": "others", "type": "macvlan"}"#;
        fs::write(format!("{BIN}/macvlan"), "of others")?;
        fs::write(format!("{NET}/20-others.conf"), network)?;
        Ok(fs::write(format!("{leases}/10.99.0.2"), "somebody")?)
    })
}

/// A pod comes, is reached by its host port, and goes.
fn use_it(cluster: &Cluster, member: &Member) -> Result<()> {
    let conf = member.conf()?.with_host_port(HOST, INSIDE);
    let pod = Pod::add(&member.node, "pod", &conf)?;
    for family in Family::BOTH {
        let _servers = serve(pod.netns(), pod.at(family, INSIDE))?;
        let at = SocketAddr::new(member.address(family), HOST);
        tcp::Client::connect(&cluster.fabric, at)?.reset()?;
    }
    pod.del()
}

/// What stays, as `docs/operating.md` has it, and what a kernel that forwards makes of that. A `*` is whatever is there.
const STAYS: [&str; 9] = [
    "clsact: eth0",
    "clsact: lo",
    "file: /run/underpass/*",
    "sysctl: ipv4/ip_forward 1",
    "sysctl: ipv4/conf/*/forwarding 1",
    "sysctl: ipv4/conf/all/accept_redirects 0",
    "sysctl: ipv6/conf/*/forwarding 1",
    "sysctl: ipv6/conf/eth0/accept_ra 2",
    "sysctl: netfilter/nf_conntrack_tcp_be_liberal 1",
];

fn is_like(line: &str, pattern: &str) -> bool {
    let (begin, end) = pattern.split_once('*').unwrap_or((pattern, ""));
    let is_exact = !pattern.contains('*');
    line.starts_with(begin) && line.ends_with(end) && (!is_exact || line == pattern)
}

/// Fails unless what a node has now is what it had before, and what stays.
fn expect_only_what_stays(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Result<()> {
    let new: Vec<_> = after.difference(before).collect();
    let left = new.iter().filter(|line| {
        let is_known = STAYS.iter().any(|pattern| is_like(line, pattern));
        !is_known
    });
    let left: Vec<_> = left.collect();
    ensure!(left.is_empty(), "left behind: {left:#?}");
    for pattern in STAYS {
        let stays = new.iter().any(|line| is_like(line, pattern));
        ensure!(stays, "{pattern} does not stay: {new:#?}");
    }
    // Of a sysctl that has another value now the one of before is missing.
    let key = |line: &str| line.rsplit_once(' ').map(|(key, _)| key.to_owned());
    let lost = before.difference(after).filter(|line| {
        let is_changed = new.iter().any(|new| key(new) == key(line));
        !(line.starts_with("sysctl: ") && is_changed)
    });
    let lost: Vec<_> = lost.collect();
    ensure!(lost.is_empty(), "taken from others: {lost:#?}");
    Ok(())
}

#[test]
fn what_stays_is_what_the_documentation_says() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::cold(&[0, 0, 1])?;
    let _firewalls = cluster.fortify()?;
    let member = &mut cluster.members[0];
    furnish(member)?;
    let before = look(member)?;
    member.start_agent_with(&["--resync", "2", "--config", r#"{"conntrackLiberal": true}"#])?;
    let member = &cluster.members[0];
    cluster.settle_one(member)?;
    member.knows_neighbours(2)?;
    use_it(&cluster, member)?;
    // It is there to be seen.
    let meanwhile = look(member)?;
    for ours in [
        "link: *underpass-vxlan*",
        "address: *10.244.1.0*",
        "route: *\"protocol\":\"117\"*",
        "neighbour show nud permanent: *10.244.3.0*",
        "fdb: *underpass-vxlan*",
        "filter: eth0 ingress *",
        "filter: eth0 egress *",
        "filter: lo *",
        "file: /run/opt/bin/*",
        "file: /run/opt/net.d/*",
        "folder: /var/lib/cni/networks/pods",
        "folder: /var/lib/cni/networks/.underpass*",
        "file: /sys/fs/bpf/underpass/*",
    ] {
        let mut new = meanwhile.difference(&before);
        ensure!(
            new.any(|line| ours.split('*').all(|part| line.contains(part))),
            "no {ours}: {meanwhile:#?}"
        );
    }

    cluster.members[0].stop_agent(Signal::SIGTERM);
    let member = &cluster.members[0];
    let output = uninstall(member)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    expect_only_what_stays(&before, &look(member)?).with_context(|| said.into_owned())
}
