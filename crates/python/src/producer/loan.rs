//! Loans, as Python holds them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_ipc::Error;
use gpu_ipc::session::Released;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::session::{bytes_of, options};
use super::shared::{Lent, Shared};
use crate::data::addressee;
use crate::data::descriptor::Descriptor;
use crate::data::layout::Layout;
use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::later::Call;
use crate::interpreter::waiting::{duration, in_slices};

/// An array that is lent: share it any number of times, with any addressee, until it is released.
///
/// Made by ``Session.lend``. A broadcast, ``loan.share(session.ticket(None))``, can be claimed as
/// long as the loan lasts, by each participant as often as it likes. The memory is kept until the
/// loan is released and the last lease on it has ended. Dropping the loan releases it.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Loan {
    state: Mutex<State>,
    layout: Layout,
    session: Arc<Shared>,
}

#[derive(Clone)]
enum State {
    Lent {
        loan: Arc<gpu_ipc::session::Loan>,
        /// The block that it lies in, if it is one of the session's.
        _block: Option<Lent>,
    },
    Released(Arc<Released>),
}

impl Loan {
    pub fn new(
        loan: gpu_ipc::session::Loan,
        block: Option<Lent>,
        layout: Layout,
        session: &Arc<Shared>,
    ) -> Loan {
        let state = State::Lent {
            loan: Arc::new(loan),
            _block: block,
        };
        Loan {
            state: Mutex::new(state),
            layout,
            session: session.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> PyResult<State> {
        self.session.guard.check("this loan").or_raise()?;
        Ok(self.lock().clone())
    }
}

#[pymethods]
impl Loan {
    /// The bytes of the array.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.layout.nbytes().unwrap_or(0)
    }

    /// Whether the loan was released.
    #[getter]
    fn released(&self) -> bool {
        matches!(*self.lock(), State::Released(_))
    }

    /// How many leases of the loan are granted or held, and tickets of a number of claims that can
    /// still be claimed; None once it is released.
    #[getter]
    fn outstanding(&self) -> PyResult<Option<usize>> {
        Ok(match self.state()? {
            State::Lent { loan, .. } => Some(loan.block().outstanding()),
            State::Released(_) => None,
        })
    }

    /// Share the array, and return the descriptor by which it is claimed.
    ///
    /// Args:
    ///     to: as for ``Session.share``.
    ///     ttl: seconds that the grant stays claimable, 0 for ever. None as the session's; for a broadcast as long as
    ///         the loan.
    ///     meta: bytes of your own that travel in the descriptor.
    ///
    /// Raises:
    ///     Invalid: the loan was released.
    ///     ParticipantGone: the addressee is not connected.
    #[pyo3(signature = (to=None, *, ttl=None, meta=None))]
    fn share(
        &self,
        py: Python<'_>,
        to: Option<&Bound<'_, PyAny>>,
        ttl: Option<f64>,
        meta: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Descriptor> {
        let _call = Call::begin(py);
        let meta = meta.map(bytes_of).transpose()?.unwrap_or_default();
        let (to, options) = (addressee::to(to)?, options(ttl)?);
        let State::Lent { loan, .. } = self.state()? else {
            return Err(invalid(
                "a loan",
                "released",
                "one that was not released: lend the array again",
            ));
        };
        let grant = py.detach(|| {
            let grant = loan.share_with(to, &options);
            // A release meanwhile leaves the end to this call.
            drop(loan);
            grant
        });
        Ok(Descriptor::new(
            &grant.or_raise()?,
            self.layout.clone(),
            &meta,
        ))
    }

    /// End the loan: it is shared no more, its broadcasts end, and what they granted and nobody has
    /// claimed is taken back. What is held stays good for its holders. Waits for nobody.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.session.guard.check("this loan").or_raise()?;
        let mut state = self.lock();
        let State::Lent { loan, .. } = &*state else {
            return Ok(());
        };
        let released = State::Released(Arc::new(loan.released()));
        let lent = std::mem::replace(&mut *state, released);
        drop(state);
        py.detach(|| drop(lent));
        Ok(())
    }

    /// Wait until nobody holds the array by this loan, so that it can be written again. Release the
    /// loan first, or others may claim it again.
    ///
    /// Args:
    ///     timeout: seconds; None waits for ever.
    ///
    /// Raises:
    ///     Timeout: some still hold it.
    #[pyo3(signature = (timeout=None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let state = self.state()?;
        let waited = in_slices(py, duration(timeout)?, |slice| {
            let waited = match &state {
                State::Lent { loan, .. } => loan.block().wait_released(Some(slice)),
                State::Released(released) => released.wait(Some(slice)),
            };
            match waited {
                Err(Error::Deadline { .. }) => None,
                done => Some(done),
            }
        });
        py.detach(|| drop(state));
        let late = Err(Error::Deadline {
            what: "the holders of a loan",
        });
        waited?.unwrap_or(late).or_raise()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        let released = if self.released() { ", released" } else { "" };
        format!("<gpu_ipc.Loan {} bytes{released}>", self.nbytes())
    }
}
