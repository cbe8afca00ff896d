//! The recipient of a grant.

use std::num::NonZeroU32;

use gpu_ipc::{Claims, To};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;

use super::number::Whole;
use crate::interpreter::errors::invalid;

/// The number of a participant in its session; never used again there.
#[pyclass(frozen, weakref, eq, ord, hash, module = "gpu_ipc")]
#[derive(PartialEq, Eq, PartialOrd, Ord, Hash, Clone, Copy)]
pub(crate) struct ParticipantId(u64);

impl ParticipantId {
    pub fn of(id: gpu_ipc::ParticipantId) -> ParticipantId {
        ParticipantId(id.0)
    }

    pub fn number(self) -> u64 {
        self.0
    }
}

#[pymethods]
impl ParticipantId {
    /// Make the number of a participant again from what ``value`` gave, in any process.
    #[new]
    #[pyo3(signature = (value, /))]
    fn new(value: u64) -> ParticipantId {
        ParticipantId(value)
    }

    /// The bare number.
    #[getter]
    fn value(&self) -> u64 {
        self.0
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, pyo3::types::PyType>, (u64,)) {
        (slf.get_type(), (slf.get().0,))
    }

    fn __repr__(&self) -> String {
        format!("<gpu_ipc.ParticipantId {:#x}>", self.0)
    }
}

/// The participants that claim first, up to a number of claims; made by ``Session.ticket``.
#[pyclass(frozen, weakref, eq, hash, module = "gpu_ipc")]
#[derive(PartialEq, Eq, Hash, Clone, Copy)]
pub(crate) struct Ticket(Option<NonZeroU32>);

impl Ticket {
    /// Makes a ticket for this many claims; `None` for any number.
    pub fn of(claims: Option<Whole>) -> PyResult<Ticket> {
        let Some(claims) = claims else {
            return Ok(Ticket(None));
        };
        let number = u32::try_from(claims.0).ok().and_then(NonZeroU32::new);
        number.map(|claims| Ticket(Some(claims))).ok_or_else(|| {
            invalid(
                "a ticket's claims",
                claims.0,
                "from 1 to 4294967295, or None",
            )
        })
    }
}

#[pymethods]
impl Ticket {
    /// How many claims it is good for; None for any number, until the producer drops the block.
    #[getter]
    fn claims(&self) -> Option<u32> {
        self.0.map(NonZeroU32::get)
    }

    fn __repr__(&self) -> String {
        self.0
            .map_or("<gpu_ipc.Ticket, any number of claims>".into(), |n| {
                format!("<gpu_ipc.Ticket, {n} claims>")
            })
    }
}

/// Reads the recipient of a grant: a participant's number or what has one as its `id`, a ticket, or
/// `None` for one claim by anybody.
pub(crate) fn to(object: Option<&Bound<'_, PyAny>>) -> PyResult<To> {
    let Some(object) = object else {
        return Ok(To::Ticket(Claims::Once));
    };
    if let Ok(id) = object.cast::<ParticipantId>() {
        return Ok(To::Participant(gpu_ipc::ParticipantId(id.get().0)));
    }
    if let Ok(ticket) = object.cast::<Ticket>() {
        return Ok(To::Ticket(match ticket.get().0 {
            None => Claims::Unlimited,
            Some(claims) if claims.get() == 1 => Claims::Once,
            Some(claims) => Claims::Times(claims),
        }));
    }
    let neither = || {
        let must = "a ParticipantId, a Participant, a Ticket, or None for one claim by anybody";
        invalid("the addressee", object.get_type(), must)
    };
    match object.getattr("id") {
        Ok(id) => id
            .cast::<ParticipantId>()
            .map(|id| to(Some(id)))
            .unwrap_or_else(|_| Err(neither())),
        Err(error) if error.is_instance_of::<PyAttributeError>(object.py()) => Err(neither()),
        // A participant that is closed.
        Err(error) => Err(error),
    }
}
