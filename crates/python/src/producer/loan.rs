//! Loans, as Python holds them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_ipc::Error;
use gpu_ipc::session::Released;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::session::{bytes_of, options};
use super::shared::{Lent, Shared};
use super::sharing::with_access;
use crate::data::addressee;
use crate::data::descriptor::{Descriptor, Tail};
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
    /// None once it is released.
    state: Mutex<Option<Lending>>,
    end: Released,
    layout: Layout,
    read_only: bool,
    session: Arc<Shared>,
}

#[derive(Clone)]
struct Lending {
    loan: Arc<gpu_ipc::session::Loan>,
    /// The block that it lies in, if it is one of the session's.
    _block: Option<Lent>,
}

impl Loan {
    pub fn new(
        loan: gpu_ipc::session::Loan,
        block: Option<Lent>,
        layout: Layout,
        read_only: bool,
        session: &Arc<Shared>,
    ) -> Loan {
        let end = loan.released();
        let lending = Lending {
            loan: Arc::new(loan),
            _block: block,
        };
        Loan {
            state: Mutex::new(Some(lending)),
            end,
            layout,
            read_only,
            session: session.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Lending>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lending(&self) -> PyResult<Option<Lending>> {
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
        self.lock().is_none()
    }

    /// How many leases of the loan are granted or held, and tickets of a number of claims that can
    /// still be claimed; None once it is released.
    #[getter]
    fn outstanding(&self) -> PyResult<Option<usize>> {
        let lending = self.lending()?;
        Ok(lending.map(|lending| lending.loan.block().outstanding()))
    }

    /// Share the array, and return the descriptor by which it is claimed.
    ///
    /// Args:
    ///     to: as for ``Session.share``.
    ///     ttl: seconds that the grant stays claimable, 0 for ever. None as the session's; for a broadcast as long as
    ///         the loan.
    ///     meta: bytes of your own that travel in the descriptor.
    ///     read_only: whether it arrives to be read only; None as it was lent.
    ///
    /// Raises:
    ///     Invalid: the loan was released.
    ///     ParticipantGone: the addressee is not connected.
    #[pyo3(signature = (to=None, *, ttl=None, meta=None, read_only=None))]
    fn share(
        &self,
        py: Python<'_>,
        to: Option<&Bound<'_, PyAny>>,
        ttl: Option<f64>,
        meta: Option<&Bound<'_, PyAny>>,
        read_only: Option<bool>,
    ) -> PyResult<Descriptor> {
        let _call = Call::begin(py);
        let meta = meta.map(bytes_of).transpose()?.unwrap_or_default();
        let to = addressee::to(to)?;
        let options = with_access(&options(ttl)?, read_only.unwrap_or(self.read_only));
        let Some(lending) = self.lending()? else {
            return Err(invalid(
                "a loan",
                "released",
                "one that was not released: lend the array again",
            ));
        };
        let tail = Tail::of(&self.layout, &meta);
        let options = options.user(*tail.user());
        let grant = py.detach(|| {
            let grant = lending.loan.share_with(to, &options);
            // A release meanwhile leaves the end to this call.
            drop(lending);
            grant
        });
        Ok(Descriptor::new(
            &grant.or_raise()?,
            self.layout.clone(),
            &tail,
        ))
    }

    /// End the loan: it is shared no more, its broadcasts end, and what they granted and nobody has
    /// claimed is taken back. What is held stays good for its holders. Waits for nobody.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.session.guard.check("this loan").or_raise()?;
        let lent = self.lock().take();
        py.detach(|| drop(lent));
        Ok(())
    }

    /// Wait until the loan is released, by this thread or another, and nothing holds the array by it,
    /// so that it can be written again.
    ///
    /// Args:
    ///     timeout: seconds; None waits for ever.
    ///
    /// Raises:
    ///     Timeout: it is lent, or some still hold it.
    #[pyo3(signature = (timeout=None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.session.guard.check("this loan").or_raise()?;
        let waited = in_slices(py, duration(timeout)?, |slice| {
            match self.end.wait(Some(slice)) {
                Err(Error::Deadline { .. }) => None,
                done => Some(done),
            }
        });
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
