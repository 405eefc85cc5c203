//! programmed
