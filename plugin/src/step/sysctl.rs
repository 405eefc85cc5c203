//! Settings below `/proc/sys/net`, which are those of the namespace of the calling thread. Each is
//! read first and written only when it differs, so that a read-only `/proc` with the right values
//! is enough.

use std::{
    io,
    path::{Path, PathBuf},
};

use tracing::warn;
use underpass_abi::endpoint::device;
use underpass_netlink::sysctl::Tree;

use node::{forward, forwarding_v4, forwarding_v6, liberal};

use super::{Attachment, Inspection, Interface, Step};
use crate::{
    change::Change,
    conf::{Conntrack, Dad},
    error::Error,
    finding::{Finding, Findings},
    plan::MTU_MIN_V6,
};

mod node;

pub(crate) use node::{be_liberal_again, forward_again};

/// Tells whether a device of this MTU, in bytes, has IPv6 at all, so that it can be told to make no
/// addresses of its own: the programs drop what a container sends from addresses that nobody gave it.
pub(super) fn has_ipv6(mtu: u32) -> bool {
    // Not the folder of its settings: see `Tree`.
    mtu >= MTU_MIN_V6 && Path::new("/proc/self/net/if_inet6").exists()
}

/// The families that the container has addresses of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Families {
    v4: bool,
    v6: bool,
}

/// A file below the tree, and what must be in it.
struct Setting {
    path: PathBuf,
    value: &'static str,
    need: Need,
    lasts: Lasts,
}

/// The meaning of a setting that can't be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    /// The attachment would not work.
    Required,
    /// The kernel was built or started without it: nothing is lost.
    IfPresent,
}

/// For how long a setting matters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lasts {
    /// As long as the attachment: CHECK looks at it.
    Always,
    /// While the interface is made. A later plugin (`tuning`) or the container may want it otherwise.
    AtFirst,
}

fn required(path: impl AsRef<Path>, value: &'static str) -> Setting {
    Setting {
        path: path.as_ref().to_owned(),
        value,
        need: Need::Required,
        lasts: Lasts::Always,
    }
}

fn if_present(path: impl AsRef<Path>, value: &'static str) -> Setting {
    Setting {
        need: Need::IfPresent,
        ..required(path, value)
    }
}

/// A setting that ADD makes, and that others may change afterwards without any harm.
fn at_first(setting: Setting) -> Setting {
    Setting {
        lasts: Lasts::AtFirst,
        ..setting
    }
}

/// Settings of the container's end.
pub(crate) struct ContainerSettings;

impl Step<Interface> for ContainerSettings {
    fn name(&self) -> &'static str {
        "container sysctls"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let Interface { plan, netns, .. } = &attachment.made;
        if !plan.has_v6() {
            return Ok(());
        }
        netns.run(|| {
            let tree = Tree::of_this_thread();
            of_container(&plan.container.name, plan.dad)
                .iter()
                .try_for_each(|setting| setting.apply(&tree))
        })?
    }

    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let ends = &inspection.found;
        if !families(inspection).v6 {
            return Ok(());
        }
        let settings = of_container(&ends.container.name, ends.dad);
        let found = ends.netns.run(|| {
            let tree = Tree::of_this_thread();
            differences(&tree, "in the container", &settings)
        })??;
        findings.extend(found);
        Ok(())
    }
}

fn of_container(name: &str, dad: Dad) -> Vec<Setting> {
    let mut settings = vec![
        // Without it the container does not reach itself, which may be what somebody wants.
        at_first(required("ipv6/conf/lo/disable_ipv6", "0")),
        required(format!("ipv6/conf/{name}/disable_ipv6"), "0"),
        at_first(required(format!("ipv6/conf/{name}/keep_addr_on_down"), "1")),
        at_first(if_present(format!("ipv6/conf/{name}/accept_ra"), "0")),
    ];
    if dad == Dad::Off {
        settings.push(at_first(if_present(
            format!("ipv6/conf/{name}/accept_dad"),
            "0",
        )));
    }
    settings
}

/// Settings of the node and of the host's end. Those of the node are never undone: others may rely on them by then.
pub(crate) struct HostSettings;

impl Step<Interface> for HostSettings {
    fn name(&self) -> &'static str {
        "host sysctls"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let plan = &attachment.made.plan;
        let families = Families {
            v4: plan.has_v4(),
            v6: plan.has_v6(),
        };
        let tree = Tree::of_this_thread();
        let hear_routers = || Ok(attachment.uplinks.hear_routers.clone());
        forward(&tree, families, hear_routers, &mut Vec::new())?;
        if plan.conntrack == Conntrack::Liberal {
            liberal().apply(&tree)?;
        }
        let is_filtered = plan.flags & device::ANTI_SPOOF != 0;
        for setting in of_host(&plan.host.name, families) {
            match setting.apply(&tree) {
                Err(error) if is_filtered && setting.may_stay(&error) => {
                    warn!(
                        "{error}; the programs drop the container's router advertisements without it"
                    );
                }
                answer => answer?,
            }
        }
        Ok(())
    }

    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let families = families(inspection);
        let tree = Tree::of_this_thread();
        let mut settings = Vec::new();
        settings.extend(families.v4.then(forwarding_v4));
        settings.extend(families.v6.then(forwarding_v6));
        settings.extend(of_host(&inspection.host.name, families));
        findings.extend(differences(&tree, "on the host", &settings)?);
        if inspection.found.conntrack == Conntrack::Liberal {
            // The container works without. It may be of before its network asked for it.
            for finding in differences(&tree, "on the host", &[liberal()])? {
                warn!("{finding}");
            }
        }
        Ok(())
    }
}

fn families(inspection: &Inspection<'_, Interface>) -> Families {
    let has = |v4| {
        let mut addresses = inspection.found.addresses();
        addresses.any(|net| net.addr().is_ipv4() == v4)
    };
    Families {
        v4: has(true),
        v6: has(false),
    }
}

fn of_host(name: &str, families: Families) -> Vec<Setting> {
    let mut settings = Vec::new();
    if families.v4 {
        settings.push(required(format!("ipv4/conf/{name}/forwarding"), "1"));
    }
    if families.v6 {
        settings.extend([
            required(format!("ipv6/conf/{name}/disable_ipv6"), "0"),
            required(format!("ipv6/conf/{name}/forwarding"), "1"),
            at_first(if_present(format!("ipv6/conf/{name}/autoconf"), "0")),
        ]);
    }
    // A container must not become the host's router. Where the end forwards, 1 accepts nothing either.
    settings.push(at_first(if_present(
        format!("ipv6/conf/{name}/accept_ra"),
        "0",
    )));
    settings
}

/// Lists the settings that are not what they have to be for as long as the attachment is there.
fn differences(
    tree: &Tree,
    place: &'static str,
    settings: &[Setting],
) -> Result<Vec<Finding>, Error> {
    let mut found = Vec::new();
    let lasting = settings
        .iter()
        .filter(|setting| setting.lasts == Lasts::Always);
    for setting in lasting {
        let actual = match tree.read(&setting.path) {
            Ok(actual) if means_the_same(&actual, setting.value) => continue,
            Ok(actual) => actual,
            Err(error) if setting.may_be_missing(&error) => continue,
            // A device that has become too small for IPv6 has no settings of it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => "missing".to_owned(),
            Err(source) => return Err(setting.error(tree, "read", source)),
        };
        found.push(Finding::Setting {
            path: tree.path(&setting.path),
            place,
            actual,
            wanted: setting.value,
        });
    }
    Ok(found)
}

/// Names a setting as `sysctl` does: the dots in the names of devices are slashes there.
fn sysctl(path: &Path) -> String {
    let swap = |letter| match letter {
        '/' => '.',
        '.' => '/',
        letter => letter,
    };
    let swapped: String = path.to_string_lossy().chars().map(swap).collect();
    format!("net.{swapped}")
}

/// Whether the kernel takes two values for the same: any number but zero switches on.
fn means_the_same(actual: &str, wanted: &str) -> bool {
    let is_on = |value: &str| value.parse::<i32>().ok().map(|number| number != 0);
    match is_on(actual) {
        Some(on) => Some(on) == is_on(wanted),
        None => actual == wanted,
    }
}

impl Setting {
    /// Reads the trimmed content of the file; nothing if it may be missing and is.
    fn value(&self, tree: &Tree) -> Result<Option<String>, Error> {
        match tree.read(&self.path) {
            Ok(value) => Ok(Some(value)),
            Err(error) if self.may_be_missing(&error) => Ok(None),
            Err(source) => Err(self.error(tree, "read", source)),
        }
    }

    /// Whether the kernel takes what is there for what has to be.
    fn is_meant(&self, tree: &Tree) -> Result<bool, Error> {
        let value = self.value(tree)?;
        Ok(value.is_none_or(|value| means_the_same(&value, self.value)))
    }

    fn apply(&self, tree: &Tree) -> Result<(), Error> {
        self.put(tree).map(drop)
    }

    /// Makes the setting, and says what that changed.
    fn put(&self, tree: &Tree) -> Result<Option<Change>, Error> {
        let before = self.value(tree)?.filter(|value| value != self.value);
        let Some(before) = before else {
            return Ok(None);
        };
        tree.write(&self.path, self.value)
            .map_err(|source| self.error(tree, "set", source))?;
        Ok(Some(Change::Setting {
            name: sysctl(&self.path),
            value: self.value,
            before,
        }))
    }

    fn may_be_missing(&self, error: &io::Error) -> bool {
        self.need == Need::IfPresent && error.kind() == io::ErrorKind::NotFound
    }

    /// Whether a setting that can't be made, because `/proc/sys` is not to be written, is one of two safeguards.
    fn may_stay(&self, error: &Error) -> bool {
        let Error::Sysctl { source, .. } = error else {
            return false;
        };
        self.need == Need::IfPresent
            && self.lasts == Lasts::AtFirst
            && matches!(
                source.kind(),
                io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied
            )
    }

    fn error(&self, tree: &Tree, action: &'static str, source: io::Error) -> Error {
        Error::Sysctl {
            action,
            path: tree.path(&self.path),
            wanted: self.value,
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::{env, fs};

    fn setting(path: impl Into<PathBuf>, need: Need) -> Setting {
        Setting {
            path: path.into(),
            value: "1",
            need,
            lasts: Lasts::Always,
        }
    }

    #[test]
    fn any_number_but_zero_switches_on() {
        assert!(means_the_same("1", "1") && means_the_same("2", "1") && means_the_same("0", "0"));
        assert!(!means_the_same("0", "1") && !means_the_same("1", "0"));
        assert!(!means_the_same("missing", "1"));
    }

    #[test]
    fn a_setting_has_the_name_that_sysctl_takes() {
        let named = |path: &str| sysctl(Path::new(path));
        assert_eq!(named("ipv4/ip_forward"), "net.ipv4.ip_forward");
        assert_eq!(
            named("ipv6/conf/eth0.100/accept_ra"),
            "net.ipv6.conf.eth0/100.accept_ra"
        );
    }

    #[test]
    fn a_value_that_is_right_is_not_written() {
        let root: &'static Path = Box::leak(env::temp_dir().into_boxed_path());
        let tree = Tree::at(root);
        let folder = format!("underpass-sysctl-{}", std::process::id());
        let path = root.join(&folder).join("forwarding");
        fs::create_dir(root.join(&folder)).expect("the temporary folder is writable");
        let setting = setting(Path::new(&folder).join("forwarding"), Need::Required);
        fs::write(&path, "1\n").expect("the temporary folder is writable");
        setting.apply(&tree).expect("nothing to do");
        // A write would have left the value without its newline.
        assert_eq!(fs::read_to_string(&path).expect("just written"), "1\n");
        fs::write(&path, "0\n").expect("the temporary folder is writable");
        setting.apply(&tree).expect("writable");
        assert_eq!(fs::read_to_string(&path).expect("just written"), "1");
        fs::remove_dir_all(root.join(folder)).expect("just written");
    }

    #[test]
    fn a_missing_file_matters_only_where_it_is_needed() {
        let tree = Tree::at(Path::new("/nowhere"));
        assert!(setting("at/all", Need::IfPresent).apply(&tree).is_ok());
        let error = setting("at/all", Need::Required)
            .apply(&tree)
            .expect_err("there is no such file");
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }

    #[test]
    fn what_differs_is_said_of_the_settings_that_last() {
        let root: &'static Path = Box::leak(env::temp_dir().into_boxed_path());
        let tree = Tree::at(root);
        let folder = format!("underpass-differences-{}", std::process::id());
        fs::create_dir(root.join(&folder)).expect("the temporary folder is writable");
        let write = |name: &str, value: &str| {
            fs::write(root.join(&folder).join(name), value).expect("the folder is writable");
        };
        write("right", "1\n");
        write("wrong", "0\n");
        let at = |name: &str, need| setting(Path::new(&folder).join(name), need);
        let at_first = Setting {
            lasts: Lasts::AtFirst,
            ..at("wrong", Need::Required)
        };
        let settings = [
            at("right", Need::Required),
            at("wrong", Need::Required),
            at("missing", Need::Required),
            at("missing", Need::IfPresent),
            at_first,
        ];
        let found = differences(&tree, "on the host", &settings).expect("readable");
        let found: Vec<_> = found.iter().map(ToString::to_string).collect();
        let folder = root.join(folder);
        let wrong = |name: &str, value: &str| {
            let path = folder.join(name);
            format!("{} is {value} on the host, and has to be 1", path.display())
        };
        assert_eq!(found, [wrong("wrong", "0"), wrong("missing", "missing")]);
        fs::remove_dir_all(folder).expect("just written");
    }
}
