//! A Kubernetes for `cargo xtask test kubernetes`, built from Debian's source for this workspace alone.
//!
//! Debian builds nothing but kubectl from it, yet all of it is there, with all that it needs. Nothing is installed: the compiler is
//! unpacked for the build and removed after it, and etcd is unpacked, whose package would start a service.

use std::collections::BTreeSet;
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::archive::{Archive, Suites};
use crate::{process, report};

/// The release that has all of it.
const SUITES: &Suites = &[("Debian", &["bookworm"])];
/// It is built for such machines alone, and on them.
const ARCHITECTURE: &str = "amd64";
const COMPILER: [&str; 2] = ["golang-1.19-go", "golang-1.19-src"];
/// Where the compiler is in its packages.
const COMPILER_ROOT: &str = "usr/lib/go-1.19";
const SOURCE: &str = "kubernetes";
/// What the source is, whatever number Debian gave to it.
const VERSION: &str = "v1.20.2";
/// How its own packages name it.
const IMPORT: &str = "k8s.io/kubernetes";

/// What is built.
const PROGRAMS: [&str; 6] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
];
/// What is unpacked besides: its package, the path in it.
const ETCD: (&str, &str) = ("etcd-server", "usr/bin/etcd");

/// Where the executables are; `tools` is the folder of what set-up installs for the workspace.
pub(super) fn folder(tools: &Path) -> PathBuf {
    tools.join("kubernetes")
}

/// The folder, if all of them are there.
pub(super) fn find(folder: &Path) -> Option<PathBuf> {
    let mut names = PROGRAMS.iter().chain(&["etcd"]);
    names
        .all(|name| folder.join(name).is_file())
        .then(|| folder.to_owned())
}

/// Builds them if they are not there yet.
pub(super) fn ensure(tools: &Path) -> anyhow::Result<()> {
    let folder = folder(tools);
    let build = Build {
        folder: tools.join("kubernetes.new"),
    };
    if find(&folder).is_some() {
        // Somebody may have stopped it while it cleaned up.
        return build.remove();
    }
    if ARCH != "x86_64" || !process::on_path("apt-get") {
        bail!(
            "Kubernetes is built from Debian's source with Debian's compiler for x86-64: run this on such a Debian, or put {} and etcd into {}",
            PROGRAMS.join(", "),
            folder.display()
        );
    }
    // What was built before somebody stopped it is not built again.
    if !build.is_fetched().is_file() {
        build.fetch()?;
    }
    build.generate()?;
    for name in PROGRAMS {
        report::step("building", &format!("{name} of Kubernetes {VERSION}"));
        build.compile(name)?;
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::rename(build.bin(), &folder)
        .with_context(|| format!("cannot rename {}", build.bin().display()))?;
    build.remove()
}

/// A build that may have been begun before.
struct Build {
    folder: PathBuf,
}

impl Build {
    /// Where the executables are put.
    fn bin(&self) -> PathBuf {
        self.folder.join("bin")
    }

    fn tree(&self) -> PathBuf {
        self.folder.join("go/src").join(IMPORT)
    }

    /// It is there when all that is needed is.
    fn is_fetched(&self) -> PathBuf {
        self.folder.join("fetched")
    }

    /// Removes all of it.
    fn remove(&self) -> anyhow::Result<()> {
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder)
                .with_context(|| format!("cannot remove {}", self.folder.display()))?;
        }
        Ok(())
    }

    /// Fetches compiler, source and etcd.
    fn fetch(&self) -> anyhow::Result<()> {
        self.remove()?;
        report::step(
            "fetching",
            "Kubernetes' source, the compiler for it, and etcd: the build takes some ten minutes and 3 GB, which are freed after it",
        );
        let archive = Archive::with_sources(&self.folder.join("archive"), SUITES, ARCHITECTURE)?;
        let unpack = |package: &str, into: &str| {
            let versions = archive.versions(package)?;
            let newest = versions
                .first()
                .with_context(|| format!("the archive has no {package}"))?;
            archive.unpack(package, newest, &self.folder.join(into))
        };
        for package in COMPILER {
            unpack(package, "compiler")?;
        }
        unpack(ETCD.0, "etcd")?;
        let source = archive.source(SOURCE, &self.folder.join("source"))?;
        let tree = self.tree();
        let parent = tree.parent().context("a folder in a folder")?;
        fs::create_dir_all(parent)
            .and_then(|()| fs::rename(&source, &tree))
            .and_then(|()| fs::create_dir_all(self.bin()))
            .and_then(|()| {
                let etcd = self.folder.join("etcd").join(ETCD.1);
                fs::copy(etcd, self.bin().join("etcd"))
            })
            .and_then(|_| fs::write(self.is_fetched(), []))
            .with_context(|| format!("cannot arrange {}", self.folder.display()))
    }

    /// Writes the one file that Kubernetes' own build makes and its source lacks: what the API server says of its types.
    fn generate(&self) -> anyhow::Result<()> {
        let package = "pkg/generated/openapi";
        let name = "zz_generated.openapi";
        let tree = self.tree();
        if tree.join(package).join(format!("{name}.go")).exists() {
            return Ok(());
        }
        let generator = self.folder.join("openapi-gen");
        let mut build = self.go();
        build.arg("build").arg("-o").arg(&generator);
        process::run(build.arg("./vendor/k8s.io/kube-openapi/cmd/openapi-gen"))?;
        let mut generate = self.with_go(&generator);
        generate
            .args(["--input-dirs", &described(&tree)?.join(",")])
            .args(["--output-package", &format!("{IMPORT}/{package}")])
            .args(["--output-file-base", name])
            .args([
                "--go-header-file",
                "hack/boilerplate/boilerplate.generatego.txt",
            ])
            .arg("--report-filename")
            .arg(self.folder.join("violations"));
        process::run(&mut generate)
    }

    /// Builds one program.
    fn compile(&self, name: &str) -> anyhow::Result<()> {
        let variable = format!("{IMPORT}/vendor/k8s.io/component-base/version");
        let [major, minor] = ["1", "20"];
        let flags = format!(
            "-s -w -X {variable}.gitVersion={VERSION} -X {variable}.gitMajor={major} -X {variable}.gitMinor={minor}"
        );
        let mut build = self.go();
        build
            .args(["build", "-ldflags", &flags, "-o"])
            .arg(self.bin().join(name))
            .arg(format!("{IMPORT}/cmd/{name}"));
        process::run(&mut build)
    }

    fn go(&self) -> Command {
        self.with_go(
            &self
                .folder
                .join("compiler")
                .join(COMPILER_ROOT)
                .join("bin/go"),
        )
    }

    /// A command in the source, that finds the compiler and no network. Its packages are found by where they are: their list of
    /// modules is not one that this compiler accepts.
    fn with_go(&self, program: &Path) -> Command {
        let root = self.folder.join("compiler").join(COMPILER_ROOT);
        let mut command = Command::new(program);
        command
            .current_dir(self.tree())
            .env(
                "PATH",
                format!("{}:/usr/bin:/bin", root.join("bin").display()),
            )
            .env("GOROOT", root)
            .env("GOPATH", self.folder.join("go"))
            .env("GOCACHE", self.folder.join("cache"))
            .env("GO111MODULE", "off")
            .env("GOPROXY", "off")
            .env("GOFLAGS", "")
            .env("CGO_ENABLED", "0");
        command
    }
}

/// The packages whose types the API server describes: those that say so.
fn described(tree: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("grep")
        .current_dir(tree)
        .args(["--recursive", "--files-with-matches", "--include=*.go"])
        .args(["^// *+k8s:openapi-gen=", "staging/src/k8s.io", "pkg"])
        .output()
        .context("cannot start grep")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let packages: BTreeSet<String> = said.lines().filter_map(package_of).collect();
    if packages.is_empty() {
        bail!("no package of {} describes its types", tree.display());
    }
    Ok(packages.into_iter().collect())
}

/// The package of a file of the source, unless it is an example.
fn package_of(file: &str) -> Option<String> {
    let folder = Path::new(file).parent()?.to_str()?;
    if ["/code-generator", "/sample-apiserver"]
        .iter()
        .any(|example| folder.contains(example))
    {
        return None;
    }
    Some(match folder.strip_prefix("staging/src/") {
        Some(staged) => format!("{IMPORT}/vendor/{staged}"),
        None => format!("{IMPORT}/{folder}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_of_the_package_that_its_folder_is() {
        let package = |file| package_of(file);
        assert_eq!(
            package("staging/src/k8s.io/api/core/v1/doc.go").as_deref(),
            Some("k8s.io/kubernetes/vendor/k8s.io/api/core/v1")
        );
        assert_eq!(
            package("pkg/apis/abac/v0/doc.go").as_deref(),
            Some("k8s.io/kubernetes/pkg/apis/abac/v0")
        );
        assert_eq!(
            package("staging/src/k8s.io/sample-apiserver/pkg/apis/doc.go"),
            None
        );
    }
}
