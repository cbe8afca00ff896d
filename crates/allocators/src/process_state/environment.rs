//! Options from the environment, under the names that people set for TensorFlow and PyTorch.

use std::sync::Arc;

use gpu_api::{Error, Result};

use super::{AllocatorKind, MemoryLimit, ProcessOptions};
use crate::bfc::Divisions;
use crate::{Guard, NanFill, Tracking};

const MIB: u64 = 1 << 20;

/// Keys that the frameworks know and that have no counterpart here, since what they tune is not
/// there.
const TENSORFLOW_ONLY: [&str; 2] = [
    "TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC",
    "TF_GPU_HOST_MEM_PREALLOCATE",
];
const PYTORCH_ONLY: [&str; 12] = [
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
];

impl ProcessOptions {
    /// Reads what people set for the frameworks, over these options.
    ///
    /// | variable | sets |
    /// |---|---|
    /// | `TF_FORCE_GPU_ALLOW_GROWTH` | [`growth`](ProcessOptions::growth): `true` grows, `false` takes everything at once |
    /// | `TF_GPU_HOST_MEM_LIMIT_IN_MB` | [`pinned_limit`](ProcessOptions::pinned_limit) |
    /// | `TF_CPU_ALLOCATOR_USE_BFC` | best fit for plain host memory, or a pool |
    /// | `TF_CPU_BFC_MEM_LIMIT_IN_MB` | [`cpu_limit`](ProcessOptions::cpu_limit) |
    /// | `TF_DEVICE_MIN_SYS_MEMORY_IN_MB` | [`MemoryLimit::AllBut`] |
    /// | `TF_PER_DEVICE_MEMORY_LIMIT_MB` | [`MemoryLimit::Bytes`], before the reserve; 0 is none |
    /// | `TF_ENABLE_GPU_GARBAGE_COLLECTION` | [`collect_regions`](ProcessOptions::collect_regions) |
    /// | `TF_FORCE_UNIFIED_MEMORY` | [`managed`](ProcessOptions::managed) |
    /// | `TF_GPU_ALLOCATOR` | `cuda_malloc`: each request is the driver's; `cuda_malloc_async`: the driver's pool; `memory_guard`: marks and NaNs |
    /// | `TF_BFC_MEMORY_DUMP` | [`memory_dump`](ProcessOptions::memory_dump) |
    /// | `PYTORCH_CUDA_ALLOC_CONF`, `PYTORCH_HIP_ALLOC_CONF`, `PYTORCH_ALLOC_CONF` | `expandable_segments`, `max_split_size_mb`, `garbage_collection_threshold`, `roundup_power2_divisions`, `per_process_memory_fraction`, `backend` |
    /// | `GPU_IPC_TRACK_ALLOCATIONS` | `1`: every allocator is wrapped in [`Tracking`] |
    ///
    /// Keys of the frameworks' that have no counterpart here are logged.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a value that cannot be read, and for a key of PyTorch's that PyTorch
    /// does not know either.
    pub fn from_env() -> Result<ProcessOptions> {
        ProcessOptions::from_vars(|name| std::env::var(name).ok())
    }

    /// Reads the same from any place, such as a configuration.
    ///
    /// # Errors
    ///
    /// As [`from_env`](ProcessOptions::from_env).
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<ProcessOptions> {
        let mut options = ProcessOptions::default();
        let megabytes =
            |name: &'static str| var(name).map(|value| number(name, &value)).transpose();
        options.growth = options
            .growth
            .overridden(var("TF_FORCE_GPU_ALLOW_GROWTH").as_deref());
        if let Some(limit) = megabytes("TF_GPU_HOST_MEM_LIMIT_IN_MB")? {
            options.pinned_limit = limit.saturating_mul(MIB);
        }
        if let Some(limit) = megabytes("TF_CPU_BFC_MEM_LIMIT_IN_MB")? {
            options.cpu_limit = limit.saturating_mul(MIB);
        }
        if let Some(reserve) = megabytes("TF_DEVICE_MIN_SYS_MEMORY_IN_MB")? {
            options.limit = MemoryLimit::AllBut(reserve.saturating_mul(MIB));
        }
        if let Some(limit) = megabytes("TF_PER_DEVICE_MEMORY_LIMIT_MB")?.filter(|&limit| limit > 0)
        {
            options.limit = MemoryLimit::Bytes(limit.saturating_mul(MIB));
        }
        if let Some(value) = var("TF_ENABLE_GPU_GARBAGE_COLLECTION") {
            options.collect_regions = switch("TF_ENABLE_GPU_GARBAGE_COLLECTION", &value)?;
        }
        if let Some(value) = var("TF_FORCE_UNIFIED_MEMORY") {
            options.managed = switch("TF_FORCE_UNIFIED_MEMORY", &value)?;
        }
        if let Some(value) = var("TF_CPU_ALLOCATOR_USE_BFC") {
            let is_best_fit = switch("TF_CPU_ALLOCATOR_USE_BFC", &value)?;
            options.cpu_kind = if is_best_fit {
                AllocatorKind::BestFit
            } else {
                AllocatorKind::Pool
            };
        }
        options.memory_dump = var("TF_BFC_MEMORY_DUMP")
            .filter(|prefix| !prefix.is_empty())
            .map(Into::into);
        for name in [
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_HIP_ALLOC_CONF",
            "PYTORCH_CUDA_ALLOC_CONF",
        ] {
            if let Some(value) = var(name) {
                options.pytorch(name, &value)?;
            }
        }
        match var("TF_GPU_ALLOCATOR").as_deref() {
            None | Some("") => {}
            Some("cuda_malloc") => options.device_kind = AllocatorKind::Direct,
            Some("cuda_malloc_async") => options.device_kind = AllocatorKind::Driver,
            Some("memory_guard") => {
                options = options.wrap(|_, inner| Ok(Arc::new(NanFill::new(Guard::new(inner)?)?)));
            }
            Some(other) => {
                return Err(invalid(
                    "TF_GPU_ALLOCATOR",
                    other,
                    "empty, `cuda_malloc`, `cuda_malloc_async` or `memory_guard`",
                ));
            }
        }
        if let Some(value) = var("GPU_IPC_TRACK_ALLOCATIONS")
            && switch("GPU_IPC_TRACK_ALLOCATIONS", &value)?
        {
            let beneath = options.wrap.take();
            options = options.wrap(move |key, inner| {
                let inner = match &beneath {
                    Some(wrap) => wrap(key, inner)?,
                    None => inner,
                };
                Ok(Arc::new(Tracking::new(inner)))
            });
        }
        for name in TENSORFLOW_ONLY
            .into_iter()
            .filter(|name| var(name).is_some())
        {
            tracing::warn!(
                name,
                "this variable has no counterpart here and does nothing"
            );
        }
        Ok(options)
    }

    /// Reads `key:value,key:value`.
    fn pytorch(&mut self, name: &'static str, conf: &str) -> Result<()> {
        // A list of divisions has commas of its own: [256:1,512:2,>:4].
        let mut rest = conf.trim();
        while !rest.is_empty() {
            let Some((key, after)) = rest.split_once(':') else {
                return Err(invalid(
                    name,
                    rest,
                    "a list of `key:value`, with commas between",
                ));
            };
            let end = match after.strip_prefix('[') {
                Some(_) => after.find(']').map_or(after.len(), |at| at + 1),
                None => after.find(',').unwrap_or(after.len()),
            };
            self.pytorch_key(name, key.trim(), after[..end].trim())?;
            rest = after[end..].trim_start_matches(',').trim();
        }
        Ok(())
    }

    fn pytorch_key(&mut self, name: &'static str, key: &str, value: &str) -> Result<()> {
        match key {
            "expandable_segments" => self.grows_in_place = switch(name, value)?,
            "max_split_size_mb" => self.max_split = Some(number(name, value)?.saturating_mul(MIB)),
            "garbage_collection_threshold" => self.collect_from = Some(share(name, value)?),
            "per_process_memory_fraction" => {
                self.limit = MemoryLimit::Fraction(share(name, value)?)
            }
            "roundup_power2_divisions" => {
                let must =
                    "a power of two, or a list of such by sizes, for `roundup_power2_divisions`";
                self.round_up_divisions =
                    Some(Divisions::parse(value).map_err(|_| invalid(name, value, must))?);
            }
            "backend" if value == "native" => {}
            "backend" if matches!(value, "cudaMallocAsync" | "hipMallocAsync") => {
                self.device_kind = AllocatorKind::Driver;
            }
            "backend" => {
                return Err(invalid(
                    name,
                    value,
                    "`native` or `cudaMallocAsync` for `backend`",
                ));
            }
            _ if PYTORCH_ONLY.contains(&key) => {
                tracing::warn!(
                    name,
                    key,
                    "this key has no counterpart here and does nothing"
                );
            }
            _ => {
                return Err(invalid(
                    name,
                    key,
                    "a key of PyTorch's, such as `expandable_segments` or `max_split_size_mb`",
                ));
            }
        }
        Ok(())
    }
}

fn invalid(what: &'static str, got: &str, must: &'static str) -> Error {
    Error::invalid(what, format!("`{got}`"), must)
}

fn number(name: &'static str, value: &str) -> Result<u64> {
    value
        .trim()
        .parse()
        .map_err(|_| invalid(name, value, "a whole number of megabytes"))
}

fn share(name: &'static str, value: &str) -> Result<f64> {
    let share = value
        .trim()
        .parse()
        .ok()
        .filter(|&share: &f64| share > 0.0 && share <= 1.0);
    share.ok_or_else(|| invalid(name, value, "a part above 0 and up to 1"))
}

fn switch(name: &'static str, value: &str) -> Result<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(invalid(name, value, "`true`, `false`, `1` or `0`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Growth;

    fn of(vars: &[(&str, &str)]) -> Result<ProcessOptions> {
        ProcessOptions::from_vars(|name| {
            vars.iter()
                .find(|(var, _)| *var == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn names_of_tensorflow_do_what_they_do_there() {
        let options = of(&[
            ("TF_FORCE_GPU_ALLOW_GROWTH", "false"),
            ("TF_GPU_HOST_MEM_LIMIT_IN_MB", "256"),
            ("TF_CPU_ALLOCATOR_USE_BFC", "1"),
            ("TF_CPU_BFC_MEM_LIMIT_IN_MB", "512"),
            ("TF_DEVICE_MIN_SYS_MEMORY_IN_MB", "100"),
            ("TF_GPU_ALLOCATOR", "cuda_malloc_async"),
            ("TF_FORCE_UNIFIED_MEMORY", "true"),
            ("TF_BFC_MEMORY_DUMP", "/tmp/dump"),
            ("TF_ENABLE_GPU_GARBAGE_COLLECTION", "false"),
            ("TF_GPU_HOST_MEM_PREALLOCATE", "true"),
        ])
        .expect("they are all known");
        assert_eq!(
            (options.growth, options.pinned_growth),
            (Growth::Whole, Growth::DEFAULT)
        );
        assert_eq!(
            (options.pinned_limit, options.cpu_limit),
            (256 * MIB, 512 * MIB)
        );
        assert_eq!(
            (options.cpu_kind, options.device_kind),
            (AllocatorKind::BestFit, AllocatorKind::Driver)
        );
        assert!(options.managed && !options.collect_regions);
        assert_eq!(options.limit, MemoryLimit::AllBut(100 * MIB));
        assert_eq!(options.memory_dump.as_deref(), Some("/tmp/dump".as_ref()));
        assert!(
            of(&[("TF_GPU_ALLOCATOR", "memory_guard")])
                .expect("known")
                .wrap
                .is_some()
        );
        assert!(
            of(&[("GPU_IPC_TRACK_ALLOCATIONS", "1")])
                .expect("known")
                .wrap
                .is_some()
        );
        let limit = |megabytes| {
            of(&[("TF_PER_DEVICE_MEMORY_LIMIT_MB", megabytes)])
                .expect("known")
                .limit
        };
        assert_eq!(
            (limit("1024"), limit("0")),
            (MemoryLimit::Bytes(1024 * MIB), MemoryLimit::Most)
        );
        let unset = of(&[]).expect("nothing is set");
        assert_eq!(
            (unset.growth, unset.collect_regions),
            (Growth::DEFAULT, true)
        );
    }

    #[test]
    fn keys_of_pytorch_with_a_counterpart_are_read() {
        let conf = "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,\
                    roundup_power2_divisions:4,pinned_use_cuda_host_register:True,\
                    pinned_use_background_threads:True";
        let options = of(&[("PYTORCH_CUDA_ALLOC_CONF", conf)]).expect("they are all known");
        assert!(options.grows_in_place);
        assert_eq!(
            (options.max_split, options.collect_from),
            (Some(128 * MIB), Some(0.8))
        );
        assert_eq!(options.round_up_divisions, Divisions::all(4).ok());
        let listed = "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:64";
        let options = of(&[("PYTORCH_ALLOC_CONF", listed)]).expect("the list is known");
        assert_eq!(
            options.round_up_divisions,
            Divisions::parse("[256:1,512:2,>:4]").ok()
        );
        assert_eq!(options.max_split, Some(64 * MIB));
        let options = of(&[("PYTORCH_HIP_ALLOC_CONF", "backend:hipMallocAsync")]).expect("known");
        assert_eq!(options.device_kind, AllocatorKind::Driver);
    }

    #[test]
    fn what_nobody_knows_is_named() {
        for (name, value, part) in [
            (
                "PYTORCH_CUDA_ALLOC_CONF",
                "max_split_size:128",
                "`max_split_size`",
            ),
            (
                "PYTORCH_CUDA_ALLOC_CONF",
                "max_split_size_mb",
                "`key:value`",
            ),
            (
                "PYTORCH_CUDA_ALLOC_CONF",
                "garbage_collection_threshold:2",
                "`2`",
            ),
            (
                "PYTORCH_CUDA_ALLOC_CONF",
                "roundup_power2_divisions:3",
                "a power of two",
            ),
            ("PYTORCH_CUDA_ALLOC_CONF", "backend:other", "`native`"),
            ("TF_GPU_ALLOCATOR", "malloc", "`malloc`"),
            ("TF_GPU_HOST_MEM_LIMIT_IN_MB", "1 GB", "a whole number"),
            ("TF_CPU_ALLOCATOR_USE_BFC", "maybe", "`maybe`"),
        ] {
            let text = of(&[(name, value)])
                .expect_err("nobody knows it")
                .to_string();
            assert!(text.contains(part) && text.contains(name), "{text}");
        }
    }
}
