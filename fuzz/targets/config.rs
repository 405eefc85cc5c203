//! Any input of any verb: the answer is one document or none, and an error has a code.
#![no_main]

use std::{collections::BTreeMap, ffi::OsString};

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use underpass_cni::{
    About, CniResult, Error, NetConf, NetworkRequest, Plugin, Request, Version, serve::answer,
};

/// Decodes all that there is to decode, and answers with what the input says.
struct Reader;

fn read(conf: &NetConf) -> Result<CniResult, Error> {
    conf.ipam_type()?;
    conf.plugin::<BTreeMap<String, Value>>()?;
    conf.runtime::<BTreeMap<String, Value>>()?;
    conf.args_cni::<BTreeMap<String, Value>>()?;
    underpass_ipam::data_dir(conf)?;
    let mut result = conf.prev_result()?.unwrap_or_default();
    if let Some(dns) = conf.dns()? {
        result.dns = dns;
    }
    Ok(result)
}

impl Plugin for Reader {
    fn add(&self, request: &Request) -> Result<CniResult, Error> {
        read(&request.conf)
    }

    fn del(&self, request: &Request) -> Result<(), Error> {
        read(&request.conf).map(drop)
    }

    fn check(&self, request: &Request) -> Result<(), Error> {
        read(&request.conf).map(drop)
    }

    fn gc(&self, request: &NetworkRequest) -> Result<(), Error> {
        request.conf.valid_attachments().map(drop)
    }

    fn status(&self, request: &NetworkRequest) -> Result<(), Error> {
        // Pools are built from the config; nothing is leased in a folder that no process can have.
        underpass_ipam::status(request)
    }
}

const VERBS: [&str; 6] = ["ADD", "DEL", "CHECK", "GC", "STATUS", "NOPE"];

fuzz_target!(|input: &[u8]| {
    let Some((first, stdin)) = input.split_first() else {
        return;
    };
    let verb = VERBS[usize::from(*first) % VERBS.len()];
    let lookup = |name: &str| {
        let value = match name {
            "CNI_COMMAND" => verb,
            "CNI_CONTAINERID" => "c1",
            "CNI_NETNS" | "CNI_PATH" => "/nonexistent",
            "CNI_IFNAME" => "eth0",
            _ => return None,
        };
        Some(OsString::from(value))
    };
    let about = About {
        name: "fuzz",
        version: "0",
        supported: &Version::ALL,
    };
    let outcome = answer(&about, &Reader, lookup, stdin);
    match (outcome.success, outcome.stdout.as_str()) {
        (true, "") => assert_ne!(verb, "ADD", "an ADD without a result"),
        (true, text) => {
            assert_eq!(verb, "ADD", "only an ADD has a result");
            let result: Value = serde_json::from_str(text).expect("a result is JSON");
            assert!(result["cniVersion"].is_string(), "{result}");
        }
        (false, text) => {
            let error: Value = serde_json::from_str(text).expect("an error is JSON");
            assert!(
                error["code"].as_u64().is_some_and(|code| code > 0),
                "{error}"
            );
            assert!(
                error["msg"].as_str().is_some_and(|msg| !msg.is_empty()),
                "{error}"
            );
        }
    }
});
