//! Settings of the whole node that containers need: an ADD makes them, and they are made again where somebody has undone them.

use std::collections::BTreeSet;

use underpass_dataplane::Maps;
use underpass_netlink::{Netlink, sysctl::Tree};

use super::{Families, Setting, if_present, required};
use crate::{change::Change, error::Error, uplink::Uplinks};

pub(super) fn forwarding_v4() -> Setting {
    required("ipv4/ip_forward", "1")
}

pub(super) fn forwarding_v6() -> Setting {
    required("ipv6/conf/all/forwarding", "1")
}

/// A node without connection tracking has no such setting, and needs none.
pub(super) fn liberal() -> Setting {
    if_present("netfilter/nf_conntrack_tcp_be_liberal", "1")
}

/// Makes the node forward packets again, for the families of the containers that are there: whoever applies the files of sysctls anew may have
/// switched it off, and the next ADD may be far. Notes what that changed.
pub(crate) fn forward_again(
    node: &Netlink,
    maps: &Maps,
    changes: &mut Vec<Change>,
) -> Result<(), Error> {
    // An ADD for an interface of others' asks for nothing.
    let interfaces = maps.interfaces()?;
    let ours: BTreeSet<u32> = interfaces.iter().map(|record| record.ifindex).collect();
    if ours.is_empty() {
        return Ok(());
    }
    let endpoints = maps.endpoints()?;
    // Of a container that is gone the addresses stay until somebody frees them.
    let links = node.indices()?;
    let has = |v4| {
        endpoints.iter().any(|(addr, endpoint)| {
            let index = endpoint.ifindex;
            addr.is_ipv4() == v4 && ours.contains(&index) && links.contains(&index)
        })
    };
    let families = Families {
        v4: has(true),
        v6: has(false),
    };
    let hear_routers = || Ok(Uplinks::find(node, maps, None)?.hear_routers);
    forward(&Tree::of_this_thread(), families, hear_routers, changes)
}

/// Makes connection tracking liberal again, as a network has asked for whose containers are there, and notes it if that changed anything.
pub(crate) fn be_liberal_again(changes: &mut Vec<Change>) -> Result<(), Error> {
    changes.extend(liberal().put(&Tree::of_this_thread())?);
    Ok(())
}

/// Makes the node forward packets, for the families that containers have, and notes what that changed. `hear_routers` is asked where it
/// matters, which is rare.
pub(super) fn forward(
    tree: &Tree,
    families: Families,
    hear_routers: impl FnOnce() -> Result<Vec<String>, Error>,
    changes: &mut Vec<Change>,
) -> Result<(), Error> {
    if families.v4 {
        let forwarding = forwarding_v4();
        if !forwarding.is_meant(tree)? {
            changes.extend(forwarding.put(tree)?);
        }
    }
    if families.v6 {
        let forwarding = forwarding_v6();
        if !forwarding.is_meant(tree)? {
            // A host that forwards ignores router advertisements, and would lose the default route
            // that it got from one, or has yet to get.
            for name in hear_routers()? {
                let accept = if_present(format!("ipv6/conf/{name}/accept_ra"), "2");
                if accept.value(tree)?.as_deref() == Some("1") {
                    changes.extend(accept.put(tree)?);
                }
            }
            changes.extend(forwarding.put(tree)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::{
        env, fs,
        path::{Path, PathBuf},
    };

    /// A tree in a folder of its own, which is gone with the test.
    struct Node {
        root: PathBuf,
        tree: Tree,
    }

    impl Node {
        fn new(name: &str, values: &[(&str, &str)]) -> Self {
            let root = env::temp_dir().join(format!("underpass-{name}-{}", std::process::id()));
            for (path, value) in values {
                let path = root.join(path);
                let folder = path.parent().expect("it has a folder");
                fs::create_dir_all(folder).expect("the temporary folder is writable");
                fs::write(path, value).expect("the temporary folder is writable");
            }
            let tree = Tree::at(Box::leak(root.clone().into_boxed_path()));
            Self { root, tree }
        }

        /// What a call of `forward` says that it has changed.
        fn forward(&self, v4: bool, v6: bool, hear_routers: &[&str]) -> Vec<String> {
            let mut changes = Vec::new();
            let hear = || Ok(hear_routers.iter().map(ToString::to_string).collect());
            forward(&self.tree, Families { v4, v6 }, hear, &mut changes).expect("writable");
            changes.iter().map(ToString::to_string).collect()
        }

        fn value(&self, path: &str) -> String {
            self.tree.read(Path::new(path)).expect("just written")
        }
    }

    impl Drop for Node {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.root).expect("just written");
        }
    }

    #[test]
    fn what_was_switched_off_is_switched_on_for_the_families_that_there_are() {
        let (v4, v6) = ("ipv4/ip_forward", "ipv6/conf/all/forwarding");
        let accept = |name: &str| format!("ipv6/conf/{name}/accept_ra");
        let [eth0, eth1, eth2] = ["eth0", "eth1", "eth2"].map(accept);
        let off = [
            (v4, "0\n"),
            (v6, "0\n"),
            (&eth0, "1\n"),
            (&eth1, "0\n"),
            (&eth2, "1\n"),
        ];
        let node = Node::new("forward", &off);
        assert_eq!(node.forward(false, false, &["eth0"]), [""; 0]);
        let said = node.forward(true, false, &["eth0"]);
        assert_eq!(said, ["net.ipv4.ip_forward: 1 instead of 0"]);
        assert_eq!((node.value(v4), node.value(v6)), ("1".into(), "0".into()));
        assert_eq!(node.value(&eth0), "1");
        let said = node.forward(true, true, &["eth0", "eth1", "gone"]);
        let expected = [
            "net.ipv6.conf.eth0.accept_ra: 2 instead of 1",
            "net.ipv6.conf.all.forwarding: 1 instead of 0",
        ];
        assert_eq!(said, expected);
        assert_eq!(
            (node.value(&eth1), node.value(&eth2)),
            ("0".into(), "1".into())
        );
        assert_eq!(node.forward(true, true, &["eth0", "eth2"]), [""; 0]);
    }

    #[test]
    fn any_number_that_forwards_stays() {
        let on = [
            ("ipv4/ip_forward", "2\n"),
            ("ipv6/conf/all/forwarding", "2\n"),
        ];
        let node = Node::new("forwards", &on);
        assert_eq!(node.forward(true, true, &[]), [""; 0]);
        assert_eq!(node.value("ipv4/ip_forward"), "2");
    }
}
