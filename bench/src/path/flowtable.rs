//! A flowtable of nftables: the kernel's own short cut for flows that the stack has forwarded in both directions.

use anyhow::Result;
use underpass_tests::Node;

/// Lets all TCP and UDP flows between a node's devices take it.
pub(super) fn add(node: &Node) -> Result<()> {
    let links = node.netns().ip_json(&["link", "show", "type", "veth"])?;
    let devices: Vec<&str> = links
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|link| link["ifname"].as_str())
        .collect();
    let rules = format!(
        "table inet bench {{\n\
         flowtable short {{\n hook ingress priority 0\n devices = {{ {} }}\n }}\n\
         chain forward {{\n type filter hook forward priority 0\n meta l4proto {{ tcp, udp }} flow add @short\n }}\n\
         }}\n",
        devices.join(", ")
    );
    node.netns().nft(&rules)
}
