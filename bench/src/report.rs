//! An outcome for people: a table of text, and a drawing.

mod plot;
mod table;

pub(crate) use plot::plot;
pub(crate) use table::table;
