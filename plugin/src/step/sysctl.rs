//! Settings below `/proc/sys/net`, which are those of the namespace of the calling thread. Each is
//! read first and written only when it differs, so that a read-only `/proc` with the right values
//! is enough.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{conf::Dad, error::Error, netns::Netns, plan::Plan, uplink::Uplink};

/// Whether this kernel has IPv6 at all, so that devices can be told to make no addresses of their
/// own: the programs drop what a container sends from addresses that nobody gave it.
pub(super) fn has_ipv6() -> bool {
    Path::new("/proc/sys/net/ipv6").exists()
}

/// Which file, and what must be in it.
struct Setting {
    path: PathBuf,
    value: &'static str,
    need: Need,
}

/// What it means if a setting can't be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    /// The attachment would not work.
    Required,
    /// The kernel was built or started without it: nothing is lost.
    IfPresent,
}

fn required(path: impl AsRef<Path>, value: &'static str) -> Setting {
    Setting {
        path: Path::new("/proc/sys/net").join(path),
        value,
        need: Need::Required,
    }
}

fn if_present(path: impl AsRef<Path>, value: &'static str) -> Setting {
    Setting {
        need: Need::IfPresent,
        ..required(path, value)
    }
}

/// Makes the node forward packets, for the families that the container has. Never undone: others
/// may rely on it by then.
pub(crate) fn forward(plan: &Plan, uplinks: &[Uplink]) -> Result<(), Error> {
    if plan.has_v4() {
        required("ipv4/ip_forward", "1").apply()?;
    }
    if plan.has_v6() {
        let forwarding = required("ipv6/conf/all/forwarding", "1");
        if !forwarding.holds()? {
            // A host that forwards ignores router advertisements, and would lose the default route
            // that it got from one.
            for uplink in uplinks.iter().filter(|uplink| uplink.advertised) {
                let accept = if_present(format!("ipv6/conf/{}/accept_ra", uplink.name), "2");
                if accept.value()?.as_deref() == Some("1") {
                    accept.apply()?;
                }
            }
            forwarding.apply()?;
        }
    }
    Ok(())
}

/// Settings of the host's end.
pub(crate) fn apply_host(plan: &Plan) -> Result<(), Error> {
    host(plan).iter().try_for_each(Setting::apply)
}

fn host(plan: &Plan) -> Vec<Setting> {
    let name = &plan.host.name;
    let mut settings = Vec::new();
    if plan.has_v4() {
        settings.push(required(format!("ipv4/conf/{name}/forwarding"), "1"));
    }
    if plan.has_v6() {
        settings.extend([
            required(format!("ipv6/conf/{name}/disable_ipv6"), "0"),
            required(format!("ipv6/conf/{name}/forwarding"), "1"),
            if_present(format!("ipv6/conf/{name}/autoconf"), "0"),
        ]);
    }
    // A container must not become the host's router.
    settings.push(if_present(format!("ipv6/conf/{name}/accept_ra"), "0"));
    settings
}

/// Settings of the container's end.
pub(crate) fn apply_pod(netns: &Netns, plan: &Plan) -> Result<(), Error> {
    if !plan.has_v6() {
        return Ok(());
    }
    netns.run(|| pod(plan).iter().try_for_each(Setting::apply))?
}

fn pod(plan: &Plan) -> Vec<Setting> {
    let name = &plan.pod.name;
    let mut settings = vec![
        required("ipv6/conf/lo/disable_ipv6", "0"),
        required(format!("ipv6/conf/{name}/disable_ipv6"), "0"),
        required(format!("ipv6/conf/{name}/keep_addr_on_down"), "1"),
        if_present(format!("ipv6/conf/{name}/accept_ra"), "0"),
    ];
    if plan.dad == Dad::Off {
        settings.push(if_present(format!("ipv6/conf/{name}/accept_dad"), "0"));
    }
    settings
}

impl Setting {
    /// The trimmed content of the file; nothing if it may be missing and is.
    fn value(&self) -> Result<Option<String>, Error> {
        match fs::read_to_string(&self.path) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if self.may_be_missing(&error) => Ok(None),
            Err(source) => Err(self.error("read", source)),
        }
    }

    fn holds(&self) -> Result<bool, Error> {
        Ok(self.value()?.is_none_or(|value| value == self.value))
    }

    fn apply(&self) -> Result<(), Error> {
        if self.holds()? {
            return Ok(());
        }
        fs::write(&self.path, self.value).map_err(|source| self.error("set", source))
    }

    fn may_be_missing(&self, error: &io::Error) -> bool {
        self.need == Need::IfPresent && error.kind() == io::ErrorKind::NotFound
    }

    fn error(&self, action: &'static str, source: io::Error) -> Error {
        Error::Sysctl {
            action,
            path: self.path.clone(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(path: PathBuf, need: Need) -> Setting {
        Setting {
            path,
            value: "1",
            need,
        }
    }

    #[test]
    fn a_value_that_is_right_is_not_written() {
        let path = std::env::temp_dir().join(format!("underpass-sysctl-{}", std::process::id()));
        fs::write(&path, "1\n").expect("the temporary folder is writable");
        setting(path.clone(), Need::Required)
            .apply()
            .expect("nothing to do");
        // A write would have left the value without its newline.
        assert_eq!(fs::read_to_string(&path).expect("just written"), "1\n");
        fs::write(&path, "0\n").expect("the temporary folder is writable");
        setting(path.clone(), Need::Required)
            .apply()
            .expect("writable");
        assert_eq!(fs::read_to_string(&path).expect("just written"), "1");
        fs::remove_file(&path).expect("just written");
    }

    #[test]
    fn a_missing_file_matters_only_where_it_is_needed() {
        let path = PathBuf::from("/nowhere/at/all");
        assert!(setting(path.clone(), Need::IfPresent).apply().is_ok());
        let error = setting(path, Need::Required)
            .apply()
            .expect_err("there is no such file");
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}
