//! `prevResult`: what is understood can be said again in its version, and is then understood as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use underpass_cni::{CniResult, Version};

fuzz_target!(|input: &[u8]| {
    let Some((first, text)) = input.split_first() else {
        return;
    };
    let version = Version::ALL[usize::from(*first) % Version::ALL.len()];
    let Ok(document) = serde_json::from_slice::<Value>(text) else {
        return;
    };
    // What goes with a config of this version is a result of some version.
    if CniResult::from_previous(&document, version).is_ok() {
        CniResult::from_value(&document, version).expect("a previous result is a result");
    }
    let Ok(result) = CniResult::from_value(&document, version) else {
        return;
    };
    for version in Version::ALL {
        let Ok(text) = result.to_json(version) else {
            assert!(
                version < Version::V0_3_0 && result.ips.is_empty(),
                "only an old version lacks the words: {result:?}"
            );
            continue;
        };
        let document: Value = serde_json::from_str(&text).expect("a result is JSON");
        let again =
            CniResult::from_previous(&document, version).expect("our own result is understood");
        if version >= Version::V1_0_0 {
            assert_eq!(again, result);
        }
        assert_eq!(again.to_json(version).expect("it was said before"), text);
    }
});
