use serde_json::json;
use underpass_cni::Code;

use super::*;

fn network(keys: &Value) -> Result<Option<Bandwidth>, Error> {
    let mut document = json!({ "cniVersion": "1.1.0", "name": "n1", "type": "underpass" });
    for (key, value) in keys.as_object().expect("keys") {
        document[key] = value.clone();
    }
    of_network(&NetConf::parse(document.to_string().as_bytes())?)
}

#[test]
fn each_direction_for_itself() {
    let both =
        json!({ "ingressRate": 1000, "ingressBurst": 2000, "egressRate": 3, "egressBurst": 4 });
    let limits = network(&both).expect("valid").expect("given");
    let [ingress, egress] = [(1000, 2000), (3, 4)].map(|(rate, burst)| Limit { rate, burst });
    assert_eq!(limits.ingress, Some(ingress));
    assert_eq!(limits.egress, Some(egress));
    let one = network(&json!({ "egressRate": 3, "egressBurst": 4 })).expect("valid");
    assert_eq!(
        one,
        Some(Bandwidth {
            ingress: None,
            egress: Some(egress)
        })
    );
}

#[test]
fn zeros_are_no_limit_and_still_given() {
    let zeros = json!({ "ingressRate": 0, "ingressBurst": 0, "egressRate": 0, "egressBurst": 0 });
    assert_eq!(network(&zeros), Ok(Some(Bandwidth::default())));
    assert_eq!(network(&json!({ "ingressRate": null })), Ok(None));
    assert_eq!(network(&json!({})), Ok(None));
}

#[test]
fn what_makes_no_sense_is_refused_by_key_and_value() {
    let table = [
        (
            json!({ "ingressRate": 1000 }),
            "ingressRate 1000 with ingressBurst not set: if rate is set, burst must also be set",
        ),
        (
            json!({ "egressRate": 0, "egressBurst": 7 }),
            "egressRate 0 with egressBurst 7: if burst is set, rate must also be set",
        ),
        (
            json!({ "egressRate": 1, "egressBurst": 34_359_738_360_u64 }),
            "egressBurst 34359738360: burst cannot be more than 4GB",
        ),
    ];
    for (keys, text) in table {
        let error = network(&keys).expect_err("no sense");
        assert_eq!(error.code, Code::InvalidConfig, "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    let largest = json!({ "egressRate": 1, "egressBurst": 34_359_738_359_u64 });
    assert!(network(&largest).is_ok());
    let error = network(&json!({ "egressRate": -1 })).expect_err("negative");
    assert_eq!(error.code, Code::Decode, "{error}");
    assert!(error.to_string().contains("egressRate"), "{error}");
}

#[test]
fn lists_of_subnets_are_not_offered() {
    for key in ["unshapedSubnets", "shapedSubnets"] {
        let error = network(&json!({ key: ["10.0.0.0/8"] })).expect_err("not offered");
        assert_eq!(error.code, Code::UnsupportedField, "{error}");
        assert!(error.to_string().contains(key), "{error}");
        assert_eq!(network(&json!({ key: [] })), Ok(None));
    }
}
