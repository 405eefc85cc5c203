//! What somebody takes from a node comes back because the kernel says that it is gone: nothing is looked at by time.

use std::process::Command;

use rstest::rstest;
use rtnetlink::{
    MulticastGroup,
    packet_route::{RouteNetlinkMessage, link::LinkFlags, tc::TcAttribute},
};
use underpass_tests::{netns::Netns, prelude::*};

use super::{
    fixture::Cluster,
    made::all,
    member::{Member, TUNNEL},
};

/// By which an agent looks at nothing unless it is told of something.
const NEVER: [&str; 2] = ["--resync", "3600"];

/// What somebody takes, or makes another.
#[derive(Clone, Copy, Debug)]
enum What {
    Routes(Family),
    Neighbours(Family),
    Forwarding,
    Device,
}

/// What there is of the first of three nodes, the second of which is on its link, and the third beyond a router.
struct Scene<'a> {
    cluster: &'a Cluster,
    member: &'a Member,
    before: Vec<String>,
}

impl<'a> Scene<'a> {
    fn look(cluster: &'a Cluster) -> Result<Self> {
        cluster.settle()?;
        let member = &cluster.members[0];
        member.is_ready()?;
        member.rests()?;
        let before = all(member)?;
        Ok(Self {
            cluster,
            member,
            before,
        })
    }

    /// Waits until all is as it was before.
    fn is_whole(&self) -> Result<()> {
        eventually("all is as it was", || {
            let now = all(self.member)?;
            let (before, log) = (&self.before, self.member.log()?);
            ensure!(now == *before, "{before:#?} became {now:#?}, {log}");
            Ok(())
        })
    }

    /// Has these commands run while the agent has nothing to do, and sees that all becomes as it was.
    fn heals(&self, lines: &[String]) -> Result<()> {
        self.member.rests()?;
        // What it will be told of is all that it will know.
        self.member.running()?.hold(true)?;
        let outcome = run(self.member.node.netns(), lines);
        let now = all(self.member);
        self.member.running()?.hold(false)?;
        outcome?;
        let is_same = now.is_ok_and(|now| now == self.before);
        ensure!(!is_same, "nothing was changed");
        self.is_whole()
    }
}

/// Runs commands of iproute2, as an operator types them.
fn run(netns: &Netns, lines: &[String]) -> Result<()> {
    for line in lines {
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().context("a command")?);
        netns.expect(command.args(words), &[])?;
    }
    Ok(())
}

impl What {
    /// What is done to it, one after the other.
    fn takings(self, scene: &Scene<'_>) -> Result<Vec<Vec<String>>> {
        let takings = match self {
            Self::Routes(family) => routes(scene, family)?,
            Self::Neighbours(family) => neighbours(scene, family)?,
            Self::Forwarding => forwarding(scene)?,
            Self::Device => return device(scene),
        };
        Ok(takings.into_iter().map(|line| vec![line]).collect())
    }
}

fn routes(scene: &Scene<'_>, family: Family) -> Result<Vec<String>> {
    let [own, direct, beyond] = [0, 1, 2].map(|at| scene.cluster.members[at].range(family));
    let gateway = scene.cluster.members[2].tunnel_address(family)?;
    let ip = if family == V4 { "ip -4" } else { "ip -6" };
    let ours = "proto 117 metric 2000";
    let world = format!("via {} dev {}", scene.member.gateway(family), Node::UPLINK);
    let mut lines = vec![
        format!("{ip} route flush proto 117"),
        format!("{ip} route del {direct} {ours}"),
        format!("{ip} route del {beyond} {ours}"),
        format!("{ip} route del unreachable {own} {ours}"),
        format!("{ip} route replace unreachable {direct} {ours}"),
        format!("{ip} route replace {beyond} {world} {ours}"),
    ];
    if family == V6 {
        lines.push(format!("{ip} route del {gateway} dev {TUNNEL} {ours}"));
    }
    Ok(lines)
}

fn neighbours(scene: &Scene<'_>, family: Family) -> Result<Vec<String>> {
    let beyond = &scene.cluster.members[2];
    let address = beyond.tunnel_address(family)?;
    let mac = mac(beyond)?;
    Ok(vec![
        format!("ip neighbour flush dev {TUNNEL} nud permanent"),
        format!("ip neighbour del {address} dev {TUNNEL}"),
        format!(
            "ip neighbour replace {address} lladdr 02:00:00:00:00:99 dev {TUNNEL} nud permanent router"
        ),
        format!("ip neighbour replace {address} lladdr {mac} dev {TUNNEL} nud stale"),
    ])
}

fn forwarding(scene: &Scene<'_>) -> Result<Vec<String>> {
    let beyond = &scene.cluster.members[2];
    let mac = mac(beyond)?;
    let outside = beyond.address(beyond.outside);
    let other = scene.member.gateway(beyond.outside);
    Ok(vec![
        format!("bridge fdb del {mac} dev {TUNNEL} dst {outside} self"),
        format!("bridge fdb replace {mac} dev {TUNNEL} dst {other} self permanent"),
        format!("bridge fdb replace {mac} dev {TUNNEL} dst {outside} self dynamic"),
    ])
}

fn device(scene: &Scene<'_>) -> Result<Vec<Vec<String>>> {
    let [v4, v6] = [V4, V6].map(|family| scene.member.tunnel_address(family));
    let (v4, v6) = (v4?, v6?);
    let mut takings = vec![
        vec![format!("ip link delete {TUNNEL}")],
        vec![format!("ip link set {TUNNEL} down")],
        vec![
            format!("ip link set {TUNNEL} down"),
            format!("ip link set {TUNNEL} up"),
        ],
        // With so little there is no IPv6 on it.
        vec![format!("ip link set {TUNNEL} mtu 1000")],
        vec![format!("ip link set {TUNNEL} address 02:00:00:00:00:99")],
    ];
    for address in [format!("{v4}/32"), format!("{v6}/128")] {
        takings.push(vec![format!("ip address del {address} dev {TUNNEL}")]);
    }
    Ok(takings)
}

/// The MAC of a node's VXLAN device.
fn mac(member: &Member) -> Result<String> {
    let link = member
        .node
        .netns()
        .ip_json(&["link", "show", "dev", TUNNEL])?;
    Ok(link[0]["address"].as_str().context("a MAC")?.to_owned())
}

/// Three nodes whose agents look at nothing by time.
fn cluster(outside: Family) -> Result<Cluster> {
    let mut cluster = Cluster::idle(&[0, 0, 1])?;
    cluster.put_outside(outside);
    for member in &mut cluster.members {
        member.start_agent_with(&NEVER)?;
    }
    Ok(cluster)
}

#[rstest]
#[case::routes_of_ipv4(What::Routes(V4), V4)]
#[case::routes_of_ipv6(What::Routes(V6), V4)]
#[case::neighbours_of_ipv4(What::Neighbours(V4), V4)]
#[case::neighbours_of_ipv6(What::Neighbours(V6), V4)]
#[case::forwarding_over_ipv4(What::Forwarding, V4)]
#[case::forwarding_over_ipv6(What::Forwarding, V6)]
#[case::device_over_ipv4(What::Device, V4)]
#[case::device_over_ipv6(What::Device, V6)]
fn what_somebody_takes_comes_back(#[case] what: What, #[case] outside: Family) -> Result<()> {
    needs_root!();
    let cluster = cluster(outside)?;
    let scene = Scene::look(&cluster)?;
    let pods = cluster.pods()?;
    for lines in what.takings(&scene)? {
        scene.heals(&lines).with_context(|| lines.join(", "))?;
    }
    Cluster::all_reach_all(&pods)
}

/// The device, and the number of routes, are the agent's alone.
#[rstest]
#[case::a_route_of_ipv4("ip route add 10.99.0.0/24 via 198.18.10.254 proto 117")]
#[case::a_route_of_ipv6("ip route add fd00:99::/64 via 2001:db8:a::fe proto 117")]
#[case::an_address_of_ipv4("ip address add 10.99.0.1/32 dev underpass-vxlan")]
#[case::an_address_of_ipv6("ip address add fd00:99::1/128 dev underpass-vxlan nodad")]
#[case::a_neighbour_of_ipv4(
    "ip neighbour add 10.99.0.2 lladdr 02:00:00:00:00:99 dev underpass-vxlan nud permanent"
)]
#[case::a_neighbour_of_ipv6(
    "ip neighbour add fd00:99::2 lladdr 02:00:00:00:00:99 dev underpass-vxlan nud permanent"
)]
#[case::a_static_entry_of_the_forwarding_database(
    "bridge fdb add 02:00:00:00:00:99 dev underpass-vxlan dst 198.18.10.254 self static"
)]
#[case::an_entry_of_the_forwarding_database(
    "bridge fdb add 02:00:00:00:00:99 dev underpass-vxlan dst 198.18.10.254 self permanent"
)]
fn what_somebody_adds_to_it_goes(#[case] line: &str) -> Result<()> {
    needs_root!();
    let cluster = cluster(V4)?;
    Scene::look(&cluster)?.heals(&[line.to_owned()])
}

/// With a link that goes down the kernel takes what leads by it, and says so of some of it alone.
#[rstest]
fn what_goes_with_the_uplink_comes_back_with_it(#[values(V4, V6)] outside: Family) -> Result<()> {
    needs_root!();
    let cluster = cluster(outside)?;
    let scene = Scene::look(&cluster)?;
    let pods = cluster.pods()?;
    let member = scene.member;
    let netns = member.node.netns();
    let uplink = Node::UPLINK;
    let down = format!("ip link set {uplink} down");
    let up = format!("ip link set {uplink} up");
    let mut back = vec![up.clone()];
    // IPv6 loses its addresses, and both their default routes: who made them makes them again.
    let lines = member.readdress();
    back.extend(lines.iter().map(|line| format!("ip {line}")));
    let defaults = lines.iter().filter(|line| line.starts_with("route"));
    let defaults: Vec<String> = defaults.map(|line| format!("ip {line}")).collect();

    // Down and up at once.
    let flap = [std::slice::from_ref(&down), &back[..]].concat();
    scene.heals(&flap).context("a short time")?;

    // Down until the agent has done what it can.
    run(netns, std::slice::from_ref(&down))?;
    eventually("it sees that the link is down", || {
        ensure!(all(member)? != scene.before, "all is as it was");
        Ok(())
    })?;
    member.rests()?;
    run(netns, &back)?;
    scene.is_whole().context("a long time")?;

    // No address comes back, as none has gone.
    netns.set_sysctl(&format!("net/ipv6/conf/{uplink}/keep_addr_on_down"), "1")?;
    let flap = [&[down, up][..], &defaults].concat();
    scene.heals(&flap).context("with its addresses")?;

    // The other end of the cable.
    for state in ["down", "up"] {
        member.rests()?;
        let line = format!("link set {} {state}", member.name);
        cluster.fabric.ip(&[line])?;
    }
    scene.is_whole().context("without a carrier")?;
    Cluster::all_reach_all(&pods)
}

/// Who applies a network's configuration anew takes its addresses and gives them back. Meanwhile others are there: those of bridges, say.
#[rstest]
fn an_address_that_comes_back_soon_does_not_cost_the_device(
    #[values(V4, V6)] outside: Family,
) -> Result<()> {
    needs_root!();
    let cluster = cluster(outside)?;
    let scene = Scene::look(&cluster)?;
    let member = scene.member;
    let netns = member.node.netns();
    netns.ip(&[
        "link add docker0 type bridge".to_owned(),
        "address add 172.17.0.1/16 dev docker0".to_owned(),
        "address add fd00:172::1/64 dev docker0 nodad".to_owned(),
        "link set docker0 up".to_owned(),
    ])?;
    let before = netns.ifindex(TUNNEL)?;
    member.rests()?;
    let flush = [format!("address flush dev {} scope global", Node::UPLINK)];
    let syncs = member.metric("syncs_total")?;
    netns.ip(&flush)?;
    eventually("it sees that the addresses are gone", || {
        ensure!(member.metric("syncs_total")? > syncs);
        Ok(())
    })?;
    netns.ip(&member.readdress())?;
    scene.is_whole()?;
    let now = netns.ifindex(TUNNEL)?;
    ensure!(now == before, "it was made anew: {}", member.log()?);
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;

    // What does not come back soon may have become another's.
    netns.ip(&flush)?;
    eventually("another device", || {
        ensure!(netns.ifindex(TUNNEL)? != before, "it is the same");
        Ok(())
    })?;
    netns.ip(&member.readdress())?;
    scene.is_whole()?;
    Cluster::all_reach_all(&pods)
}

/// While the qdisc of the programs comes to a device that is up, the kernel loses what that one sends.
#[rstest]
fn the_device_has_the_qdisc_of_the_programs_before_it_is_up(
    #[values(V4, V6)] outside: Family,
) -> Result<()> {
    needs_root!();
    let cluster = cluster(outside)?;
    let scene = Scene::look(&cluster)?;
    let netns = scene.member.node.netns();
    let changes = netns.announcements(&[MulticastGroup::Link, MulticastGroup::Tc])?;
    scene.heals(&[format!("ip link delete {TUNNEL}")])?;
    let index = netns.ifindex(TUNNEL)?;
    let changes = changes.read()?;
    let first = |wanted: &dyn Fn(&RouteNetlinkMessage) -> bool| changes.iter().position(wanted);
    let is_up = first(&|change| match change {
        RouteNetlinkMessage::NewLink(link) => {
            link.header.index == index && link.header.flags.contains(LinkFlags::Up)
        }
        _ => false,
    });
    let has_qdisc = first(&|change| match change {
        RouteNetlinkMessage::NewQueueDiscipline(qdisc) => {
            let clsact = TcAttribute::Kind("clsact".to_owned());
            qdisc.header.index.cast_unsigned() == index && qdisc.attributes.contains(&clsact)
        }
        _ => false,
    });
    let is_up = is_up.context("it never was up")?;
    ensure!(
        has_qdisc.is_some_and(|has_qdisc| has_qdisc < is_up),
        "it was up with change {is_up}, and had the qdisc with {has_qdisc:?}"
    );
    Ok(())
}
