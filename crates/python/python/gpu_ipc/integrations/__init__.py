"""Plugs for other projects, each imported only when it is asked for: `ray`, `lmcache`, `vllm` and `vllm_loader`."""
