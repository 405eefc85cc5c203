//! Flows: the table of what is known of them, and how they are learned.

pub mod entry;
pub mod join;
pub mod learn;
pub mod signed;
pub mod table;
pub mod tracking;
pub mod translated;
pub mod way;
