//! What every vendor's backend would write the same way.
//!
//! [`memory_table`]: device memory, and the way in which it is given back. [`host_memory`]: the table of host memory
//! over four calls of a driver. [`pool`]: a driver's pools in stream order. [`device_table`]: the
//! devices of what a driver hands out without telling. [`stream_table`]: the streams that need not
//! be asked for. [`peer_table`]: which device reaches which memory. [`queued`]: a function on its
//! way through a driver's queue. [`checks`]: arguments that are refused before a driver sees them.

pub mod checks;
pub mod device_table;
pub mod host_memory;
pub mod memory_table;
pub mod peer_table;
pub mod pool;
pub mod queued;
pub mod stream_table;
