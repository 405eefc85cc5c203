//! delegated
