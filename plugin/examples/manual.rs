//! Writes the man pages and the shell completions of `underpass` into a folder: `cargo xtask dist` packs them.

use std::{env, fs, io, path::Path};

use clap_complete::Shell;
use underpass::cli;

fn main() -> io::Result<()> {
    let folder = env::args_os().nth(1).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "name the folder that the pages and completions go to",
        )
    })?;
    let folder = Path::new(&folder);
    let (man, completions) = (folder.join("man"), folder.join("completions"));
    for folder in [&man, &completions] {
        fs::create_dir_all(folder)?;
    }
    let mut command = cli::command();
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        clap_complete::generate_to(shell, &mut command, cli::NAME, &completions)?;
    }
    // A page on how to be helped, for each command, helps nobody.
    clap_mangen::generate_to(cli::command().disable_help_subcommand(true), man)
}
