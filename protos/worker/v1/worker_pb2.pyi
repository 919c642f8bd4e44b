from protos.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTED: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_LOADED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_FAILED: _ClassVar[WorkerState]

class RowFlag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_FLAG_UNSPECIFIED: _ClassVar[RowFlag]
    ROW_FLAG_NOT_FINITE: _ClassVar[RowFlag]
    ROW_FLAG_GRAMMAR: _ClassVar[RowFlag]
    ROW_FLAG_GRAMMAR_LIMIT: _ClassVar[RowFlag]
    ROW_FLAG_MASK_BUDGET: _ClassVar[RowFlag]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTED: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_LOADED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_FAILED: WorkerState
ROW_FLAG_UNSPECIFIED: RowFlag
ROW_FLAG_NOT_FINITE: RowFlag
ROW_FLAG_GRAMMAR: RowFlag
ROW_FLAG_GRAMMAR_LIMIT: RowFlag
ROW_FLAG_MASK_BUDGET: RowFlag

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("identity", "state", "limits", "device", "backend", "epoch")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.PeerIdentity
    state: WorkerState
    limits: _common_pb2.ModelLimits
    device: str
    backend: str
    epoch: int
    def __init__(self, identity: _Optional[_Union[_common_pb2.PeerIdentity, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., limits: _Optional[_Union[_common_pb2.ModelLimits, _Mapping]] = ..., device: _Optional[str] = ..., backend: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("stage", "fraction", "loaded")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    stage: str
    fraction: float
    loaded: _common_pb2.ModelLimits
    def __init__(self, stage: _Optional[str] = ..., fraction: _Optional[float] = ..., loaded: _Optional[_Union[_common_pb2.ModelLimits, _Mapping]] = ...) -> None: ...

class ProfileCacheRequest(_message.Message):
    __slots__ = ("max_num_batched_tokens", "max_num_seqs")
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    max_num_batched_tokens: int
    max_num_seqs: int
    def __init__(self, max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ...) -> None: ...

class ProfileCacheResponse(_message.Message):
    __slots__ = ("num_gpu_blocks", "num_cpu_blocks", "block_size", "block_bytes", "total_bytes", "utilization", "weight_bytes", "peak_activation_bytes", "swap_space_bytes", "readable", "max_model_len")
    NUM_GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_SPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READABLE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int
    block_bytes: int
    total_bytes: int
    utilization: float
    weight_bytes: int
    peak_activation_bytes: int
    swap_space_bytes: int
    readable: str
    max_model_len: int
    def __init__(self, num_gpu_blocks: _Optional[int] = ..., num_cpu_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., utilization: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., peak_activation_bytes: _Optional[int] = ..., swap_space_bytes: _Optional[int] = ..., readable: _Optional[str] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class AllocateCacheRequest(_message.Message):
    __slots__ = ("num_gpu_blocks", "num_cpu_blocks")
    NUM_GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_gpu_blocks: int
    num_cpu_blocks: int
    def __init__(self, num_gpu_blocks: _Optional[int] = ..., num_cpu_blocks: _Optional[int] = ...) -> None: ...

class AllocateCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelBundleRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class GetModelBundleResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class ModelBundle(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "special_tokens", "generation_config_json", "limits", "tool_use_template")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TOOL_USE_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    generation_config_json: str
    limits: _common_pb2.ModelLimits
    tool_use_template: str
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., generation_config_json: _Optional[str] = ..., limits: _Optional[_Union[_common_pb2.ModelLimits, _Mapping]] = ..., tool_use_template: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter_id", "path")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    adapter_id: int
    path: str
    def __init__(self, adapter_id: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("num_bytes", "rank")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    rank: int
    def __init__(self, num_bytes: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("adapter_id",)
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    adapter_id: int
    def __init__(self, adapter_id: _Optional[int] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("epoch", "boot_id", "block_ids", "layout", "shared_file", "nonce")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FILE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    boot_id: str
    block_ids: bytes
    layout: str
    shared_file: str
    nonce: bytes
    def __init__(self, epoch: _Optional[int] = ..., boot_id: _Optional[str] = ..., block_ids: _Optional[bytes] = ..., layout: _Optional[str] = ..., shared_file: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ReadBlocksResponse(_message.Message):
    __slots__ = ("data", "is_shared")
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_SHARED_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    is_shared: bool
    def __init__(self, data: _Optional[bytes] = ..., is_shared: bool = ...) -> None: ...

class FetchBlocksRequest(_message.Message):
    __slots__ = ("epoch", "image", "num_before", "source", "source_epoch", "source_boot_id", "block_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_BEFORE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    image: str
    num_before: int
    source: str
    source_epoch: int
    source_boot_id: str
    block_ids: bytes
    def __init__(self, epoch: _Optional[int] = ..., image: _Optional[str] = ..., num_before: _Optional[int] = ..., source: _Optional[str] = ..., source_epoch: _Optional[int] = ..., source_boot_id: _Optional[str] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class FetchBlocksResponse(_message.Message):
    __slots__ = ("num_bytes", "is_shared")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_SHARED_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    is_shared: bool
    def __init__(self, num_bytes: _Optional[int] = ..., is_shared: bool = ...) -> None: ...

class DropImageRequest(_message.Message):
    __slots__ = ("epoch", "image")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    image: str
    def __init__(self, epoch: _Optional[int] = ..., image: _Optional[str] = ...) -> None: ...

class DropImageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PlacedImage(_message.Message):
    __slots__ = ("image", "blocks")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    image: str
    blocks: bytes
    def __init__(self, image: _Optional[str] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class RunHello(_message.Message):
    __slots__ = ("identity", "epoch", "worker_boot_id", "last_step_id", "force")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.PeerIdentity
    epoch: int
    worker_boot_id: str
    last_step_id: int
    force: bool
    def __init__(self, identity: _Optional[_Union[_common_pb2.PeerIdentity, _Mapping]] = ..., epoch: _Optional[int] = ..., worker_boot_id: _Optional[str] = ..., last_step_id: _Optional[int] = ..., force: bool = ...) -> None: ...

class RunWelcome(_message.Message):
    __slots__ = ("identity", "epoch", "resumed", "model_digest")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.PeerIdentity
    epoch: int
    resumed: bool
    model_digest: str
    def __init__(self, identity: _Optional[_Union[_common_pb2.PeerIdentity, _Mapping]] = ..., epoch: _Optional[int] = ..., resumed: bool = ..., model_digest: _Optional[str] = ...) -> None: ...

class SchedulerOutputs(_message.Message):
    __slots__ = ("hello", "step_id", "epoch", "num_decode_steps", "trace", "added", "changed", "removed_rows", "blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy", "scheduler_step", "goodbye", "grant", "revocation", "placed", "states_to_read", "states_to_keep")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TO_SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TO_SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TO_COPY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_STEP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    STATES_TO_READ_FIELD_NUMBER: _ClassVar[int]
    STATES_TO_KEEP_FIELD_NUMBER: _ClassVar[int]
    hello: RunHello
    step_id: int
    epoch: int
    num_decode_steps: int
    trace: _common_pb2.TraceContext
    added: AddedRows
    changed: ChangedRows
    removed_rows: bytes
    blocks_to_swap_out: bytes
    blocks_to_swap_in: bytes
    blocks_to_copy: bytes
    scheduler_step: int
    goodbye: RunGoodbye
    grant: DecodeGrant
    revocation: GrantRevocation
    placed: _containers.RepeatedCompositeFieldContainer[PlacedImage]
    states_to_read: StateBlocks
    states_to_keep: StateBlocks
    def __init__(self, hello: _Optional[_Union[RunHello, _Mapping]] = ..., step_id: _Optional[int] = ..., epoch: _Optional[int] = ..., num_decode_steps: _Optional[int] = ..., trace: _Optional[_Union[_common_pb2.TraceContext, _Mapping]] = ..., added: _Optional[_Union[AddedRows, _Mapping]] = ..., changed: _Optional[_Union[ChangedRows, _Mapping]] = ..., removed_rows: _Optional[bytes] = ..., blocks_to_swap_out: _Optional[bytes] = ..., blocks_to_swap_in: _Optional[bytes] = ..., blocks_to_copy: _Optional[bytes] = ..., scheduler_step: _Optional[int] = ..., goodbye: _Optional[_Union[RunGoodbye, _Mapping]] = ..., grant: _Optional[_Union[DecodeGrant, _Mapping]] = ..., revocation: _Optional[_Union[GrantRevocation, _Mapping]] = ..., placed: _Optional[_Iterable[_Union[PlacedImage, _Mapping]]] = ..., states_to_read: _Optional[_Union[StateBlocks, _Mapping]] = ..., states_to_keep: _Optional[_Union[StateBlocks, _Mapping]] = ...) -> None: ...

class StateBlocks(_message.Message):
    __slots__ = ("rows", "num_tokens", "block_ids")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    num_tokens: bytes
    block_ids: bytes
    def __init__(self, rows: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class DecodeGrant(_message.Message):
    __slots__ = ("num_steps", "stop_token_ids")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    stop_token_ids: bytes
    def __init__(self, num_steps: _Optional[int] = ..., stop_token_ids: _Optional[bytes] = ...) -> None: ...

class GrantRevocation(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunGoodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddedRows(_message.Message):
    __slots__ = ("rows", "incarnations", "num_known_tokens", "token_ids", "num_prompt_tokens", "num_computed_tokens", "num_tokens", "num_blocks", "block_ids", "temperatures", "top_ps", "top_ks", "seeds", "sequence_indexes", "logprobs", "names", "traces", "options")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    TOP_PS_FIELD_NUMBER: _ClassVar[int]
    TOP_KS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    incarnations: bytes
    num_known_tokens: bytes
    token_ids: bytes
    num_prompt_tokens: bytes
    num_computed_tokens: bytes
    num_tokens: bytes
    num_blocks: bytes
    block_ids: bytes
    temperatures: bytes
    top_ps: bytes
    top_ks: bytes
    seeds: bytes
    sequence_indexes: bytes
    logprobs: bytes
    names: _containers.RepeatedScalarFieldContainer[str]
    traces: _containers.RepeatedCompositeFieldContainer[_common_pb2.TraceContext]
    options: _containers.RepeatedCompositeFieldContainer[RowOptions]
    def __init__(self, rows: _Optional[bytes] = ..., incarnations: _Optional[bytes] = ..., num_known_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., temperatures: _Optional[bytes] = ..., top_ps: _Optional[bytes] = ..., top_ks: _Optional[bytes] = ..., seeds: _Optional[bytes] = ..., sequence_indexes: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., names: _Optional[_Iterable[str]] = ..., traces: _Optional[_Iterable[_Union[_common_pb2.TraceContext, _Mapping]]] = ..., options: _Optional[_Iterable[_Union[RowOptions, _Mapping]]] = ...) -> None: ...

class RowOptions(_message.Message):
    __slots__ = ("at", "sampling", "min_tokens", "min_tokens_ids", "num_children", "num_candidates", "adapter_id", "task")
    AT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    at: int
    sampling: _common_pb2.ResolvedSampling
    min_tokens: int
    min_tokens_ids: bytes
    num_children: int
    num_candidates: int
    adapter_id: int
    task: _common_pb2.Task
    def __init__(self, at: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.ResolvedSampling, _Mapping]] = ..., min_tokens: _Optional[int] = ..., min_tokens_ids: _Optional[bytes] = ..., num_children: _Optional[int] = ..., num_candidates: _Optional[int] = ..., adapter_id: _Optional[int] = ..., task: _Optional[_Union[_common_pb2.Task, str]] = ...) -> None: ...

class ChangedRows(_message.Message):
    __slots__ = ("rows", "incarnations", "num_tokens", "num_new_blocks", "new_block_ids", "num_new_tokens", "new_token_ids", "num_draft_tokens")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    incarnations: bytes
    num_tokens: bytes
    num_new_blocks: bytes
    new_block_ids: bytes
    num_new_tokens: bytes
    new_token_ids: bytes
    num_draft_tokens: bytes
    def __init__(self, rows: _Optional[bytes] = ..., incarnations: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_new_blocks: _Optional[bytes] = ..., new_block_ids: _Optional[bytes] = ..., num_new_tokens: _Optional[bytes] = ..., new_token_ids: _Optional[bytes] = ..., num_draft_tokens: _Optional[bytes] = ...) -> None: ...

class WorkerOutputs(_message.Message):
    __slots__ = ("welcome", "step_id", "epoch", "rows", "incarnations", "num_tokens", "token_ids", "logprobs", "flags", "num_computed_tokens", "timings", "candidates", "tops", "prompt_logprobs", "embeddings", "mask_rows", "mask_incarnations", "mask_us", "mask_budget_ms", "continues", "error")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TOPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    MASK_ROWS_FIELD_NUMBER: _ClassVar[int]
    MASK_INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    MASK_US_FIELD_NUMBER: _ClassVar[int]
    MASK_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    welcome: RunWelcome
    step_id: int
    epoch: int
    rows: bytes
    incarnations: bytes
    num_tokens: bytes
    token_ids: bytes
    logprobs: bytes
    flags: bytes
    num_computed_tokens: int
    timings: StepTimings
    candidates: CandidateColumns
    tops: TopColumns
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    embeddings: _containers.RepeatedCompositeFieldContainer[RowEmbedding]
    mask_rows: bytes
    mask_incarnations: bytes
    mask_us: bytes
    mask_budget_ms: float
    continues: bool
    error: _common_pb2.ErrorStatus
    def __init__(self, welcome: _Optional[_Union[RunWelcome, _Mapping]] = ..., step_id: _Optional[int] = ..., epoch: _Optional[int] = ..., rows: _Optional[bytes] = ..., incarnations: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., candidates: _Optional[_Union[CandidateColumns, _Mapping]] = ..., tops: _Optional[_Union[TopColumns, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., embeddings: _Optional[_Iterable[_Union[RowEmbedding, _Mapping]]] = ..., mask_rows: _Optional[bytes] = ..., mask_incarnations: _Optional[bytes] = ..., mask_us: _Optional[bytes] = ..., mask_budget_ms: _Optional[float] = ..., continues: bool = ..., error: _Optional[_Union[_common_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class CandidateColumns(_message.Message):
    __slots__ = ("rows", "incarnations", "counts", "token_ids", "logprobs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    incarnations: bytes
    counts: bytes
    token_ids: bytes
    logprobs: bytes
    def __init__(self, rows: _Optional[bytes] = ..., incarnations: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class TopColumns(_message.Message):
    __slots__ = ("counts", "token_ids", "logprobs")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    counts: bytes
    token_ids: bytes
    logprobs: bytes
    def __init__(self, counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("row", "incarnation", "start", "logprobs", "num_top", "top_token_ids", "top_logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    incarnation: int
    start: int
    logprobs: bytes
    num_top: int
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, row: _Optional[int] = ..., incarnation: _Optional[int] = ..., start: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., num_top: _Optional[int] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class RowEmbedding(_message.Message):
    __slots__ = ("row", "incarnation", "values")
    ROW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    row: int
    incarnation: int
    values: bytes
    def __init__(self, row: _Optional[int] = ..., incarnation: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queued_ns", "cache_ns", "prepare_ns", "model_ns", "sample_ns", "started_ns", "mask_ns")
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_NS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    MASK_NS_FIELD_NUMBER: _ClassVar[int]
    queued_ns: int
    cache_ns: int
    prepare_ns: int
    model_ns: int
    sample_ns: int
    started_ns: int
    mask_ns: int
    def __init__(self, queued_ns: _Optional[int] = ..., cache_ns: _Optional[int] = ..., prepare_ns: _Optional[int] = ..., model_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., started_ns: _Optional[int] = ..., mask_ns: _Optional[int] = ...) -> None: ...
