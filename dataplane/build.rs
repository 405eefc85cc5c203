//! Compiles the eBPF programs and leaves them in `OUT_DIR`, by name, for the crate to embed.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use object::{
    build::elf::{Builder, SectionData},
    elf,
};
use underpass_toolchain::{self as toolchain, Toolchain};

/// What the object is made from, relative to the workspace.
const SOURCES: [&str; 6] = [
    "ebpf/src",
    "ebpf/Cargo.toml",
    "ebpf/abi/src",
    "ebpf/abi/Cargo.toml",
    "Cargo.toml",
    "Cargo.lock",
];

/// What an embedded object begins with, so that it can be found in an executable. The last byte has no meaning, and is part of the build's
/// number all the same.
const HEADER: [u8; 16] = *b"underpass eBPF\0\0";

/// The level of deflate: the best that is usual.
const COMPRESSION: u8 = 9;

/// The size of a header of `.BTF.ext` that has functions and lines, but no relocations for other kernels (CO-RE), in bytes.
const FUNCTIONS_ONLY: usize = 24;

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            println!("cargo::error={message}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let root = variable("CARGO_MANIFEST_DIR")?
        .parent()
        .map(Path::to_path_buf)
        .ok_or("this crate's folder has no parent: build it inside its workspace")?;
    let out = variable("OUT_DIR")?;
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    println!("cargo::rerun-if-env-changed={}", toolchain::CHOICE);

    let toolchain = Toolchain::find(&root).map_err(|missing| missing.to_string())?;
    println!(
        "cargo::rerun-if-changed={}",
        toolchain.compiler.rustc.display()
    );
    println!("cargo::rerun-if-changed={}", toolchain.linker.display());

    let target = out.join("ebpf");
    let status = toolchain
        .cargo("build", &root, &target, &[])
        .and_then(|mut cargo| cargo.status())
        .map_err(|e| format!("cannot start the eBPF build: {e}: run `cargo xtask setup`"))?;
    if !status.success() {
        return Err(format!(
            "the eBPF programs do not build ({status}): the compiler's messages are above"
        ));
    }
    for name in toolchain::OBJECTS {
        embed(&Toolchain::object(&target, name), &out.join(name))?;
    }
    Ok(())
}

/// Leaves an object that was linked where the crate finds it, deflated behind a header, as `src/object.rs` expects it.
fn embed(object: &Path, embedded: &Path) -> Result<(), String> {
    let linked = fs::read(object).map_err(|e| format!("cannot read {}: {e}", object.display()))?;
    let stripped =
        stripped(&linked).map_err(|e| format!("cannot strip {}: {e}", object.display()))?;
    let deflated = miniz_oxide::deflate::compress_to_vec(&stripped, COMPRESSION);
    fs::write(embedded, [&HEADER[..], &deflated].concat())
        .map_err(|e| format!("cannot write {}: {e}", embedded.display()))
}

/// The object without its DWARF sections, four fifths of it: BTF was made from them, and the kernel takes BTF. Of that the lines of the
/// source go as well, which are half of what is left when it is deflated: the kernel would keep them for as long as a program is loaded,
/// for the verifier's log and for `bpftool prog dump`. Functions keep their names and types.
fn stripped(object: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut builder = Builder::read(object)?;
    for section in &mut builder.sections {
        let name: &[u8] = &section.name;
        section.delete = name.starts_with(b".debug_")
            || name.starts_with(b".rel.debug_")
            || name == b".rel.BTF.ext";
        if name == b".BTF.ext"
            && let SectionData::Data(data) = &mut section.data
        {
            *data = without_lines(data)?.into();
        }
    }
    builder.delete_orphans();
    // The linker has one table for the names of symbols and sections; the builder wants two.
    let names = builder.sections.add();
    names.name = b".shstrtab"[..].into();
    names.sh_type = elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    builder.write(&mut stripped)?;
    Ok(stripped)
}

/// What is left of a `.BTF.ext` section without the lines of the source (`btf_ext_header` of the kernel's Documentation/bpf/btf.rst). Its words are
/// in the order of the object, which is little-endian: see the target.
fn without_lines(section: &[u8]) -> Result<Vec<u8>, String> {
    let word = |at: usize| {
        let bytes = section.get(at..)?.first_chunk()?;
        usize::try_from(u32::from_le_bytes(*bytes)).ok()
    };
    let is_relocated = |header: usize| header > FUNCTIONS_ONLY && word(28) != Some(0);
    let functions = || {
        let (header, start, length) = (word(4)?, word(8)?, word(12)?);
        (!is_relocated(header)).then_some(())?;
        section.get(header + start..)?.get(..length)
    };
    let functions = functions().ok_or("its .BTF.ext section is not as bpf-linker writes it")?;
    let length = u32::try_from(functions.len()).map_err(|e| e.to_string())?;
    let header = u32::try_from(FUNCTIONS_ONLY).map_err(|e| e.to_string())?;
    let mut kept = section[..4].to_vec();
    for word in [header, 0, length, length, 0] {
        kept.extend(word.to_le_bytes());
    }
    kept.extend(functions);
    Ok(kept)
}

/// A variable that cargo sets for build scripts.
fn variable(name: &str) -> Result<PathBuf, String> {
    env::var_os(name)
        .map(PathBuf::from)
        .ok_or_else(|| format!("{name} is not set: this program is run by cargo"))
}
