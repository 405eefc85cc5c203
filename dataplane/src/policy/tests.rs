use super::*;

use std::env;

const USUAL: Stack = Stack {
    tracking: Tracking::Strict,
    ipsec: Ipsec::Absent,
    bridges: Bridges {
        v4: false,
        v6: false,
    },
    timers: Timers {
        tcp: Some(300),
        udp: Some(30),
        icmp: Some(30),
        sctp: Some(30),
    },
};

#[test]
fn by_default_the_firewall_is_asked_as_often_as_it_must_be() {
    let rules = USUAL.rules(250);
    assert_eq!(rules.policy, 0);
    assert_eq!(rules.feed, Feed::all(9));
    // Nothing that the kernel does not tell makes a difference.
    let silent = Stack {
        timers: Timers {
            tcp: None,
            udp: None,
            icmp: None,
            sctp: None,
        },
        ..USUAL
    };
    assert_eq!(silent.rules(250), rules);
}

#[test]
fn a_family_of_which_bridges_are_filtered_has_a_bit() {
    for (v4, v6, bits) in [
        (true, false, policy::BRIDGES4),
        (false, true, policy::BRIDGES6),
        (true, true, policy::BRIDGES4 | policy::BRIDGES6),
    ] {
        let bridges = Bridges { v4, v6 };
        assert_eq!(Stack { bridges, ..USUAL }.rules(250).policy, bits);
    }
}

#[test]
fn each_protocol_has_its_own_interval() {
    let stack = Stack {
        timers: Timers {
            udp: Some(12),
            icmp: Some(6),
            ..USUAL.timers
        },
        ..USUAL
    };
    let expected = Feed {
        tcp: 9,
        udp: 3,
        icmp: 1,
        sctp: 9,
    };
    assert_eq!(stack.rules(250).feed, expected);
}

#[test]
fn an_interval_is_never_longer_than_it_may_be_and_never_nothing() {
    for hz in [100, 250, 300, 1000] {
        let tick = f64::from(1 << tick_shift(hz)) / f64::from(hz);
        for seconds in [0, 1, 2, 3, 5, 10, 29, 30, 31, 120, 432_000, u32::MAX] {
            let ticks = interval(Some(seconds), hz);
            let third = f64::from(seconds) / 3.0;
            let longest = third.min(f64::from(Feed::LONGEST));
            let lasts = f64::from(ticks) * tick;
            assert!(ticks >= 1, "{hz} Hz, {seconds} s");
            assert!(
                lasts <= longest || ticks == 1,
                "{hz} Hz, {seconds} s: {lasts} s"
            );
            // Rounding costs less than a tick.
            assert!(lasts + tick > longest, "{hz} Hz, {seconds} s: {lasts} s");
        }
        assert_eq!(interval(None, hz), interval(Some(30), hz));
    }
}

#[test]
fn what_is_found_becomes_bits() {
    let bits = |tracking, ipsec| {
        let stack = Stack {
            tracking,
            ipsec,
            ..USUAL
        };
        stack.rules(250).policy
    };
    for (tracking, bit) in [
        (Tracking::Absent, 0),
        (Tracking::Strict, 0),
        (Tracking::Liberal, policy::LIBERAL),
    ] {
        assert_eq!(bits(tracking, Ipsec::Absent), bit);
        assert_eq!(bits(tracking, Ipsec::Present), bit | policy::XFRM);
        // Who does not know lets nothing leave in the clear.
        let unknown = Ipsec::Unknown(libc::EPERM);
        assert_eq!(bits(tracking, unknown), bit | policy::XFRM);
    }
}

#[test]
fn rules_leave_the_rest_of_the_state_alone() {
    let mut state = State {
        epoch: 7,
        trace: 4,
        ..State::default()
    };
    let rules = USUAL.rules(250);
    assert_ne!(Rules::in_force(&state), rules);
    rules.put(&mut state);
    assert_eq!(Rules::in_force(&state), rules);
    assert_eq!((state.epoch, state.trace), (7, 4));
}

#[test]
fn only_what_costs_something_is_remarked() {
    let says = |tracking, ipsec, words: &str| {
        let stack = Stack {
            tracking,
            ipsec,
            ..USUAL
        };
        let remark = stack.remark();
        match words {
            "" => assert_eq!(remark, None),
            words => assert!(
                remark.is_some_and(|text| text.contains(words)),
                "{remark:?}"
            ),
        }
    };
    says(
        Tracking::Strict,
        Ipsec::Absent,
        "nf_conntrack_tcp_be_liberal is 0",
    );
    says(Tracking::Strict, Ipsec::Present, "IPsec");
    says(Tracking::Liberal, Ipsec::Present, "IPsec");
    says(
        Tracking::Liberal,
        Ipsec::Unknown(libc::EPERM),
        "does not say",
    );
    says(Tracking::Liberal, Ipsec::Absent, "");
    says(Tracking::Absent, Ipsec::Absent, "");
}

#[test]
fn a_module_may_be_compressed() {
    let folder = env::temp_dir().join(format!("underpass-xfrm-{}", std::process::id()));
    fs::create_dir(&folder).expect("the temporary folder is writable");
    let with = |name: &str| {
        let file = folder.join(name);
        fs::write(&file, "").expect("the temporary folder is writable");
        let found = has_module(fs::read_dir(&folder));
        fs::remove_file(file).expect("just written");
        found
    };
    assert!(with("xfrm_user.ko"));
    assert!(with("xfrm_user.ko.zst"));
    assert!(!with("xfrm_algo.ko"));
    assert!(!has_module(fs::read_dir("/nowhere")));
    fs::remove_dir(folder).expect("just written");
}

#[test]
fn this_kernel_can_be_looked_at() {
    let stack = Stack::look();
    let rules = Rules::for_stack(&stack);
    assert!((1..=10).contains(&rules.feed.udp), "{rules:?}");
    assert!(milliseconds(rules.feed.udp) <= 10_000);
}
