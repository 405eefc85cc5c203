//! Several that want the same host port. Of containers the newest serves; a tunnel of the node keeps its own.

use aya::maps::{HashMap, Map};
use rstest::rstest;
use serde_json::{Value, json};
use underpass_abi::{
    endpoint::Device,
    map,
    port::{PortTarget, ShadowedPort},
};
use underpass_tests::{counter::open, leak::Traces, prelude::*, runtime::Call};

use crate::net_dir::{self, NET_DIR};

use super::{HOST, both, mapped, misses, node_at, reaches, serve};

/// Fails unless the host port leads to `pod`: it alone has servers.
fn is_served_by(lab: &Lab, family: Family, pod: &Pod) -> Result<()> {
    let _servers = serve(pod, family)?;
    reaches(lab.world.netns(), node_at(family, HOST), family.gateway())
        .with_context(|| format!("the host port must lead to {}", pod.name()))
}

#[rstest]
fn the_newest_serves_and_the_older_serves_again(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both());
    let older = lab.pod_with("older", &conf)?;
    is_served_by(&lab, family, &older)?;
    let newer = lab.pod_with("newer", &conf)?;
    is_served_by(&lab, family, &newer)?;
    let newest = lab.pod_with("newest", &conf)?;
    is_served_by(&lab, family, &newest)?;
    newest.del()?;
    is_served_by(&lab, family, &newer)?;
    newer.del()?;
    is_served_by(&lab, family, &older)?;
    older.del()?;
    misses(lab.world.netns(), node_at(family, HOST))
}

/// A container that got the packets of a tunnel of its node would have the traffic of all pods with this node.
#[rstest]
fn a_tunnel_of_the_node_keeps_its_port(#[values(V4, V6)] family: Family) -> Result<()> {
    const PORT: u16 = 8_472;
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with_host_port(PORT, PORT);
    let pod = lab.pod_with("a", &conf)?;
    let _server = udp::Server::start(pod.netns(), pod.at(family, PORT))?;
    let ask = || udp::Client::open(lab.world.netns(), family);
    ask()?.chat(node_at(family, PORT), 5)?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    let add = format!("link add tunnel9 type vxlan id 9 dstport {PORT}");
    let up = "link set tunnel9 up".to_owned();
    lab.node.netns().ip(&[add, up])?;
    lab.node.underpass(&["apply", "--net-dir", NET_DIR])?;
    ask()?.hears_nothing(node_at(family, PORT))?;
    is_shown_as_closed(&lab, PORT)?;
    // Who comes later is told at once, of UDP.
    let netns = lab.node.netns().sibling("b")?;
    let add = Call::new("ADD").attachment("b", &netns.path().display().to_string(), Pod::IFNAME);
    let reply = add.conf(&conf).run(&lab.node)?;
    reply.result()?;
    let said = |port: &str| {
        reply
            .stderr
            .contains(&format!("host port {port} is not served"))
    };
    ensure!(
        said("0.0.0.0:8472/udp") && said("[::]:8472/udp") && !said("0.0.0.0:8472/tcp"),
        "{}",
        reply.stderr
    );
    Ok(())
}

/// Fails unless the command line says that TCP of this port is served, and UDP is not.
fn is_shown_as_closed(lab: &Lab, port: u16) -> Result<()> {
    let json: Value = serde_json::from_str(&lab.node.underpass(&["status", "--json"])?)?;
    let states = json["hostPorts"].as_array().into_iter().flatten();
    let states: Vec<_> = states
        .map(|port| {
            (
                port["address"].as_str(),
                port["protocol"].as_str(),
                port["state"].as_str(),
            )
        })
        .collect();
    let expected = [
        ("0.0.0.0", "tcp", "serving"),
        ("::", "tcp", "serving"),
        ("0.0.0.0", "udp", "closed"),
        ("::", "udp", "closed"),
    ]
    .map(|(address, protocol, state)| (Some(address), Some(protocol), Some(state)));
    ensure!(states == expected, "{json:#}");
    let text = lab.node.underpass(&["status"])?;
    let closed = text.lines().filter(|line| {
        line.contains(&format!(":{port}/udp")) && line.contains("(closed: the port of a tunnel")
    });
    ensure!(closed.count() == 2, "{text}");
    let metrics = lab.node.underpass(&["metrics", "--net-dir", NET_DIR])?;
    for (state, count) in [("serving", 2), ("waiting", 0), ("closed", 2)] {
        let sample = format!("underpass_host_ports{{state={state:?}}} {count}\n");
        ensure!(metrics.contains(&sample), "{metrics}");
    }
    Ok(())
}

/// After a boot there is no device for it yet, and other nodes send already.
#[rstest]
fn a_tunnel_to_come_keeps_its_port(#[values(V4, V6)] family: Family) -> Result<()> {
    const PORT: u16 = 8_472;
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with_host_ports(&[(PORT, PORT), (HOST, PORT)]);
    let ask = |to, server: &Pod| {
        let _server = udp::Server::start(server.netns(), server.at(family, PORT))?;
        let mut client = udp::Client::open(lab.world.netns(), family)?;
        anyhow::Ok(client.ask_once(node_at(family, to), 100)?.is_some())
    };
    let pod = lab.pod_with("a", &conf)?;
    ensure!(ask(PORT, &pod)?, "without such a tunnel it is served");
    pod.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("b")?;
    let error = Call::new("ADD")
        .attachment("b", &netns.path().display().to_string(), Pod::IFNAME)
        .conf(&conf.clone().with("tunnelPort", PORT))
        .run(&lab.node)?
        .error()?;
    ensure!(
        error.code == 7
            && error
                .msg
                .contains("invalid hostPort 8472 in runtimeConfig.portMappings[1]: it is the tunnelPort of the network"),
        "{error}"
    );
    before.expect_same(&lab.node)?;
    // An attachment that has it all the same, of an earlier version.
    let pod = lab.pod_with("c", &conf)?;
    let mut devices: HashMap<_, u32, Device> =
        Map::HashMap(open(&lab.node, map::DEVICES)?).try_into()?;
    let index = lab.node.netns().ifindex(pod.host_veth())?;
    let mut device = devices.get(&index, 0)?;
    device.tunnel_port = PORT.to_be();
    devices.insert(index, device, 0)?;
    ensure!(!ask(PORT, &pod)?, "it is served");
    ensure!(ask(HOST, &pod)?, "another port is not served");
    Ok(())
}

/// Tunnels are of UDP: the same number of another protocol is served.
#[test]
fn a_tunnel_to_come_leaves_other_protocols_alone() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mapping = json!({ "hostPort": HOST, "containerPort": 80, "protocol": "tcp" });
    let pod = lab.pod_with("a", &mapped(&lab, &[mapping]).with("tunnelPort", HOST))?;
    let _server = tcp::Server::start(pod.netns(), pod.at(V4, 80))?;
    tcp::visit(lab.world.netns(), node_at(V4, HOST))?;
    Ok(())
}

#[rstest]
fn an_older_one_leaves_unnoticed(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both());
    let older = lab.pod_with("older", &conf)?;
    let newer = lab.pod_with("newer", &conf)?;
    let _servers = serve(&newer, family)?;
    let mut client = tcp::Client::connect(lab.world.netns(), node_at(family, HOST))?;
    client.chat(3)?;
    older.del()?;
    client.chat(3)?;
    reaches(lab.world.netns(), node_at(family, HOST), family.gateway())?;
    newer.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[rstest]
fn a_busy_udp_port_follows_its_container(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both()).with("bypass", bypass);
    let asking = lab.pod("asking")?;
    let (netns, expected) = match from {
        "world" => (lab.world.netns(), family.gateway()),
        _ => (asking.netns(), asking.ip(family)),
    };
    let at = node_at(family, HOST);
    let mut client = udp::Client::open(netns, family)?;
    let mut ask = |who: &str| -> Result<()> {
        let answer = client
            .chat(at, 5)
            .with_context(|| format!("{who} must answer"))?;
        ensure!(answer.seen.ip() == expected, "{who} saw {}", answer.seen);
        Ok(())
    };

    let first = lab.pod_with("first", &conf)?;
    let old = serve(&first, family)?;
    ask("the first")?;
    // The next one comes before the old one goes, as in a rolling update.
    let second = lab.pod_with("second", &conf)?;
    let new = serve(&second, family)?;
    drop(old);
    ask("the second")?;
    first.del()?;
    ask("the second, alone")?;
    // It goes before the next one comes.
    drop(new);
    second.del()?;
    udp::Client::open(netns, family)?.hears_nothing(at)?;
    let third = lab.pod_with("third", &conf)?;
    let _newest = serve(&third, family)?;
    ask("the third")
}

#[rstest]
fn a_busy_udp_port_goes_back_to_the_older_container(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both());
    let (older, newer) = (lab.pod_with("older", &conf)?, lab.pod_with("newer", &conf)?);
    let _old = serve(&older, family)?;
    let mut client = udp::Client::open(lab.world.netns(), family)?;
    {
        let _new = serve(&newer, family)?;
        client.chat(node_at(family, HOST), 5)?;
    }
    newer.del()?;
    client.chat(node_at(family, HOST), 5)?;
    Ok(())
}

#[test]
fn check_names_the_port_that_another_serves() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both());
    let older = lab.pod_with("older", &conf)?;
    let check = |pod: &Pod| pod.call_with_result("CHECK").run(&lab.node);
    check(&older)?.silence()?;
    let newer = lab.pod_with("newer", &conf)?;
    check(&newer)?.silence()?;
    // It is no failure: runtimes make containers anew that fail, and the newest mapping would be this one's then.
    let reply = check(&older)?;
    reply.silence()?;
    let names = |said: &str| {
        let newer = newer.ip(V4).to_string();
        let words = ["8080/tcp", "8080/udp", "another container", &newer];
        words.iter().all(|word| said.contains(word))
    };
    ensure!(names(&reply.stderr), "{}", reply.stderr);
    // It would never get them back.
    let mut waiting: HashMap<_, ShadowedPort, PortTarget> =
        Map::HashMap(open(&lab.node, map::SHADOWED_PORTS)?).try_into()?;
    let kept: Vec<_> = waiting.iter().collect::<Result<_, _>>()?;
    ensure!(kept.len() == 4, "{kept:?}");
    for (key, _) in &kept {
        waiting.remove(key)?;
    }
    let error = check(&older)?.error()?;
    ensure!(names(&error.msg), "{error}");
    for (key, target) in &kept {
        waiting.insert(key, target, 0)?;
    }
    // Nor does a container that is gone serve them.
    newer.netns().delete_link(Pod::IFNAME)?;
    let error = check(&older)?.error()?;
    ensure!(names(&error.msg), "{error}");
    newer.del()?;
    check(&older)?.silence()
}

#[test]
fn gc_gives_a_port_back_to_the_older_container() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both());
    let older = lab.pod_with("older", &conf)?;
    let lost = lab.pod_with("lost", &conf)?;
    lost.abandon();
    let attachments = json!([{ "containerID": older.name(), "ifname": Pod::IFNAME }]);
    Call::new("GC")
        .conf(&lab.conf().with("cni.dev/valid-attachments", attachments))
        .run(&lab.node)?
        .silence()?;
    is_served_by(&lab, V4, &older)?;
    is_served_by(&lab, V6, &older)?;
    older.call_with_result("CHECK").run(&lab.node)?.silence()
}
