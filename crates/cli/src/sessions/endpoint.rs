//! The metrics of a broker over HTTP, from its own process.
//!
//! A thread of its own asks the broker as any client does, so what it says is what clients see: a
//! broker that hangs is one that does not answer. It holds a bounded number of connections for a
//! bounded time, and asks once a second at most, however often it is asked.

// Tests: `crates/cli/tests/metrics.rs`.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{sleep, timeout};

use super::broker_metrics::of_broker;
use super::brokers::{Depth, look};
use super::open_metrics;
use crate::device::explain;

/// Connections at a time; the kernel holds what comes besides.
const CONNECTIONS: usize = 16;
/// How long one may take, with whatever its client does.
const TAKES: Duration = Duration::from_secs(5);
/// How long the broker has for its answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long an answer is good.
const FRESH: Duration = Duration::from_secs(1);
/// How long to wait before a port or a connection is asked for again.
const AGAIN: Duration = Duration::from_secs(1);
/// The most bytes of a request's head.
const MOST_HEAD: usize = 16 << 10;

/// Serves the metrics of a directory's broker at an address, on a thread of its own, until the
/// process ends. A port that is taken is asked for again: the broker serves without its metrics.
///
/// # Errors
///
/// When no thread can be started.
pub fn start(address: SocketAddr, dir: PathBuf) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .thread_name("gpu-ipc-look")
        .build()
        .map_err(|error| format!("the metrics cannot be served: {error}"))?;
    let run = move || {
        runtime.block_on(serve(
            address,
            Arc::new(Asked {
                dir,
                last: Mutex::default(),
            }),
        ))
    };
    let started = thread::start("gpu-ipc-metrics", run);
    started.map(drop).map_err(|error| explain(&error))
}

/// The broker, and what it answered last.
struct Asked {
    dir: PathBuf,
    last: Mutex<Option<(Instant, Bytes)>>,
}

async fn serve(address: SocketAddr, asked: Arc<Asked>) {
    let listener = listen(address).await;
    let seats = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(seat) = seats.clone().acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a client of the metrics cannot be accepted");
                sleep(AGAIN).await;
                continue;
            }
        };
        let asked = asked.clone();
        tokio::spawn(async move {
            let _seat = seat;
            let answer = service_fn(|request| answer(asked.clone(), request));
            let mut http = http1::Builder::new();
            let http = http.keep_alive(false).max_buf_size(MOST_HEAD);
            // A client that breaks off, is slow or talks nonsense is served no longer.
            let _ = timeout(TAKES, http.serve_connection(TokioIo::new(stream), answer)).await;
        });
    }
}

async fn listen(address: SocketAddr) -> TcpListener {
    let mut is_told = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                match listener.local_addr() {
                    Ok(address) => tracing::info!(%address, "metrics are served"),
                    Err(error) => {
                        tracing::warn!(%error, "metrics are served at an unknown address")
                    }
                }
                return listener;
            }
            Err(error) if !is_told => {
                is_told = true;
                tracing::error!(%address, %error, "metrics are not served; the address is tried every second");
            }
            Err(_) => {}
        }
        sleep(AGAIN).await;
    }
}

async fn answer(
    asked: Arc<Asked>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let with = |status, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return Ok(with(StatusCode::NOT_FOUND, "the metrics are at /metrics\n"));
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = with(StatusCode::METHOD_NOT_ALLOWED, "");
        let allowed = hyper::header::HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return Ok(response);
    }
    let mut response = Response::new(Full::new(asked.text().await));
    let kind = hyper::header::HeaderValue::from_static(open_metrics::CONTENT_TYPE);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

impl Asked {
    async fn text(&self) -> Bytes {
        let mut last = self.last.lock().await;
        if let Some((at, text)) = &*last
            && at.elapsed() < FRESH
        {
            return text.clone();
        }
        let dir = self.dir.clone();
        let text = tokio::task::spawn_blocking(move || text(&dir)).await;
        let text = Bytes::from(text.unwrap_or_else(|_| open_metrics::text([])));
        *last = Some((Instant::now(), text.clone()));
        text
    }
}

fn text(dir: &Path) -> String {
    let seen = look(Some(dir), Depth::Sums, PATIENCE);
    open_metrics::text(seen.iter().flat_map(of_broker))
}
