//! The steps of the demo, in the order in which they are shown.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use underpass_abi::counter::Counter;
use underpass_tests::{
    Family, Lab, Node, Pod,
    counter::{Counters, Registry},
    leak::Traces,
    netfilter::Netfilter,
    node::plugin,
    runtime::Conf,
    traffic::{ping::Ping, tcp},
};

use crate::screen;

const PORT: u16 = 8080;
const MEGABYTE: u64 = 1_000_000;

/// How much the transfers carry in each direction, in bytes.
const TRANSFER: u64 = 200 * MEGABYTE;

/// A step that failed.
pub(crate) struct Failure {
    /// Its number on the screen.
    pub(crate) number: usize,
    /// Its title.
    pub(crate) step: &'static str,
    /// Why.
    pub(crate) error: anyhow::Error,
}

/// Shows steps and numbers them.
#[derive(Default)]
struct Stage {
    number: usize,
}

impl Stage {
    fn step<T>(
        &mut self,
        title: &'static str,
        action: impl FnOnce() -> Result<T>,
    ) -> Result<T, Failure> {
        self.number += 1;
        screen::step(self.number, title);
        action().map_err(|error| Failure {
            number: self.number,
            step: title,
            error,
        })
    }
}

/// The whole demo.
pub(crate) fn play() -> Result<(), Failure> {
    screen::title(
        "underpass: containers that talk under the host's network stack",
        "This demo makes a small network out of namespaces: a node, two containers on it, and the world outside.\n\
         Your own network is not touched, and all of it vanishes when this process ends, however it ends.",
    );
    let mut stage = Stage::default();
    let lab = stage.step("A throwaway node", build)?;
    let (before, firewall) = stage.step("The node's firewall counts what it forwards", || {
        prepare(&lab)
    })?;
    let [web, client] = stage.step("Two containers join the network", || {
        [
            join(&lab, "web", Detail::Full),
            join(&lab, "client", Detail::Short),
        ]
        .into_iter()
        .collect::<Result<Vec<_>>>()?
        .try_into()
        .ok()
        .context("two containers")
    })?;
    stage.step("They ping each other and the world", || {
        pings(&web, &client)
    })?;
    stage.step("A TCP transfer from container to container", || {
        between_pods(&web, &client)
    })?;
    stage.step("A TCP transfer to the world, masqueraded", || {
        to_world(&lab, &client)
    })?;
    stage.step("Proof: the packets went under the stack", || {
        prove(&lab, firewall)
    })?;
    stage.step("The containers leave", || {
        leave(&lab.node, [web, client], &before)
    })
}

fn build() -> Result<Lab> {
    let lab = Lab::new()?;
    screen::quote(
        "container web    container client            world\n\
         \x20    eth0              eth0                   eth0 198.51.100.7, 2001:db8:7::7\n\
         \x20      |                 |                      |\n\
         \x20  +---------------- node ----------------- eth0 192.0.2.2, 2001:db8:1::2",
    );
    screen::say(
        "The world knows no route to containers: it will talk to the node's addresses only.",
    );
    screen::say(&format!("The plugin is {}.", plugin().display()));
    Ok(lab)
}

fn prepare(lab: &Lab) -> Result<(Traces, &Netfilter)> {
    let before = Traces::of(&lab.node)?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("tcp", "meta l4proto tcp")?;
    firewall.count_forwarded("all", "")?;
    screen::say(
        "Every packet that the node's stack carries from one container to another, or out, passes the FORWARD hook.\n\
         A rule there counts; we look at the number later.",
    );
    Ok((before, firewall))
}

/// How much of a call is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Detail {
    Full,
    Short,
}

fn join(lab: &Lab, name: &str, detail: Detail) -> Result<Pod> {
    let conf = lab.conf();
    if detail == Detail::Full {
        screen::say("The network's configuration, as an administrator writes it:");
        screen::json(conf.json());
        screen::say("A container runtime calls the plugin with this on its standard input:");
    }
    screen::command(&command("ADD", name, &conf));
    let start = Instant::now();
    let pod = lab.pod_with(name, &conf)?;
    let took = start.elapsed();
    if detail == Detail::Full {
        screen::json(pod.result());
    }
    let addresses: Vec<String> = pod.addresses().iter().map(ToString::to_string).collect();
    screen::works(
        &format!("{name} is {}", addresses.join(" and ")),
        &format!("in {:.1} ms", took.as_secs_f64() * 1e3),
    );
    if detail == Detail::Full {
        screen::say(
            "   (the first ADD after boot also loads the eBPF programs; later ones find them)",
        );
    }
    Ok(pod)
}

fn command(verb: &str, name: &str, conf: &Conf) -> String {
    format!(
        "CNI_COMMAND={verb} CNI_CONTAINERID={name} CNI_NETNS=/run/netns/{name} CNI_IFNAME={} underpass < {}.json",
        Pod::IFNAME,
        conf.name()
    )
}

fn pings(web: &Pod, client: &Pod) -> Result<()> {
    for family in Family::BOTH {
        for (target, ip) in [("web", web.ip(family)), ("world", family.remote())] {
            let mut ping = Ping::new(client.netns(), ip)?;
            let mut last = ping.echo(56)?;
            for _ in 1..10 {
                last = ping.echo(56)?;
            }
            screen::works(
                &format!("client pings {target} at {ip}"),
                &format!("10 of 10, {:.0} us", last.as_secs_f64() * 1e6),
            );
        }
    }
    Ok(())
}

fn between_pods(web: &Pod, client: &Pod) -> Result<()> {
    for family in Family::BOTH {
        let _server = tcp::Server::start(web.netns(), family.port(PORT))?;
        let to = web.at(family, PORT);
        let mut connection = tcp::Client::connect(client.netns(), to)?;
        let transfer = connection.exchange(TRANSFER, TRANSFER)?;
        ensure!(
            transfer.seen.ip() == client.ip(family),
            "web saw {} instead of the client's address",
            transfer.seen
        );
        screen::works(
            &format!("200 MB each way with {to}"),
            &rate(transfer.elapsed.as_secs_f64()),
        );
    }
    screen::say("   Every byte was compared at its destination.");
    Ok(())
}

fn to_world(lab: &Lab, client: &Pod) -> Result<()> {
    for family in Family::BOTH {
        let to = family.remote_at(PORT);
        let _server = tcp::Server::start(lab.world.netns(), to)?;
        let mut connection = tcp::Client::connect(client.netns(), to)?;
        let transfer = connection.exchange(TRANSFER, TRANSFER)?;
        ensure!(
            transfer.seen.ip() == family.node(),
            "the world saw {} instead of the node's address",
            transfer.seen
        );
        screen::works(
            &format!("200 MB each way with {to}"),
            &rate(transfer.elapsed.as_secs_f64()),
        );
        screen::works(
            &format!("{} became", connection.local()?),
            &format!("{} (the node) for the world", transfer.seen),
        );
    }
    Ok(())
}

fn rate(seconds: f64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let megabytes = (2 * TRANSFER / MEGABYTE) as f64;
    format!("{:.0} MB/s", megabytes / seconds)
}

fn prove(lab: &Lab, firewall: &Netfilter) -> Result<()> {
    let counters = Counters::read(&lab.node)?;
    screen::say("The programs' own counters:");
    for &counter in Counter::ALL {
        if counters.get(counter) > 0 {
            screen::quote(&format!(
                "{:>9}  {:<20} {}",
                counters.get(counter),
                counter.name(),
                counter.text()
            ));
        }
    }
    let (tcp, all) = (firewall.counted("tcp")?, firewall.counted("all")?);
    let bypassed = counters.bypassed();
    screen::say("What the node's own stack saw of the same traffic:");
    screen::works("packets that passed the FORWARD hook", &all.to_string());
    screen::works("packets that went under it", &bypassed.to_string());
    ensure!(
        bypassed > 1000 && bypassed > 20 * all,
        "most packets should have gone under the stack: {bypassed} did, {all} did not; {counters:?}"
    );
    ensure!(
        (1..=16).contains(&tcp),
        "of 4 TCP connections the stack should see the first packets only, it saw {tcp}"
    );
    screen::say(
        "   The first packets of every connection go through the stack, so the firewall decides about each of them.\n\
         \x20  What it lets through unchanged is learned, and the rest goes under it.",
    );
    Ok(())
}

fn leave(node: &Node, pods: [Pod; 2], before: &Traces) -> Result<()> {
    for pod in pods {
        let name = pod.name().to_owned();
        screen::command(&format!(
            "CNI_COMMAND=DEL CNI_CONTAINERID={name} CNI_NETNS=/run/netns/{name} ..."
        ));
        let start = Instant::now();
        pod.del()?;
        screen::works(
            &format!("{name} is gone"),
            &format!("in {:.1} ms", start.elapsed().as_secs_f64() * 1e3),
        );
    }
    let mut after = Traces::of(node)?;
    let loaded = after.pins.len();
    // With forwarding on, the kernel gives the node an anycast address of its own subnet.
    after.routes.clone_from(&before.routes);
    // What is loaded once stays for the next ADD.
    after.pins.clone_from(&before.pins);
    ensure!(
        after.registry == Registry::default(),
        "{:?}",
        after.registry
    );
    ensure!(
        after == *before,
        "left behind: {after:#?}\nbefore: {before:#?}"
    );
    let Registry {
        endpoints,
        pods,
        owners,
        destinations,
        ports,
        shadowed_ports,
    } = &after.registry;
    for (what, count) in [
        (
            "devices of containers",
            after.devices.difference(&before.devices).count(),
        ),
        (
            "entries of containers in eBPF maps",
            endpoints.len()
                + pods.len()
                + owners.len()
                + destinations
                + ports.len()
                + shadowed_ports,
        ),
        ("addresses still leased", after.leases.len()),
    ] {
        screen::works(what, &count.to_string());
    }
    screen::say(&format!(
        "   The {loaded} pinned programs and maps wait for the next container; there is no daemon."
    ));
    Ok(())
}
