//! The program on the node's loopback device: when it comes and goes, and what it needs.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
};

use aya::{
    Pod as Plain,
    maps::{HashMap, Map, MapError},
};
use rstest::rstest;
use serde_json::{Value, json};
use underpass_abi::{
    addr::{Addr4, Addr6},
    flow::{Flow, Key, protocol, state},
    map,
};
use underpass_tests::{
    counter,
    flow_table::{self, Then},
    patience,
    prelude::*,
    runtime::Call,
    traffic::PATIENCE,
};

use super::{HOST, Scene, both, mapped, reaches};

fn filters(node: &Node) -> Result<String> {
    let mut list = Command::new("tc");
    list.args(["filter", "show", "dev", "lo", "egress"]);
    node.netns().expect(&mut list, &[])
}

fn take_off(node: &Node) -> Result<()> {
    node.netns().take_filters_off("lo", "egress")
}

#[test]
fn it_comes_with_the_first_mapping_and_goes_with_everything() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let plain = lab.pod("plain")?;
    let text = filters(&lab.node)?;
    ensure!(text.trim().is_empty(), "nothing is mapped: {text}");
    let pod = lab.pod_with("mapped", &mapped(&lab, &both()))?;
    let text = filters(&lab.node)?;
    ensure!(text.contains("underpass_from_host"), "{text}");
    let another = lab.pod_with("another", &mapped(&lab, &both()))?;
    ensure!(filters(&lab.node)? == text, "one is enough");
    for pod in [another, pod, plain] {
        pod.del()?;
    }
    lab.node.underpass(&["unload"])?;
    let text = filters(&lab.node)?;
    ensure!(text.trim().is_empty(), "left behind: {text}");
    Ok(())
}

#[test]
fn what_takes_it_off_is_noticed_and_put_right() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // While the program is off, what is still on its way from the container arrives as it is.
    lab.firewall.tolerate_invalid();
    let pod = lab.pod_with("mapped", &mapped(&lab, &both()))?;
    let at = SocketAddr::new(V4.loopback(), HOST);
    let _server = tcp::Server::start(pod.netns(), V4.port(super::INSIDE))?;
    let check = || pod.call_with_result("CHECK").run(&lab.node);
    let status = || Call::new("STATUS").conf(&lab.conf()).run(&lab.node);
    let gc = || {
        let attachments = json!([{ "containerID": pod.name(), "ifname": Pod::IFNAME }]);
        let conf = lab.conf().with("cni.dev/valid-attachments", attachments);
        Call::new("GC").conf(&conf).run(&lab.node)?.silence()
    };
    let repairs: [&dyn Fn() -> Result<()>; 3] = [&gc, &|| lab.pod("plain").map(drop), &|| {
        lab.pod_with("newer", &mapped(&lab, &both())).map(drop)
    }];
    for repair in repairs {
        check()?.silence()?;
        status()?.silence()?;
        tcp::visit(lab.node.netns(), at)?;
        take_off(&lab.node)?;
        let error = check()?.error()?;
        ensure!(error.msg.contains("from_host"), "{error}");
        ensure!(error.msg.contains("egress of lo"), "{error}");
        let reply = status()?;
        reply.silence()?;
        ensure!(reply.stderr.contains("egress of lo"), "{}", reply.stderr);
        let text = lab.node.underpass(&["status"])?;
        ensure!(text.contains("from_host MISSING"), "{text}");
        repair()?;
    }
    check()?.silence()?;
    tcp::visit(lab.node.netns(), at)?;
    let text = lab.node.underpass(&["status", "--json"])?;
    let json: Value = serde_json::from_str(&text)?;
    let devices = json["devices"].as_array().context("devices")?;
    ensure!(
        devices
            .iter()
            .any(|device| device["name"] == "lo" && device["kind"] == "loopback"),
        "{json:#}"
    );
    Ok(())
}

#[rstest]
fn no_sysctl_is_needed(
    #[values(V4, V6)] family: Family,
    #[values("0", "1", "2")] rp_filter: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let node = scene.lab.node.netns();
    for device in ["all", "lo"] {
        node.set_sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), rp_filter)?;
        for key in ["route_localnet", "accept_local"] {
            let value = node.sysctl(&format!("net/ipv4/conf/{device}/{key}"))?;
            ensure!(value == "0", "{key} of {device} is {value}");
        }
    }
    for ip in [family.loopback(), family.node()] {
        reaches(node, SocketAddr::new(ip, HOST), family.pod_gateway())?;
    }
    Ok(())
}

/// Removes the outer entries of translated flows, and tells how many.
fn remove_outer<A>(node: &Node, name: &str) -> Result<usize>
where
    Key<A>: Plain,
    Flow<A>: Plain,
{
    let mut flows: HashMap<_, Key<A>, Flow<A>> =
        Map::HashMap(counter::open(node, name)?).try_into()?;
    let keys: Vec<_> = flows
        .iter()
        .collect::<Result<Vec<_>, MapError>>()?
        .into_iter()
        .filter(|(_, flow)| flow.state & state::OUTER != 0)
        .map(|(key, _)| key)
        .collect();
    for key in &keys {
        flows.remove(key)?;
    }
    Ok(keys.len())
}

#[rstest]
fn one_entry_brings_the_other_back(
    #[values(V4, V6)] family: Family,
    #[values("host", "container")] client: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let node = &scene.lab.node;
    let netns = if client == "host" {
        node.netns()
    } else {
        scene.server.netns()
    };
    let at = super::node_at(family, HOST);
    let mut stream = tcp::Client::connect(netns, at)?;
    let port = stream.chat(3)?;
    let mut datagrams = udp::Client::open(netns, family)?;
    let seen = datagrams.chat(at, 3)?.seen;
    let removed = match family {
        V4 => remove_outer::<Addr4>(node, map::FLOWS4)?,
        V6 => remove_outer::<Addr6>(node, map::FLOWS6)?,
    };
    ensure!(removed >= 2, "{removed} entries");
    // The bypass looks after the other entry once a tick, and after each change on the node.
    let _change = scene.lab.pod("change")?;
    ensure!(stream.chat(3)? == port, "another port");
    ensure!(datagrams.chat(at, 3)?.seen == seen, "another port");
    Ok(())
}

/// What the node's own connection is known by has made room, and the container speaks next: what it says arrives, and so does the answer.
#[rstest]
fn a_container_that_speaks_brings_the_nodes_entry_back(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("mapped", &mapped(&lab, &both()))?;
    let inside = SocketAddr::new(pod.ip(family), super::INSIDE);
    let listener = pod.netns().run(|| TcpListener::bind(inside))?;
    let at = SocketAddr::new(family.loopback(), HOST);
    let mut client = lab.node.netns().run(|| TcpStream::connect(at))?;
    let (mut server, _) = listener.accept()?;
    for end in [&client, &server] {
        end.set_read_timeout(Some(patience::here(PATIENCE)))?;
    }
    let say = |from: &mut TcpStream, to: &mut TcpStream, text: &[u8]| -> Result<()> {
        from.write_all(text)?;
        let mut heard = vec![0; text.len()];
        to.read_exact(&mut heard)?;
        ensure!(heard == text, "{heard:?}");
        Ok(())
    };
    say(&mut client, &mut server, b"question")?;
    say(&mut server, &mut client, b"answer")?;
    let mut taken = 0;
    flow_table::walk(&lab.node, family, |entry| {
        if entry.protocol == protocol::TCP && !entry.is_outer() {
            taken += 1;
            Then::Goes
        } else {
            Then::Stays
        }
    })?;
    ensure!(taken == 1, "{taken} entries of the node");
    say(&mut server, &mut client, b"more").context("from the container")?;
    say(&mut client, &mut server, b"thanks").context("from the node")
}
