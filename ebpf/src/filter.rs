//! What a pod may send, and how much it may open.

pub mod anti_spoofing;
pub mod quota;
pub mod tunnel;
