//! What people run calls the plugin: containerd by its CRI and by `ctr`, and podman. Root only, and these programs of the distribution.

mod cage;
mod cri;
mod ctr;
mod podman;
mod reach;
mod scene;
