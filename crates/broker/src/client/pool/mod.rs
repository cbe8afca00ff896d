//! Pools: memory that stays writable and outlives its holder.
//!
//! `opened`: a pool as the broker sent it. `held`: one that this process holds. `reader`: one that
//! another process holds.

mod held;
mod opened;
mod reader;

pub use held::Pool;
pub use reader::PoolReader;
