//! ADD: it looks, takes a lease, makes the pair, and applies the steps in their order. Every step leaves
//! its undoing behind, and a failure runs them all.

use tracing::warn;
use underpass_cni::{CniResult, Request};
use underpass_dataplane::Maps;
use underpass_netlink::{Netlink, Netns, link::By};

use super::{behind, chained, identity, reap_or_warn, require_detached};
use crate::{
    conf::{AttachmentConf, chained::Name},
    error::Error,
    plan::Plan,
    rehearsal::{require_foreign, require_local},
    step::{Attachment, INTERFACE, Interface, Pair, Undo, lease, lease::Taken, link, xdp},
    stopwatch::Stopwatch,
    uplink::{Uplinks, inherited_mtu},
};

/// Attaches the container, or changes nothing. In a chain, behind the plugin that has made the interface, it serves its host
/// ports.
pub(super) fn add(request: &Request) -> Result<CniResult, Error> {
    match behind(request)? {
        Some(previous) => chained::add(request, previous, Name::Underpass),
        None => attach(request),
    }
}

fn attach(request: &Request) -> Result<CniResult, Error> {
    let mut time = Stopwatch::start();
    let conf = AttachmentConf::of(request)?;
    let network = &conf.network;
    let identity = identity(request);
    let owner = identity.owner();
    let driver = link::driver(network.device)?;
    let xdp = xdp::usable(network.xdp);
    let path = request.attachment.netns.clone().unwrap_or_default();
    let netns = Netns::open(&path)?.ok_or_else(|| Error::NoNetns(path.clone()))?;
    time.lap("config");

    let mut maps = Maps::open_or_load(&network.bpf_root)?;
    time.lap("pins");
    let node = Netlink::open()?;
    let pod = netns.run(Netlink::open)??;
    if pod.link(By::Name(&identity.ifname))?.is_some() {
        return Err(link::taken(&node, &identity)?);
    }
    time.lap("netlink sockets");
    require_local(&node, &network.masquerade_addresses)?;
    let uplinks = Uplinks::find(&node, &maps, network.uplinks.as_deref())?;
    if let Some(finding) = uplinks.do_not_masquerade(network.masquerade) {
        warn!("{finding}");
    }
    time.lap("uplinks");
    reap_or_warn(&node, &mut maps, &uplinks.indices, &request.conf);
    require_detached(&maps, owner, &identity)?;
    time.lap("lost DELs");

    let mut undo = Undo::default();
    let pins = maps.pins().clone();
    // What this ADD has put into the maps is gone before its lease is.
    let is_attached = move || {
        let maps = Maps::open_existing(&pins).ok().flatten();
        maps.is_some_and(|maps| matches!(maps.attachment(owner), Ok(Some(_))))
    };
    let Taken { result, claim } = lease::take(request, &node, is_attached, &mut undo)?;
    time.lap(lease::NAME);
    let sandbox = path.to_string_lossy();
    let mtu = inherited_mtu(&uplinks.list);
    let plan = Plan::new(identity, &conf, result, driver, mtu, &sandbox)?;
    require_foreign(&node, &plan.addresses)?;
    let Pair { host, container } = link::make(&node, &netns, &plan, &mut undo)?;
    time.lap(link::NAME);

    let attachment = Attachment {
        undo,
        node: &node,
        maps,
        owner,
        host,
        ports: plan.ports.clone(),
        uplinks,
        made: Interface {
            plan,
            claim,
            container,
            netns,
            pod,
            xdp,
        },
    };
    let made = attachment.make(INTERFACE, |step| time.lap(step))?;
    time.keep(&network.bpf_root);
    Ok(made.plan.result)
}
