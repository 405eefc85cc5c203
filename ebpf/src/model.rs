//! What the stages speak of: types, and what follows from them alone. Nothing of the kernel is asked.

pub mod direction;
pub mod held;
pub mod request;
pub mod route;
pub mod state;
pub mod work;
