//! What this crate takes from the facade.

pub(crate) use gpu_ipc::backend::{Backends, DeviceId, DevicePtr, ForkGuard, explain, thread};
pub(crate) use gpu_ipc::broker::pool::{Key, Previous, Sealed, bytes_for};
pub(crate) use gpu_ipc::broker::{
    Client, CreateOptions, DType, Dimension, Epoch, Identity, Layout, ObjectError, PartSpec, Pool,
    PoolReader, Reader, Readers, Scratch, Selector, Standing, Writer,
};
pub(crate) use gpu_ipc::participant::{Notice, ParticipantBuilder};
pub(crate) use gpu_ipc::session::{
    AdoptToken, Contents, Departure, Loan, Released, SentSlice, SessionNotice, ShareOptions, Stats,
};
pub(crate) use gpu_ipc::{
    After, BackendKind, ClaimError, Claims, Descriptor, Error, Gpu, Participant, ParticipantId,
    ReceivedBlock, Result, SentBlock, Session, State, Stream, To, Wait,
};
