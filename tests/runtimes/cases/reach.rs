//! Who reaches a container with host ports, and as whom: asked by what a person would type, and by the tests' own clients.

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
};

use underpass_runtimes::{Running, image, wait_until};
use underpass_tests::{netns::Netns, prelude::*, traffic};

use crate::scene::{ECHO, ECHO_INSIDE, WEB, WEB_INSIDE};

/// Fails unless a container that serves its name can be reached in every way by both families, and reaches the world.
pub(crate) fn everywhere(lab: &Lab, container: &Running<'_>, name: &str) -> Result<()> {
    is_serving(container, name)?;
    for family in Family::BOTH {
        let asked = || format!("{family:?} of {name}");
        from_the_world(lab, container, family, name)
            .with_context(|| format!("from the world by {}", asked()))?;
        from_the_node(lab, container, family, name)
            .with_context(|| format!("from the node by {}", asked()))?;
        from_itself(container, family, name)
            .with_context(|| format!("from itself by {}", asked()))?;
        to_the_world(lab, container, family)
            .with_context(|| format!("to the world by {}", asked()))?;
    }
    Ok(())
}

/// Waits until the container's own server listens.
pub(crate) fn is_serving(container: &Running<'_>, name: &str) -> Result<()> {
    let own = SocketAddr::new(V4.loopback(), WEB_INSIDE);
    wait_until("the server listens", || {
        serves(container.netns(), own, name)
    })
}

/// The world sees the node's address, and the container sees who asks.
pub(crate) fn from_the_world(
    lab: &Lab,
    container: &Running<'_>,
    family: Family,
    name: &str,
) -> Result<()> {
    let client = lab.world.netns();
    serves(client, web(family), name)?;
    answers(client, container, echo(family), family.gateway())
}

/// A process of the node, at the loopback and at the node's address; the container sees its gateway.
fn from_the_node(lab: &Lab, container: &Running<'_>, family: Family, name: &str) -> Result<()> {
    let client = lab.node.netns();
    for at in [family.loopback(), family.node()] {
        serves(client, SocketAddr::new(at, WEB), name)?;
        answers(
            client,
            container,
            SocketAddr::new(at, ECHO),
            family.pod_gateway(),
        )?;
    }
    Ok(())
}

/// The container itself, at the node's address; it sees its gateway.
fn from_itself(container: &Running<'_>, family: Family, name: &str) -> Result<()> {
    let url = url(web(family));
    // Its limit is that of the runtime: wget's own ends a static busybox by SIGSEGV.
    let page = container.exec(&["/bin/busybox", "wget", "-qO", "-", &url])?;
    ensure!(page.trim() == name, "{url} says {page:?}");
    let asked = echo(family);
    answers(container.netns(), container, asked, family.pod_gateway())
}

/// A server in the world sees the node's address.
pub(crate) fn to_the_world(lab: &Lab, container: &Running<'_>, family: Family) -> Result<()> {
    let remote = family.remote_at(443);
    let _servers = traffic::serve(lab.world.netns(), remote)?;
    ask(container.netns(), remote, family.node())
}

/// Fails unless the container's own server says its name at an address.
pub(crate) fn serves(client: &Netns, at: SocketAddr, name: &str) -> Result<()> {
    let page = page(client, at)?;
    ensure!(page == name, "{at} says {page:?}, not {name}");
    Ok(())
}

/// Fails if the node's ports still lead anywhere.
pub(crate) fn is_gone(lab: &Lab) -> Result<()> {
    let world = lab.world.netns();
    for family in Family::BOTH {
        tcp::refuses(world, web(family))?;
        udp::Client::open(world, family)?.hears_nothing(echo(family))?;
    }
    Ok(())
}

/// Fails unless servers in the container's namespace answer by TCP and UDP, and see the client as `seen`.
fn answers(client: &Netns, container: &Running<'_>, at: SocketAddr, seen: IpAddr) -> Result<()> {
    let inside = Family::of(at.ip()).port(ECHO_INSIDE);
    let _servers = traffic::serve(container.netns(), inside)?;
    ask(client, at, seen)
}

/// The node's port of the container's own server.
pub(crate) fn web(family: Family) -> SocketAddr {
    SocketAddr::new(family.node(), WEB)
}

/// The node's port of the test's servers.
pub(crate) fn echo(family: Family) -> SocketAddr {
    SocketAddr::new(family.node(), ECHO)
}

fn ask(client: &Netns, at: SocketAddr, expected: IpAddr) -> Result<()> {
    let seen = tcp::visit(client, at)?;
    ensure!(seen == expected, "by TCP {at} saw {seen}, not {expected}");
    let seen = udp::Client::open(client, Family::of(at.ip()))?
        .chat(at, 3)?
        .seen;
    ensure!(
        seen.ip() == expected,
        "by UDP {at} saw {seen}, not {expected}"
    );
    Ok(())
}

fn page(client: &Netns, at: SocketAddr) -> Result<String> {
    let mut wget = Command::new("timeout");
    wget.arg("5")
        .arg(image::busybox())
        .args(["wget", "-qO", "-", &url(at)]);
    let page = client.expect(&mut wget, &[])?;
    Ok(page.trim().to_owned())
}

fn url(at: SocketAddr) -> String {
    format!("http://{at}/")
}
