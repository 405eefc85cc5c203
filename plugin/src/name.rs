//! The names that the executable answers to. Each is a plugin: existing configs and runtimes ask for it, and find
//! what they expect.

use underpass_cni::Error;

/// The plugin that a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Name {
    /// `underpass`, or what begins so: also the operator's command line.
    Underpass,
    /// `ptp`: the same plugin, without a command line.
    Ptp,
    /// `host-local`, `underpass-ipam`: the allocator of addresses.
    HostLocal,
    /// `portmap`: host ports, in a chain.
    Portmap,
    /// `bandwidth`: limits, in a chain.
    Bandwidth,
    /// `loopback`: the container's own loopback device.
    Loopback,
}

/// What an executable of that name is. The first two are what it is under any longer name that begins so, as
/// `underpass-0.2`; the longer one comes first.
const SERVED: [(&str, Name); 7] = [
    ("underpass-ipam", Name::HostLocal),
    ("underpass", Name::Underpass),
    ("ptp", Name::Ptp),
    ("host-local", Name::HostLocal),
    ("portmap", Name::Portmap),
    ("bandwidth", Name::Bandwidth),
    ("loopback", Name::Loopback),
];

impl Name {
    /// Finds what an executable with that file name is. Code 4 if it is nothing: to act as another plugin than the
    /// one that was asked for would be worse than to fail.
    pub fn of(file_name: &str) -> Result<Self, Error> {
        let mut served = SERVED.into_iter();
        if let Some((_, name)) = served.find(|(served, _)| *served == file_name) {
            return Ok(name);
        }
        let [longer, shorter, ..] = SERVED;
        for (prefix, name) in [longer, shorter] {
            if file_name.starts_with(prefix) {
                return Ok(name);
            }
        }
        let names = SERVED.map(|(served, _)| served).join(", ");
        let (prefix, _) = shorter;
        Err(Error::environment(format!(
            "underpass was called by the name {file_name:?}, which it does not serve: it serves {names}, and names that \
             begin with {prefix}; install the plugin {file_name:?} itself in this place, or link underpass under one of \
             these names"
        )))
    }

    /// Tells whether it gives addresses, as an IPAM plugin does.
    #[must_use]
    pub fn gives_addresses(self) -> bool {
        self == Self::HostLocal
    }

    /// Tells whether a person can give it commands.
    #[must_use]
    pub fn has_command_line(self) -> bool {
        self == Self::Underpass
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_begins_with_underpass_is_the_plugin() {
        for name in ["underpass", "underpass-0.2", "underpass.old"] {
            assert_eq!(Name::of(name), Ok(Name::Underpass), "{name}");
        }
        for name in ["underpass-ipam", "underpass-ipam-0.2"] {
            assert_eq!(Name::of(name), Ok(Name::HostLocal), "{name}");
        }
        assert_eq!(Name::of("loopback"), Ok(Name::Loopback));
    }

    #[test]
    fn others_hear_every_name_that_is_served() {
        for other in [
            "bridge",
            "macvlan",
            "Portmap",
            "portmap2",
            "my-underpass",
            "",
        ] {
            let error = Name::of(other).expect_err(other);
            assert_eq!(error.code.number(), 4);
            for (served, _) in SERVED {
                assert!(error.msg.contains(served), "{error}");
            }
        }
    }
}
