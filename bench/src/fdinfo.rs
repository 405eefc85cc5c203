//! What the kernel tells of maps and programs in `/proc/thread-self/fdinfo`.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd as _},
};

use anyhow::{Context as _, Result};

/// The number behind a key, such as `memlock` (bytes), `run_cnt` or `run_time_ns`.
pub(crate) fn number(fd: impl AsFd, key: &str) -> Result<u64> {
    let path = format!("/proc/thread-self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    find(&text, key).with_context(|| format!("{path} has no number called {key}"))
}

fn find(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name == key).then(|| value.trim().parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::find;

    #[test]
    fn a_number_is_found_by_its_whole_name() {
        let text = "pos:\t0\nmap_type:\t9\nmemlock:\t4096\nrun_time_ns:\t12\n";
        assert_eq!(find(text, "memlock"), Some(4096));
        assert_eq!(find(text, "run_time_ns"), Some(12));
        assert_eq!(find(text, "run_time"), None);
    }
}
