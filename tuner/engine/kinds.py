"""The ways in which a launch ends: whose fault each is, how often it is tried again, what can mend it."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["infeasible", "aborted", "study"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to end. `rank` orders causes: 0 a root cause, 1 general, 3 points further up, 4 context.

    `knobs` are those that can mend it: where a study turns none of them, every candidate ends so.
    `by_candidate`: a candidate may have brought it about where another one served. `warned`: the engine
    writes it as a warning or for information.
    """

    outcome: Outcome
    retries: int
    sentence: str
    pattern: str = ""
    rank: int = 0
    knobs: tuple[str, ...] = ()
    by_candidate: bool = False
    warned: bool = False


_MEMORY = (
    "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens",
    "max_model_len", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "cpu_offload_gb",
    "quantization", "dtype", "enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
    "num_gpu_blocks_override", "speculative_config",
)  # fmt: skip


STUDY_KINDS: dict[str, Kind] = {
    "model_missing": Kind(
        outcome="study",
        retries=0,
        sentence="the model cannot be found",
        pattern=r"HFValidationError|LocalEntryNotFoundError|RepositoryNotFoundError|RevisionNotFoundError"
        r"|OfflineModeIsEnabled|is not a valid model identifier|Can't load the (configuration|model) (of|for)"
        r"|No such file or directory: .*config\.json|does not appear to have a file named"
        r"|couldn't connect to 'https?://|Invalid repository ID or local directory|Repo id must be"
        r"|is not a local folder and",
    ),
    "model_gated": Kind(
        outcome="study",
        retries=0,
        sentence="the model may not be read: accept its licence, or give HF_TOKEN in engine.env",
        pattern=r"gated repo|GatedRepoError|Access to model .* is restricted|40[13] Client Error"
        r"|Invalid (user )?(credentials|token)|accept the (licen[cs]e|conditions|terms)",
    ),
    "remote_code": Kind(
        outcome="study",
        retries=0,
        sentence="the model brings code of its own, which is not trusted (engine.args: trust-remote-code)",
        pattern=r"trust_remote_code=True|--trust-remote-code|contains custom code which must be executed"
        r"|requires you to execute (the|custom)",
    ),
    "model_unknown": Kind(
        outcome="study",
        retries=0,
        sentence="this engine does not know the model's architecture",
        pattern=r"does not recognize this architecture|[Mm]odel architectures? .* (is|are) not supported"
        r"|has no vLLM implementation|Model architectures .* failed to be inspected"
        r"|The model type .* is not supported|does not support (text )?generation|Unrecognized model in"
        r"|This model does not support the .* (task|runner)",
    ),
    "weights": Kind(
        outcome="study",
        retries=0,
        sentence="the model's weights cannot be loaded",
        pattern=r"SafetensorError|[Ee]rror while deserializing header|HeaderTooLarge|MetadataIncompleteBuffer"
        r"|[Cc]annot find any model weights|no file named .*(safetensors|pytorch_model)"
        r"|following weights were not initialized|no module or parameter named"
        r"|PytorchStreamReader failed|invalid load key|UnpicklingError|size mismatch for \w"
        r"|Attempted to load weight .* into parameter|start \(.*\) \+ length \(.*\) exceeds dimension",
        knobs=("load_format", "quantization"),
        by_candidate=True,
    ),
    "tokenizer": Kind(
        outcome="study",
        retries=0,
        sentence="the model's tokenizer cannot be loaded",
        pattern=r"Can't load tokenizer|[Ff]ailed to load the tokenizer"
        r"|Couldn't instantiate the backend tokenizer"
        r"|Tokenizer class \S+ does not exist",
        knobs=("tokenizer_mode",),
    ),
    "driver": Kind(
        outcome="study",
        retries=0,
        sentence="the GPU's driver does not serve this engine",
        pattern=r"NVIDIA driver on your system is too old|driver version is insufficient"
        r"|unsupported display driver|[Dd]river/library version mismatch|forward compatibility was attempted"
        r"|(initialize|load) NVML|NVML Shared Library Not Found|[Ff]ound no NVIDIA driver"
        r"|No (CUDA|HIP) GPUs are available|cudaGetDeviceCount|CUDA unknown error|system not yet initialized"
        r"|NVMLError|unsupported toolchain|provided PTX was compiled with",
    ),
    "image": Kind(
        outcome="study",
        retries=0,
        sentence="this build of the engine does not run on this machine",
        pattern=r"no kernel image is available|libcuda\.so|cannot open shared object file|undefined symbol"
        r"|version .?GLIBC|Failed to infer device type|exec format error|not compiled with CUDA enabled"
        r"|Unable to find image|manifest (for .* not found|unknown)|pull access denied"
        r"|invalid reference format"
        r"|could not select device driver|[Nn]o such image|OCI runtime|executable file not found"
        r"|failed to pull|toomanyrequests",
        by_candidate=True,
    ),
    "interpreter": Kind(
        outcome="study",
        retries=0,
        sentence="the interpreter has no vLLM that can be imported",
        pattern=r"No module named '?(vllm|torch)\b|can't open file .*\.py",
    ),
    "package": Kind(
        outcome="study",
        retries=0,
        sentence="the engine lacks a Python package",
        pattern=r"No module named|ModuleNotFoundError|cannot import name",
        knobs=("attention_backend", "kv_offloading_backend", "kv_transfer_config", "moe_backend",
               "linear_backend", "quantization", "speculative_config", "load_format"),
        by_candidate=True,
    ),
    "dtype": Kind(
        outcome="study",
        retries=0,
        sentence="the card or the model does not take this number format",
        pattern=r"[Bb]float16 is only supported on GPUs|dtype .* is not supported"
        r"|is not supported for quantization method|Supported dtypes: ",
        knobs=("dtype",),
        by_candidate=True,
    ),
    "quantization": Kind(
        outcome="study",
        retries=0,
        sentence="the quantization does not fit the card or the model",
        pattern=r"quantization method .* is not supported|is not supported for the current GPU"
        r"|Unknown quantization method|Quantization method specified in the model config"
        r"|requires .* to be installed .*quant|input size per partition|output size per partition",
        knobs=("quantization", "tensor_parallel_size", "dtype"),
        by_candidate=True,
    ),
    "capability": Kind(
        outcome="study",
        retries=0,
        sentence="the card is too old for what is asked",
        pattern=r"compute capability|[Mm]inimum capability",
        knobs=("dtype", "quantization", "kv_cache_dtype", "attention_backend"),
        by_candidate=True,
    ),
    "parallel": Kind(
        outcome="study",
        retries=0,
        sentence="the model or the node does not divide as asked",
        pattern=r"divisible by (the )?(tensor|pipeline|number of|tp_size|decode)"
        r"|number of (required|available) GPUs|World size .* is larger than|not enough GPUs"
        r"|placement group .* (cannot|exceeds)",
        knobs=("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
               "decode_context_parallel_size"),
        by_candidate=True,
    ),
}  # fmt: skip
"""Faults of model, weights, driver and build: they are looked for in the root cause alone, and first."""

KINDS: dict[str, Kind] = {
    **STUDY_KINDS,
    "bad_flag": Kind(
        outcome="study",
        retries=0,
        sentence="the engine refused an argument",
        pattern=r"\berror: (unrecognized arguments:|ambiguous option|argument -\S+: |the following arg)",
    ),
    "port_in_use": Kind(
        outcome="aborted",
        retries=2,
        sentence="the port was taken by another process",
        pattern=r"\[Errno (98|48)\].*[Aa]ddress already in use|ZMQError: Address already in use",
    ),
    "gpu_busy": Kind(
        outcome="aborted",
        retries=2,
        sentence="another process held GPU memory",
        pattern=r"Free memory on device .*is less than desired GPU memory utilization"
        r"|is less than the engine's budget after excluding",
    ),
    "profiling_race": Kind(
        outcome="aborted",
        retries=2,
        sentence="GPU memory changed hands while the engine measured it",
        pattern=r"Error in memory profiling",
    ),
    "no_kv_memory": Kind(
        outcome="infeasible",
        retries=0,
        sentence="no memory left for the KV cache",
        pattern=r"No available memory for the cache blocks",
        knobs=_MEMORY,
    ),
    "max_len_gt_kv": Kind(
        outcome="infeasible",
        retries=0,
        sentence="the KV cache is too small for one request of the maximum length",
        pattern=r"To serve at least one request with the models?'?s? max seq len"
        r"|max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in KV cache",
        knobs=_MEMORY,
    ),
    "max_len_gt_model": Kind(
        outcome="study",
        retries=0,
        sentence="max-model-len is larger than the model allows",
        pattern=r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len",
        knobs=("max_model_len",),
    ),
    "mamba_blocks": Kind(
        outcome="infeasible",
        retries=0,
        sentence="max_num_seqs is larger than the number of Mamba cache blocks",
        pattern=r"max_num_seqs \(\d+\) exceeds (the )?available Mamba cache blocks",
        knobs=_MEMORY,
    ),
    "oom_warmup": Kind(
        outcome="infeasible",
        retries=0,
        sentence="out of GPU memory while warming up; a lower max_num_seqs may fit",
        pattern=r"out of memory occurred when warming up (sampler|pooler) with",
        knobs=_MEMORY,
    ),
    "oom": Kind(
        outcome="infeasible",
        retries=0,
        sentence="out of memory",
        pattern=r"OutOfMemoryError|(CUDA|HIP) ([Ee]rror: )?out of memory|desired CPU memory utilization",
        knobs=_MEMORY,
    ),
    "shm_full": Kind(
        outcome="aborted",
        retries=2,
        sentence="shared memory (/dev/shm) is full",
        pattern=r"Insufficient space in /dev/shm|No space left on device.*(/dev/shm|psm_)",
    ),
    "disk_full": Kind(
        outcome="aborted", retries=2, sentence="the disk is full", pattern=r"No space left on device"
    ),
    "block_size": Kind(
        outcome="infeasible",
        retries=0,
        sentence="the attention backend refuses the block size",
        pattern=r"No common block size for|block_size not supported",
        knobs=("block_size", "attention_backend", "kv_cache_dtype"),
    ),
    "attention_backend": Kind(
        outcome="infeasible",
        retries=0,
        sentence="no attention backend takes this configuration",
        pattern=r"No valid attention backend found|Selected backend .* is not valid for this configuration",
        knobs=("attention_backend", "block_size", "kv_cache_dtype", "dtype"),
    ),
    "nccl": Kind(
        outcome="aborted",
        retries=2,
        sentence="communication between GPUs failed",
        pattern=r"NCCL error|DistBackendError|ncclUnhandledCudaError|ProcessGroupNCCL.*(timeout|abort)",
    ),
    "compile_cache": Kind(
        outcome="aborted",
        retries=1,
        sentence="the compile cache is damaged; it was wiped",
        pattern=r"failed to get the hash of the compiled graph|corrupted compilation artifact"
        r"|Expected tensors only, but got",
    ),
    "v0_fallback": Kind(
        outcome="infeasible",
        retries=0,
        sentence="the engine fell back to V0, which is another engine",
        pattern=r"Falling back to V0|is not supported by the V1 Engine|VLLM_USE_V1=1 is not supported",
        warned=True,
        knobs=("preemption", "preemption_mode"),
    ),
    "init_timeout": Kind(
        outcome="infeasible",
        retries=1,
        sentence="the engine was not ready within its deadline",
        pattern=r"Timed out waiting for engine core processes to start|did not complete startup within",
        rank=1,
    ),
    "config_invalid": Kind(
        outcome="infeasible",
        retries=0,
        sentence="the engine refused the configuration",
        pattern=r"validation errors? for \w*Config|must be greater than or equal to max_num_seqs"
        r"|is smaller than max_model_len|Concurrent Partial Prefill is not supported"
        r"|Not enough allowed NUMA nodes",
        rank=1,
    ),
    "hang": Kind(
        outcome="infeasible",
        retries=1,
        sentence="the engine's processes stopped answering each other",
        pattern=r"No available shared memory broadcast block found|RPC call to \w+ timed out",
        rank=4,
        warned=True,
    ),
    "engine_dead": Kind(
        outcome="infeasible",
        retries=1,
        sentence="the engine died",
        pattern=r"EngineDeadError|EngineCore encountered (an issue|a fatal error)"
        r"|MQLLMEngine is already dead|WorkerProc initialization failed|Worker failed with error"
        r"|Engine core initialization failed|EngineCore failed to start|Engine process failed to start",
        rank=3,
    ),
    "crashed": Kind(outcome="infeasible", retries=1, sentence="the engine ended without a known cause"),
    "refused": Kind(outcome="infeasible", retries=1, sentence="the engine answers with errors"),
    "host_oom": Kind(
        outcome="infeasible", retries=1, sentence="the kernel killed the engine: host memory is out"
    ),
    "killed": Kind(outcome="aborted", retries=2, sentence="the engine was killed from outside"),
    "frozen": Kind(
        outcome="infeasible", retries=1, sentence="the engine answers /health but computes nothing any more"
    ),
    "thrash": Kind(
        outcome="infeasible", retries=1, sentence="requests preempt each other and tokens stand still"
    ),
    "stale_server": Kind(outcome="aborted", retries=2, sentence="another server answers on our port"),
    "gpu_dirty": Kind(outcome="aborted", retries=2, sentence="GPU memory did not come back"),
    "foreign_use": Kind(outcome="aborted", retries=2, sentence="the GPU is in use by somebody else"),
    "hard_fault": Kind(outcome="aborted", retries=0, sentence="engine processes survive SIGKILL"),
    "kv_drift": Kind(outcome="aborted", retries=1, sentence="a first boot got less KV cache"),
}
