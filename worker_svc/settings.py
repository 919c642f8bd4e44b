"""Settings of a worker, validated, with errors that say what to do. All defaults are here."""

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from svc_common.errors import ConfigError, FieldViolation
from svc_common.net.tls_settings import PeerSettings

Quantization = Literal["none", "int8", "int4"]
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
DEFAULT_GROUP_PORT = 50063
_ADDRESS = re.compile(r".+:\d{1,5}")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def option_of(field: str) -> str:
    """The command-line option that sets `field`; options leave the unit out, since values carry it ("512MiB")."""
    return "--" + field.removesuffix("_bytes").removesuffix("_gib").replace("_", "-")


def _length(given: Any) -> Any:
    """`given` as a number of tokens, or "auto"; ValueError for anything else."""
    is_number = isinstance(given, int) or (isinstance(given, str) and given.isascii() and given.isdigit())
    if given == AUTO or (is_number and int(given) >= 1):
        return given if given == AUTO else int(given)
    raise ValueError(f"{given!r} is no length; write a number of tokens, at least 1, or auto")


AUTO: Final = "auto"
MaxModelLen = Annotated[int | Literal["auto"], BeforeValidator(_length)]


class ShellSettings(BaseModel):
    """Settings of every worker, real or simulated."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    block_size: Annotated[int, Field(ge=1, le=1_024)] = 16
    """Tokens per KV block."""
    owner_lease_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds for which a scheduler keeps ownership of the worker after its stream is lost."""
    step_span_interval: Annotated[int, Field(ge=1)] = 100
    """Record one `worker.step` span per this many steps when tracing is on; failed steps always have one."""
    peers: PeerSettings = PeerSettings()
    """TLS towards the scheduler, and the peers that may call."""
    max_adapters: Annotated[int, Field(ge=0)] = 16
    """Maximum number of adapters loaded at the same time."""

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The settings, or ConfigError naming each option that is wrong."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise _config_error(error) from None


def _config_error(error: ValidationError) -> ConfigError:
    violations = [
        FieldViolation(".".join(str(part) for part in item["loc"]), item["msg"].removeprefix("Value error, "))
        for item in error.errors()
    ]
    lines = [f"{option_of(v.field)}: {v.description}" for v in violations]
    return ConfigError("; ".join(lines), reason="INVALID_SETTING", violations=violations)


class WorkerSettings(ShellSettings):
    """A worker with a model."""

    model: Path
    """Checkpoint folder (config.json, tokenizer.json, *.safetensors), or a GGUF file."""
    served_model_name: str = ""
    """Name that requests use. Default: the folder's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype: float32, bfloat16, float16, or auto: chosen for the checkpoint and the device."""
    kv_cache_dtype: str = "auto"
    """Storage type of keys and values: float32, bfloat16, float16, int8, fp8 (E4M3), or auto: the compute dtype. int8 and
    fp8 have a scale for each token and kv head."""
    quantization: Quantization = "none"
    """Round the linear weights of an unquantized checkpoint when it is loaded: int8, int4, or none. CPU only."""
    quantization_group: Literal[32, 128] = 32
    """Weights that have a scale in common with --quantization: 32 or 128. Fewer are more accurate and take more memory."""
    max_model_len: MaxModelLen | None = None
    """Maximum length of prompt plus output: tokens, or auto: the checkpoint's limit, shortened to what the KV cache holds. Default:
    the checkpoint's limit."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for weights, the largest step and the KV cache, which gets what is left. CUDA only."""
    swap_space_gib: Annotated[float, Field(ge=0)] = 0.25
    """Host memory for swapped blocks: 512MiB, or a plain number of GiB."""
    num_gpu_blocks_override: Annotated[int, Field(ge=1)] | None = None
    """Number of KV blocks; overrides the profile run."""
    kv_cache_memory_bytes: Annotated[int, Field(ge=1)] | None = None
    """Memory of the KV cache: 512MiB, 2GiB or bytes. Default: on CPU 512MiB unless less is free, on CUDA by
    --gpu-memory-utilization."""
    cache_groups: bool = True
    """Block tables of their own for layers with a sliding window, so that blocks behind it are freed. Off: one table for all
    layers, for policies that know no other."""
    latent_cache: bool = True
    """Latent attention (MLA) keeps one narrow vector per token. Off: keys and values of all heads, for comparisons."""
    checkpoint_tokens: Annotated[int, Field(ge=0)] = 0
    """Of models with states: tokens between checkpoints, at which a cached prefix can end; a multiple of --block-size. 0: so many
    that a checkpoint takes as many blocks as the keys and values of these tokens."""
    backend: Literal["auto", "reference", "cpu", "cuda"] = "auto"
    """Kernels: auto, reference, cpu or cuda."""
    attention_backend: str = "auto"
    """Attention on a CUDA device: auto (Triton), flashinfer, flash-attn-3, torch (fresh prompts only), or one of another
    installed package. Recorded decode steps keep Triton's."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the first CUDA device, else the CPU, as also with --backend cpu, --quantization or
    --invariant."""
    invariant: bool | None = None
    """Bitwise equal logits for any batch, chunking and block placement. Default: on CPU yes, on CUDA no."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Compute threads on CPU. Default: OMP_NUM_THREADS, or the container's number of processors."""
    fuse: bool = True
    """Run the decoder as one program where its build is known, and on a GPU its decode steps as one launch each."""
    weight_cache: bool = True
    """Keep packed integers (of `quantization`, or of a quantized checkpoint) in a private folder, ~/.cache/quire/weights or
    QUIRE_CACHE_DIR/weights, which the next start maps; CPU only."""
    mask_budget_ms: Annotated[float, Field(gt=0)] = 10.0
    """CPU milliseconds that a grammar mask of one sequence may take on average; the first 100 may take 100 times that."""
    max_adapter_rank: Annotated[int, Field(ge=1)] = 256
    """Largest rank of an adapter."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes (ranks) that share each product of a worker; each loads a part of the weights. On CUDA each has a device."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages of a worker, each with a range of the model's layers and of --tensor-parallel ranks. CPU only."""
    draft_model: Path | None = None
    """Checkpoint of a small model with the same vocabulary, which proposes the draft tokens of policies with num_spec_tokens."""
    drafts: Annotated[Literal["auto", "ngram", "model", "mtp"], Field(validate_default=True)] = "auto"
    """What proposes draft tokens: ngram (the text so far), model (--draft-model), mtp (the checkpoint's own multi-token
    prediction head), or auto: the draft model if there is one, else n-grams. Tokens are the same with all."""
    rank: Annotated[int, Field(ge=0)] = 0
    """This process's number in the group of --tensor-parallel x --pipeline-parallel; 0 is the worker that schedulers know."""
    leader: Annotated[str, Field(validate_default=True)] = ""
    """HOST:PORT where rank 0 listens for the others (its --group-port); for ranks above 0."""
    group_port: Annotated[int, Field(ge=0, le=65_535)] = DEFAULT_GROUP_PORT
    """Port where rank 0 listens for the other ranks; 0 = any free one."""
    rank_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that a rank waits for another one within a step, before the group ends and is restarted. With several stages they
    must exceed the longest step."""

    @field_validator("rank")
    @classmethod
    def _rank_is_in_the_group(cls, value: int, others: ValidationInfo) -> int:
        tensor, stages = others.data.get("tensor_parallel", 1), others.data.get("pipeline_parallel", 1)
        if value >= tensor * stages:
            product = f" x --pipeline-parallel {stages}" if stages > 1 else ""
            raise ValueError(
                f"{value} is not below --tensor-parallel {tensor}{product}; ranks are 0 to {tensor * stages - 1}"
            )
        return value

    @field_validator("pipeline_parallel")
    @classmethod
    def _stages_read_safetensors(cls, value: int, others: ValidationInfo) -> int:
        model = others.data.get("model")
        if value > 1 and model is not None and model.suffix == ".gguf":
            raise ValueError(f"{value} excludes GGUF files, and --model is {model}; use a folder of safetensors")
        return value

    @field_validator("draft_model")
    @classmethod
    def _draft_model_exists(cls, value: Path | None) -> Path | None:
        if value is not None and not value.exists():
            raise ValueError(f"{value} does not exist; give the folder of a checkpoint")
        return value

    @field_validator("drafts")
    @classmethod
    def _drafts_are_possible(cls, value: str, others: ValidationInfo) -> str:
        given = others.data.get("draft_model")
        if (value == "model" and given is None) or (value in ("ngram", "mtp") and given is not None):
            what = "needs" if given is None else "excludes"
            raise ValueError(f"{value} {what} --draft-model")
        ranks = others.data.get("tensor_parallel", 1) * others.data.get("pipeline_parallel", 1)
        if ranks > 1 and (given is not None or value == "mtp"):
            raise ValueError(
                f"a worker of {ranks} ranks has no draft model and no MTP head: leave out --draft-model and --drafts, or "
                "--tensor-parallel and --pipeline-parallel"
            )
        return value

    @field_validator("leader")
    @classmethod
    def _leader_is_an_address(cls, value: str, others: ValidationInfo) -> str:
        rank = others.data.get("rank", 0)
        if rank and not _ADDRESS.fullmatch(value):
            raise ValueError(f"{value!r} is no address; rank {rank} needs HOST:PORT of rank 0's --group-port")
        return value

    @field_validator("model")
    @classmethod
    def _model_is_a_checkpoint(cls, value: Path) -> Path:
        if not value.is_dir() and not (value.is_file() and value.suffix == ".gguf"):
            kind = "is a file" if value.exists() else "does not exist"
            raise ValueError(
                f"{value} {kind}; give the folder of a checkpoint (config.json, tokenizer.json, *.safetensors) "
                "or a .gguf file"
            )
        return value

    @field_validator("kv_cache_dtype")
    @classmethod
    def _cache_dtype_is_served(cls, value: str) -> str:
        if value not in KV_CACHE_DTYPES:
            raise ValueError(f"{value!r} is not supported; use {', '.join(KV_CACHE_DTYPES)}")
        return value

    @field_validator("fuse")
    @classmethod
    def _quantized_weights_are_packed(cls, value: bool, others: ValidationInfo) -> bool:
        wanted = others.data.get("quantization", "none")
        if not value and wanted != "none":
            raise ValueError(f"off excludes --quantization {wanted}, which needs packed weights")
        return value

    @field_validator("checkpoint_tokens")
    @classmethod
    def _checkpoints_are_at_ends_of_blocks(cls, value: int, others: ValidationInfo) -> int:
        block_size = others.data.get("block_size", 1)
        if value % block_size:
            more = -(-value // block_size) * block_size
            raise ValueError(
                f"{value} is not a multiple of --block-size {block_size}; use {more}, or 0 for the default"
            )
        return value

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError(f"{value!r} is not a device; use auto, cpu, cuda or cuda:N")
        return value

    @property
    def proposer(self) -> Literal["ngram", "model", "mtp"]:
        """What proposes draft tokens."""
        if self.drafts != "auto":
            return self.drafts
        return "ngram" if self.draft_model is None else "model"

    @property
    def num_ranks(self) -> int:
        """Processes of the worker."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def bits(self) -> int:
        """Bits that `--quantization` rounds weights to; 0 = none."""
        return {"none": 0, "int8": 8, "int4": 4}[self.quantization]

    @property
    def name(self) -> str:
        """Name the model is served under."""
        return self.served_model_name or self.model.resolve().name.removesuffix(".gguf")
