"""vLLM 0.6 to 0.33: its command, metrics, errors and limits."""

from pathlib import Path
from types import MappingProxyType

from tuner.adapters import EngineAdapter, LiveLimitsFile, live_limits

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_STARTUP_PLAN": "0",
    "PROMETHEUS_MULTIPROC_DIR": None,
    "VLLM_API_KEY": None,
    "VLLM_PORT": None,
    "NO_COLOR": "1",
    "VLLM_LOGGING_COLOR": "0",
    "PYTHONUNBUFFERED": "1",
}
"""Developer mode has /server_info and the cache reset. PROMETHEUS_MULTIPROC_DIR would mix the metrics of two
launches, and Kubernetes sets VLLM_PORT for a service that is named vllm."""


def _named(*names: str) -> tuple[str, ...]:
    return tuple(f"vllm:{name}" for name in names)


def _histogram(key: str, *names: str) -> dict[str, tuple[str, ...]]:
    ends = ("seconds_sum", "seconds_count")
    return {f"{key}_{end}": _named(*(f"{name}_{end}" for name in names)) for end in ends}


METRICS = {
    "running": _named("num_requests_running"),
    "waiting": _named("num_requests_waiting"),
    "swapped": _named("num_requests_swapped"),
    "kv_usage": _named("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "preemptions": _named("num_preemptions_total"),
    "prompt_tokens": _named("prompt_tokens_total"),
    "generation_tokens": _named("generation_tokens_total"),
    "iterations": _named("iteration_tokens_total_count"),
    "iteration_tokens": _named("iteration_tokens_total_sum"),
    "prefix_queries": _named(
        "prefix_cache_queries_total", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_queries"
    ),
    "prefix_hits": _named("prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_hits"),
    "prefix_hit_rate_gauge": _named("gpu_prefix_cache_hit_rate"),
    "external_prefix_queries": _named("external_prefix_cache_queries_total"),
    "external_prefix_hits": _named("external_prefix_cache_hits_total"),
    "prompt_tokens_cached": _named("prompt_tokens_cached_total"),
    "finished": _named("request_success_total"),
    "rejected": _named("admission_rejections_total"),
    "spec_drafted": _named("spec_decode_num_draft_tokens_total"),
    "spec_accepted": _named("spec_decode_num_accepted_tokens_total"),
    "offload_load_bytes": _named("kv_offload_load_bytes_total"),
    "offload_store_bytes": _named("kv_offload_store_bytes_total"),
    "offload_bytes": _named("kv_offload_total_bytes_total"),
    **_histogram("ttft", "time_to_first_token"),
    **_histogram("itl", "inter_token_latency", "time_per_output_token"),
    **_histogram("tpot", "request_time_per_output_token"),
    **_histogram("e2e", "e2e_request_latency"),
    **_histogram("queue", "request_queue_time"),
    **_histogram("prefill", "request_prefill_time"),
    **_histogram("decode", "request_decode_time"),
}

FAILURES = {
    "model_missing": (
        r"HFValidationError|LocalEntryNotFoundError|RepositoryNotFoundError|RevisionNotFoundError"
        r"|OfflineModeIsEnabled|is not a valid model identifier|Can't load the (configuration|model) (of|for)"
        r"|No such file or directory: .*config\.json|does not appear to have a file named"
        r"|couldn't connect to 'https?://|Invalid repository ID or local directory|Repo id must be"
        r"|is not a local folder and"
    ),
    "model_gated": (
        r"gated repo|GatedRepoError|Access to model .* is restricted|40[13] Client Error"
        r"|Invalid (user )?(credentials|token)|accept the (licen[cs]e|conditions|terms)"
    ),
    "remote_code": (
        r"trust_remote_code=True|--trust-remote-code|contains custom code which must be executed"
        r"|requires you to execute (the|custom)"
    ),
    "model_unknown": (
        r"does not recognize this architecture|[Mm]odel architectures? .* (is|are) not supported"
        r"|has no vLLM implementation|Model architectures .* failed to be inspected"
        r"|The model type .* is not supported|does not support (text )?generation|Unrecognized model in"
        r"|This model does not support the .* (task|runner)"
    ),
    "weights": (
        r"SafetensorError|[Ee]rror while deserializing header|HeaderTooLarge|MetadataIncompleteBuffer"
        r"|[Cc]annot find any model weights|no file named .*(safetensors|pytorch_model)"
        r"|following weights were not initialized|no module or parameter named"
        r"|PytorchStreamReader failed|invalid load key|UnpicklingError|size mismatch for \w"
        r"|Attempted to load weight .* into parameter|start \(.*\) \+ length \(.*\) exceeds dimension"
    ),
    "tokenizer": (
        r"Can't load tokenizer|[Ff]ailed to load the tokenizer"
        r"|Couldn't instantiate the backend tokenizer"
        r"|Tokenizer class \S+ does not exist"
    ),
    "driver": (
        r"NVIDIA driver on your system is too old|driver version is insufficient"
        r"|unsupported display driver|[Dd]river/library version mismatch|forward compatibility was attempted"
        r"|(initialize|load) NVML|NVML Shared Library Not Found|[Ff]ound no NVIDIA driver"
        r"|No (CUDA|HIP) GPUs are available|cudaGetDeviceCount|CUDA unknown error|system not yet initialized"
        r"|NVMLError|unsupported toolchain|provided PTX was compiled with"
    ),
    "image": (
        r"no kernel image is available|libcuda\.so|cannot open shared object file|undefined symbol"
        r"|version .?GLIBC|Failed to infer device type|exec format error|not compiled with CUDA enabled"
        r"|Unable to find image|manifest (for .* not found|unknown)|pull access denied"
        r"|invalid reference format"
        r"|could not select device driver|[Nn]o such image|OCI runtime|executable file not found"
        r"|failed to pull|toomanyrequests"
    ),
    "interpreter": (r"No module named '?(vllm|torch)\b|can't open file .*\.py"),
    "package": (r"No module named|ModuleNotFoundError|cannot import name"),
    "dtype": (
        r"[Bb]float16 is only supported on GPUs|dtype .* is not supported"
        r"|is not supported for quantization method|Supported dtypes: "
    ),
    "quantization": (
        r"quantization method .* is not supported|is not supported for the current GPU"
        r"|Unknown quantization method|Quantization method specified in the model config"
        r"|requires .* to be installed .*quant|input size per partition|output size per partition"
    ),
    "capability": (r"compute capability|[Mm]inimum capability"),
    "parallel": (
        r"divisible by (the )?(tensor|pipeline|number of|tp_size|decode)"
        r"|number of (required|available) GPUs|World size .* is larger than|not enough GPUs"
        r"|placement group .* (cannot|exceeds)"
    ),
    "bad_flag": (r"\berror: (unrecognized arguments:|ambiguous option|argument -\S+: |the following arg)"),
    "port_in_use": (r"\[Errno (98|48)\].*[Aa]ddress already in use|ZMQError: Address already in use"),
    "gpu_busy": (
        r"Free memory on device .*is less than desired GPU memory utilization"
        r"|is less than the engine's budget after excluding"
    ),
    "profiling_race": (r"Error in memory profiling"),
    "no_kv_memory": (r"No available memory for the cache blocks"),
    "max_len_gt_kv": (
        r"To serve at least one request with the models?'?s? max seq len"
        r"|max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in KV cache"
    ),
    "max_len_gt_model": (r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len"),
    "mamba_blocks": (r"max_num_seqs \(\d+\) exceeds (the )?available Mamba cache blocks"),
    "oom_warmup": (r"out of memory occurred when warming up (sampler|pooler) with"),
    "oom": (r"OutOfMemoryError|(CUDA|HIP) ([Ee]rror: )?out of memory|desired CPU memory utilization"),
    "shm_full": (r"Insufficient space in /dev/shm|No space left on device.*(/dev/shm|psm_)"),
    "disk_full": (r"No space left on device"),
    "block_size": (r"No common block size for|block_size not supported"),
    "attention_backend": (
        r"No valid attention backend found|Selected backend .* is not valid for this configuration"
    ),
    "nccl": (r"NCCL error|DistBackendError|ncclUnhandledCudaError|ProcessGroupNCCL.*(timeout|abort)"),
    "compile_cache": (
        r"failed to get the hash of the compiled graph|corrupted compilation artifact"
        r"|Expected tensors only, but got"
    ),
    "v0_fallback": (r"Falling back to V0|is not supported by the V1 Engine|VLLM_USE_V1=1 is not supported"),
    "init_timeout": (r"Timed out waiting for engine core processes to start|did not complete startup within"),
    "config_invalid": (
        r"validation errors? for \w*Config|must be greater than or equal to max_num_seqs"
        r"|is smaller than max_model_len|Concurrent Partial Prefill is not supported"
        r"|Not enough allowed NUMA nodes"
    ),
    "hang": (r"No available shared memory broadcast block found|RPC call to \w+ timed out"),
    "engine_dead": (
        r"EngineDeadError|EngineCore encountered (an issue|a fatal error)"
        r"|MQLLMEngine is already dead|WorkerProc initialization failed|Worker failed with error"
        r"|Engine core initialization failed|EngineCore failed to start|Engine process failed to start"
    ),
}

BLOCK_SIZES = {
    "FLASHINFER": (16, 32, 64),
    "FLASHMLA": (64,),
    "CUTLASS_MLA": (128,),
    "FLASHINFER_MLA": (32, 64),
    "ROCM_AITER_FA": (16, 32),
    "TURBOQUANT": (16, 32, 64, 128),
    "HPC_ATTN": (64,),
}
"""From vllm/v1/attention/backends of 0.32."""

ADAPTER = EngineAdapter(
    kind="vllm",
    title="vLLM {version}",
    command=("-m", "vllm.entrypoints.openai.api_server"),
    releases=True,
    environment=MappingProxyType(ENVIRONMENT),
    metrics=MappingProxyType(METRICS),
    config_metric="vllm:cache_config_info",
    failures=MappingProxyType(FAILURES),
    compile_cache=MappingProxyType({"VLLM_CACHE_ROOT": "", "TORCHINDUCTOR_CACHE_DIR": "torchinductor"}),
    live_limits=LiveLimitsFile(
        file=Path(live_limits.__file__),
        argv=("--scheduler-cls", "live_limits.LiveLimits"),
        knobs=live_limits.NAMES,
    ),
    block_sizes=MappingProxyType(BLOCK_SIZES),
    block_multiples=MappingProxyType({"CPU_ATTN": 32, "": 16}),
    graph_tokens=512,
)
