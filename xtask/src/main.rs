//! `cargo xtask`: what this project does to itself. One command per file.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod archive;
mod bench;
mod build;
mod demo;
mod dist;
mod elf;
mod emulator;
mod fuzz;
mod image;
mod licences;
mod lint;
mod process;
mod report;
mod setup;
mod test;
mod vm;
mod workspace;

use workspace::Workspace;

/// What this project does to itself.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find or install what the build and the tests need.
    Setup(setup::Arguments),
    /// Build the plugins, statically linked, into target/release.
    Build(build::Arguments),
    /// Run the tests of the workspace, as root.
    Test(test::Arguments),
    /// Run the fuzz targets of the contract and the allocator.
    Fuzz(fuzz::Arguments),
    /// Measure packets and calls against the kernel's limits and the reference plugins, as root.
    Bench(bench::Arguments),
    /// Check format, lints, dependencies and public texts.
    Lint,
    /// Pack the plugins into target/dist, ready to unpack on a node.
    Dist,
    /// Pack the agent's image into target/dist, for container engines and registries.
    Image,
    /// Show two containers talking through the eBPF programs, as root.
    Demo(demo::Arguments),
    /// What a guest of `test vm` runs.
    #[command(hide = true)]
    VmGuest(vm::inside::Arguments),
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    match Workspace::find().and_then(|workspace| run(command, &workspace)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::error(&error);
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command, workspace: &Workspace) -> anyhow::Result<()> {
    match command {
        Command::Setup(arguments) => setup::run(workspace, &arguments),
        Command::Build(arguments) => build::run(workspace, &arguments),
        Command::Test(arguments) => test::run(workspace, &arguments),
        Command::Fuzz(arguments) => fuzz::run(workspace, &arguments),
        Command::Bench(arguments) => bench::run(workspace, &arguments),
        Command::Lint => lint::run(workspace),
        Command::Dist => dist::run(workspace),
        Command::Image => image::run(workspace),
        Command::Demo(arguments) => demo::run(workspace, &arguments),
        Command::VmGuest(arguments) => vm::inside::run(&arguments),
    }
}
