//! `masqueradeAddress`: the address that the world sees instead of the one that the kernel would choose.

use std::net::IpAddr;

use serde_json::Value;
use underpass_cni::Error;

/// The key, for messages.
pub const KEY: &str = "masqueradeAddress";

/// One address, or one for each family.
pub(super) fn addresses(value: Option<Value>, ip_masq: bool) -> Result<Vec<IpAddr>, Error> {
    let texts = match value {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(one) => vec![one],
    };
    let mut addresses = Vec::new();
    for text in &texts {
        let address = text
            .as_str()
            .and_then(|text| text.parse().ok())
            .filter(is_usable)
            .ok_or_else(|| {
                Error::config(format!(
                    "invalid {KEY} {text}: give an IPv4 or IPv6 address of the node that the world can answer to, or a list with one of each"
                ))
            })?;
        if let Some(first) = addresses
            .iter()
            .find(|other: &&IpAddr| other.is_ipv4() == address.is_ipv4())
        {
            return Err(Error::config(format!(
                "invalid {KEY} {address}: {first} is there already, and a family can have one only"
            )));
        }
        addresses.push(address);
    }
    if let (Some(address), false) = (addresses.first(), ip_masq) {
        return Err(Error::config(format!(
            "invalid {KEY} {address}: nothing is masqueraded without ipMasq; set it to true, or remove {KEY}"
        )));
    }
    Ok(addresses)
}

/// Tells whether a packet may come from there, and an answer go there.
fn is_usable(address: &IpAddr) -> bool {
    if address.is_unspecified() || address.is_loopback() || address.is_multicast() {
        return false;
    }
    match address {
        IpAddr::V4(address) => !address.is_broadcast() && !address.is_link_local(),
        IpAddr::V6(address) => {
            !address.is_unicast_link_local() && address.to_ipv4_mapped().is_none()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use underpass_cni::Code;

    use super::*;

    #[test]
    fn a_string_or_a_list_with_one_of_each_family() {
        let read = |value| addresses(Some(value), true).expect("valid addresses");
        let [v4, v6] =
            ["192.0.2.7", "2001:db8::7"].map(|text| text.parse::<IpAddr>().expect("an address"));
        assert_eq!(read(json!("192.0.2.7")), [v4]);
        assert_eq!(read(json!(["2001:db8::7"])), [v6]);
        assert_eq!(read(json!(["192.0.2.7", "2001:db8::7"])), [v4, v6]);
        assert!(read(json!([])).is_empty());
        assert!(
            addresses(None, false)
                .expect("nothing asked for")
                .is_empty()
        );
    }

    #[test]
    fn what_the_world_could_not_answer_to_is_refused_by_name() {
        for text in [
            "",
            "eth0",
            "192.0.2.7/24",
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "169.254.1.1",
            "::",
            "::1",
            "fe80::1",
            "ff02::1",
            "::ffff:192.0.2.7",
        ] {
            let error = addresses(Some(json!(text)), true).expect_err(text);
            assert_eq!(error.code, Code::InvalidConfig, "{text}");
            let message = error.to_string();
            assert!(message.contains(KEY) && message.contains(text), "{message}");
        }
        for value in [
            json!(7),
            json!([["192.0.2.7"]]),
            json!(["192.0.2.7", "192.0.2.8"]),
        ] {
            assert!(addresses(Some(value.clone()), true).is_err(), "{value}");
        }
    }

    #[test]
    fn without_masquerade_it_would_mean_nothing() {
        let error = addresses(Some(json!("192.0.2.7")), false).expect_err("no ipMasq");
        assert!(error.to_string().contains("ipMasq"), "{error}");
    }
}
