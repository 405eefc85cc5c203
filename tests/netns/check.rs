//! CHECK says what is wrong with an attachment, not only that something is.

mod routes;

use std::fs;

use aya::maps::{HashMap, Map};
use rstest::rstest;
use underpass_abi::{
    addr::Addr,
    endpoint::{Attachment, Device, Endpoint, Owner},
    map,
};
use underpass_tests::{
    counter::open,
    frame,
    prelude::*,
    runtime::{Call, Conf},
};

/// Something that goes wrong with an attachment.
type Tamper = fn(&Lab, &Pod, Family) -> Result<()>;

/// What is tampered with, what CHECK must say then (of the container's address `{ip}` and its device `{host}`), and how it is done.
const TAMPERS: &[(&str, &str, Tamper)] = &[
    (
        "address",
        "eth0 does not have the address {ip}/",
        |_, pod, family| {
            let (ip, bits) = (pod.ip(family), prefix_len(family));
            pod.netns()
                .ip(&[format!("address del {ip}/{bits} dev eth0")])
        },
    ),
    (
        "default route",
        "the container has no route to {everywhere} by eth0",
        |_, pod, family| {
            pod.netns()
                .ip(&[format!("route del {}", family.everywhere())])
        },
    ),
    (
        "container's neighbour",
        "the container has the permanent neighbour {gateway} at 02:00:00:00:00:77",
        |_, pod, family| {
            let gateway = family.pod_gateway();
            pod.netns().ip(&[format!(
                "neighbour replace {gateway} lladdr 02:00:00:00:00:77 dev eth0 nud permanent"
            )])
        },
    ),
    (
        "way to the gateway",
        "the container does not find its gateway {gateway} on eth0",
        |_, pod, family| {
            let gateway = family.pod_gateway();
            pod.netns().ip(&[format!("route del {gateway} dev eth0")])
        },
    ),
    ("link", "eth0 is down", |_, pod, _| {
        pod.netns().ip(&["link set eth0 down".to_owned()])
    }),
    (
        "pair",
        "device {host} of the host is missing",
        |lab, pod, _| {
            lab.node
                .netns()
                .ip(&[format!("link del {}", pod.host_veth())])
        },
    ),
    (
        "host route",
        "the host has no route to {ip} by {host}",
        |lab, pod, family| {
            lab.node
                .netns()
                .ip(&[format!("route del {}", pod.ip(family))])
        },
    ),
    (
        "host's neighbour",
        "the host has no permanent neighbour {ip} at ",
        |lab, pod, family| {
            let (ip, host) = (pod.ip(family), pod.host_veth());
            lab.node
                .netns()
                .ip(&[format!("neighbour del {ip} dev {host}")])
        },
    ),
    (
        "endpoint",
        "the map ENDPOINTS does not send {ip} to {host}",
        |lab, pod, family| {
            let mut endpoints: HashMap<_, Addr, Endpoint> =
                Map::HashMap(open(&lab.node, map::ENDPOINTS)?).try_into()?;
            Ok(endpoints.remove(&pod.ip(family).into())?)
        },
    ),
    (
        "device",
        "the map DEVICES has no entry for {host}",
        |lab, pod, _| {
            let mut devices: HashMap<_, u32, Device> =
                Map::HashMap(open(&lab.node, map::DEVICES)?).try_into()?;
            Ok(devices.remove(&lab.node.netns().ifindex(pod.host_veth())?)?)
        },
    ),
    (
        "owner",
        "the map OWNERS has no entry for the attachment",
        |lab, pod, _| {
            let mut owners: HashMap<_, Owner, Attachment> =
                Map::HashMap(open(&lab.node, map::OWNERS)?).try_into()?;
            let index = lab.node.netns().ifindex(pod.host_veth())?;
            let owner = owners
                .iter()
                .filter_map(Result::ok)
                .find_map(|(owner, attachment)| (attachment.ifindex == index).then_some(owner))
                .context("no owner has the device")?;
            Ok(owners.remove(&owner)?)
        },
    ),
    (
        "lease",
        "Failed to find address added by container",
        |lab, pod, family| {
            let leases = lab.node.data_dir().join("lab");
            let lease = leases.join(pod.ip(family).to_string());
            lab.node
                .netns()
                .run(|| fs::remove_file(&lease))
                .with_context(|| format!("remove {}", lease.display()))
        },
    ),
];

/// As [`TAMPERS`], for veths. What takes the place of these filters on a netkit is tampered with in `netkit.rs`.
const FILTERS: &[(&str, &str, Tamper)] = &[
    (
        "ingress filter",
        "program from_pod is not attached to the ingress of {host}",
        |lab, pod, _| {
            lab.node
                .netns()
                .take_filters_off(pod.host_veth(), "ingress")
        },
    ),
    (
        "egress filter",
        "program to_pod is not attached to the egress of {host}",
        |lab, pod, _| lab.node.netns().take_filters_off(pod.host_veth(), "egress"),
    ),
];

fn prefix_len(family: Family) -> u8 {
    match family {
        V4 => 24,
        V6 => 64,
    }
}

#[rstest]
fn what_was_tampered_with_is_named(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    notices(&lab, &lab.conf(), TAMPERS, family)
}

#[test]
fn a_filter_that_is_gone_is_named() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    notices(&lab, &lab.conf().with("device", "veth"), FILTERS, V4)
}

/// Containers of the network that are tampered with fail CHECK, one that is not passes.
fn notices(lab: &Lab, conf: &Conf, tampers: &[(&str, &str, Tamper)], family: Family) -> Result<()> {
    let bystander = lab.pod_with("bystander", conf)?;
    for (at, (what, says, tamper)) in tampers.iter().enumerate() {
        let pod = lab.pod_with(&format!("pod{at}"), conf)?;
        let check = pod.call_with_result("CHECK");
        check
            .run(&lab.node)?
            .silence()
            .with_context(|| format!("CHECK before the {what} is tampered with"))?;
        tamper(lab, &pod, family).with_context(|| format!("tamper with the {what}"))?;
        let error = check
            .run(&lab.node)?
            .error()
            .with_context(|| format!("CHECK after the {what} was tampered with"))?;
        let sentence = says
            .replace("{ip}", &pod.ip(family).to_string())
            .replace("{gateway}", &family.pod_gateway().to_string())
            .replace("{everywhere}", family.everywhere())
            .replace("{host}", pod.host_veth());
        ensure!(error.msg.contains(&sentence), "{what}: {error}");
    }
    bystander
        .call_with_result("CHECK")
        .run(&lab.node)?
        .silence()
}

#[rstest]
fn a_setting_that_was_changed_is_named(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let (node, host) = (lab.node.netns(), pod.host_veth());
    let (here, inside) = ("on the host", "in the container");
    let settings = match family {
        V4 => vec![
            (node, "net/ipv4/ip_forward".to_owned(), here, "1"),
            (node, format!("net/ipv4/conf/{host}/forwarding"), here, "1"),
        ],
        V6 => vec![
            (node, "net/ipv6/conf/all/forwarding".to_owned(), here, "1"),
            (node, format!("net/ipv6/conf/{host}/forwarding"), here, "1"),
            // The last, as it takes the addresses along.
            (
                pod.netns(),
                "net/ipv6/conf/eth0/disable_ipv6".to_owned(),
                inside,
                "0",
            ),
        ],
    };
    let check = pod.call_with_result("CHECK");
    for (netns, key, place, right) in settings {
        check.run(&lab.node)?.silence()?;
        let wrong = if right == "0" { "1" } else { "0" };
        netns.set_sysctl(&key, wrong)?;
        let error = check.run(&lab.node)?.error()?;
        let sentence = format!("/proc/sys/{key} is {wrong} {place}, and has to be {right}");
        ensure!(error.msg.contains(&sentence), "{error}");
        netns.set_sysctl(&key, right)?;
    }
    Ok(())
}

/// A runtime that is told of a fault makes the container anew: each of the node's, where an uplink has changed.
#[rstest]
#[case::another_mtu(&["link set eth0 mtu 1400"], "eth0")]
#[case::another_address(&["address add 192.0.2.77/24 dev eth0", "address add 2001:db8:77::77/64 dev eth0 nodad"], "eth0")]
#[case::another_uplink(
    &[
        "link add eth7 type veth peer name other7",
        "link set eth7 up",
        "link set other7 up",
        "address add 198.51.100.77/24 dev eth7",
        "route add default via 198.51.100.78 dev eth7 metric 77",
    ],
    "eth7"
)]
fn what_has_become_of_the_node_is_no_fault_of_a_container(
    #[case] lines: &[&str],
    #[case] device: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
    lab.node.netns().ip(&lines)?;
    let reply = pod.call_with_result("CHECK").run(&lab.node)?;
    ensure!(reply.stderr.contains(device), "{}", reply.stderr);
    reply.silence()
}

#[test]
fn settings_that_a_later_plugin_may_change_are_its_own_business() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let host = format!("net/ipv6/conf/{}/accept_ra", pod.host_veth());
    for (netns, key, value) in [
        (pod.netns(), "net/ipv6/conf/eth0/accept_ra", "1"),
        (pod.netns(), "net/ipv6/conf/eth0/keep_addr_on_down", "0"),
        (pod.netns(), "net/ipv6/conf/lo/disable_ipv6", "1"),
        (lab.node.netns(), host.as_str(), "1"),
        // Anything but zero forwards.
        (lab.node.netns(), "net/ipv4/ip_forward", "2"),
    ] {
        netns.set_sysctl(key, value)?;
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// What a network asks for counts for the containers to come: to make those anew that work is no use to anybody.
#[rstest]
#[case::a_fixed_mac("macspoofchk", false)]
#[case::a_free_mac("macspoofchk", true)]
#[case::spoofing("antiSpoof", false)]
#[case::tracking("conntrackLiberal", false)]
fn what_the_network_asks_for_since_is_no_fault(
    #[case] key: &str,
    #[case] before: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with(key, before))?;
    let later = lab.conf().with(key, !before);
    let later = later.with("prevResult", pod.result().clone());
    let reply = pod.call("CHECK").conf(&later).run(&lab.node)?;
    reply.succeeded()?;
    let is_said = reply.stderr.contains("nf_conntrack_tcp_be_liberal");
    ensure!(is_said == (key == "conntrackLiberal"), "{}", reply.stderr);
    Ok(())
}

/// The kernel forgets a device's neighbours when its MAC is set, also to what it is: the container asks for its gateway then, and is answered.
#[rstest]
fn a_gateway_that_is_asked_for_is_no_fault(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let mac = frame::mac_text(pod.mac()?);
    pod.netns().ip(&[format!("link set eth0 address {mac}")])?;
    let reply = pod.call_with_result("CHECK").run(&lab.node)?;
    reply.succeeded()?;
    let said = format!("no permanent neighbour {} at ", family.pod_gateway());
    ensure!(reply.stderr.contains(&said), "{}", reply.stderr);
    ping::ping(pod.netns(), family.remote())
}

/// Uplinks masquerade. Where there is none the container is attached all the same, and its calls say so.
#[rstest]
#[case::no_such_name(&["eth9"], true)]
#[case::none_is_meant(&[], false)]
#[case::one_of_two(&["eth9", "eth0"], false)]
fn a_masquerade_without_uplinks_is_said(
    #[case] uplinks: &[&str],
    #[case] is_said: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("uplinks", uplinks);
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let call = |verb, conf: &Conf| {
        let call = Call::new(verb).attachment("a", &path, Pod::IFNAME);
        call.conf(conf).run(&lab.node)
    };
    let says = |stderr: &str| stderr.contains("ipMasq is on") && stderr.contains("eth9");
    let added = call("ADD", &conf)?;
    ensure!(says(&added.stderr) == is_said, "{}", added.stderr);
    let remembered = conf.clone().with("prevResult", added.result()?);
    let checked = call("CHECK", &remembered)?;
    checked.succeeded()?;
    ensure!(says(&checked.stderr) == is_said, "{}", checked.stderr);
    call("DEL", &conf)?.silence()
}
