//! `CNI_ARGS`: what is accepted is made of pairs, says the same again, and has no key twice over.
#![no_main]

use libfuzzer_sys::fuzz_target;
use underpass_cni::{Code, args::CniArgs};

fuzz_target!(|text: &str| {
    let pairs: Vec<&str> = text.split(';').collect();
    let well_formed = text.is_empty() || pairs.iter().all(|pair| pair.matches('=').count() == 1);
    let args = match CniArgs::parse(text) {
        Ok(args) => args,
        Err(error) => {
            assert_eq!(error.code, Code::InvalidEnvironment);
            assert!(
                !well_formed || error.msg.contains("IgnoreUnknown"),
                "{error}"
            );
            return;
        }
    };
    assert!(well_formed, "{text:?} was accepted");
    for pair in pairs.iter().filter_map(|pair| pair.split_once('=')) {
        let last = pairs
            .iter()
            .filter_map(|other| other.split_once('='))
            .rfind(|(key, _)| *key == pair.0);
        assert_eq!(args.get(pair.0), last.map(|(_, value)| value));
    }
    let known: Vec<&str> = pairs
        .iter()
        .filter_map(|pair| Some(pair.split_once('=')?.0))
        .collect();
    args.require_known(&known).expect("every key is known");
});
