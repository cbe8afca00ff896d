//! The kinds of handles, and the table of each.

use std::sync::Mutex;

use crate::engine::{
    Client, Gpu, Participant, Pool, PoolReader, Reader, ReceivedBlock, Scratch, SentBlock, Writer,
};
use crate::handle::KIND_BITS;
use crate::opened::{OpenLoan, OpenSession, OpenStream};
use crate::table::{FreeRow, Table};

/// The numbers of kinds that fit into a handle, 0 among them, which no kind has.
pub(crate) const KINDS: usize = 1 << KIND_BITS;

/// A kind of handle, by the type that C sees.
pub(crate) trait Kind: Sized + 'static {
    /// What a handle of it stands for.
    type Value: Send + Sync;
    /// Its number in handles, from 1 to below [`KINDS`].
    const NUMBER: u8;
    /// What messages call it.
    const NAME: &'static str;

    fn table(tables: &Tables) -> &Table<Self::Value>;
}

/// A device that memory lies on.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_device(());

/// A stream that sharing, claiming and releasing are ordered on.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_stream(());

/// A producer's session.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_session(());

/// A block that this process produces.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_block(());

/// A block that is lent: shared any number of times until it is released.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_loan(());

/// A consumer's connection to a session.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_participant(());

/// A block that this process received.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_received(());

/// A connection to a broker of objects.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_client(());

/// An object that is being filled.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_writer(());

/// An object that is mapped.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_reader(());

/// Memory of a broker that goes with this process.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_scratch(());

/// A pool of a broker that this process holds.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_pool(());

/// A pool of a broker that is read beside its holder.
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[derive(Debug)]
pub struct gpu_ipc_pool_reader(());

/// Makes the table of each kind.
macro_rules! kinds {
    ($($type:ident = $number:literal, $name:literal, $table:ident: $value:ty;)*) => {
        $(
            impl Kind for $type {
                type Value = $value;
                const NUMBER: u8 = $number;
                const NAME: &'static str = $name;

                #[inline]
                fn table(tables: &Tables) -> &Table<$value> {
                    &tables.$table
                }
            }
        )*

        /// The table of each kind.
        #[derive(Default)]
        pub(crate) struct Tables {
            $($table: Table<$value>,)*
        }

        impl Tables {
            /// Puts a row on the list of its table.
            pub fn put_back(&self, kind: u8, row: FreeRow) {
                match kind {
                    $($number => self.$table.put_back(row),)*
                    _ => {}
                }
            }
        }

        /// Names the kind of a number.
        pub(crate) fn name_of(kind: u8) -> Option<&'static str> {
            match kind {
                $($number => Some($name),)*
                _ => None,
            }
        }
    };
}

kinds! {
    gpu_ipc_device = 1, "a device", devices: Gpu;
    gpu_ipc_stream = 2, "a stream", streams: OpenStream;
    gpu_ipc_session = 3, "a session", sessions: OpenSession;
    gpu_ipc_block = 4, "a block", blocks: SentBlock;
    gpu_ipc_participant = 5, "a participant", participants: Participant;
    gpu_ipc_received = 6, "a received block", received: ReceivedBlock;
    gpu_ipc_client = 7, "a client of a broker", clients: Client;
    gpu_ipc_writer = 8, "a writer", writers: Mutex<Option<Writer>>;
    gpu_ipc_reader = 9, "a reader", readers: Mutex<Reader>;
    gpu_ipc_scratch = 10, "scratch memory", scratches: Mutex<Scratch>;
    gpu_ipc_loan = 11, "a loan", loans: OpenLoan;
    gpu_ipc_pool = 12, "a pool", pools: Pool;
    gpu_ipc_pool_reader = 13, "a reader of a pool", pool_readers: PoolReader;
}
