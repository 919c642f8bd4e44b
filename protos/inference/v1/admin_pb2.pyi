from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("queues", "num_waiting", "num_waiting_tokens", "max_waiting", "max_waiting_tokens", "gpu", "cpu", "output_tokens_per_s", "starts_per_s", "draining", "serving", "tenants", "queued_work_s", "max_running", "adapters", "totals")
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STARTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_WORK_S_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    queues: Queues
    num_waiting: int
    num_waiting_tokens: int
    max_waiting: int
    max_waiting_tokens: int
    gpu: BlockPool
    cpu: BlockPool
    output_tokens_per_s: float
    starts_per_s: float
    draining: bool
    serving: bool
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLoad]
    queued_work_s: float
    max_running: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterLoad]
    totals: LoadTotals
    def __init__(self, queues: _Optional[_Union[Queues, _Mapping]] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., max_waiting: _Optional[int] = ..., max_waiting_tokens: _Optional[int] = ..., gpu: _Optional[_Union[BlockPool, _Mapping]] = ..., cpu: _Optional[_Union[BlockPool, _Mapping]] = ..., output_tokens_per_s: _Optional[float] = ..., starts_per_s: _Optional[float] = ..., draining: bool = ..., serving: bool = ..., tenants: _Optional[_Iterable[_Union[TenantLoad, _Mapping]]] = ..., queued_work_s: _Optional[float] = ..., max_running: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterLoad, _Mapping]]] = ..., totals: _Optional[_Union[LoadTotals, _Mapping]] = ...) -> None: ...

class LoadTotals(_message.Message):
    __slots__ = ("prefill_tokens", "output_tokens", "queried_tokens", "hit_tokens", "preemptions")
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens: int
    output_tokens: int
    queried_tokens: int
    hit_tokens: int
    preemptions: int
    def __init__(self, prefill_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class AdapterLoad(_message.Message):
    __slots__ = ("adapter", "num_waiting", "num_running")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    num_waiting: int
    num_running: int
    def __init__(self, adapter: _Optional[str] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ...) -> None: ...

class TenantLoad(_message.Message):
    __slots__ = ("tenant", "num_waiting", "num_running")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_waiting: int
    num_running: int
    def __init__(self, tenant: _Optional[str] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("max_requests",)
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    max_requests: int
    def __init__(self, max_requests: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "reasons", "step", "num_left_out")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    reasons: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    step: int
    num_left_out: int
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., reasons: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., step: _Optional[int] = ..., num_left_out: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("id", "request_id", "tenant", "queue", "reason", "numbers", "priority", "num_choices", "prompt_tokens", "output_tokens", "cached_prompt_tokens", "arrived_ns", "started_ns", "num_preemptions")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_NS_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    tenant: str
    queue: str
    reason: str
    numbers: _containers.RepeatedCompositeFieldContainer[Number]
    priority: int
    num_choices: int
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    arrived_ns: int
    started_ns: int
    num_preemptions: int
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., queue: _Optional[str] = ..., reason: _Optional[str] = ..., numbers: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., priority: _Optional[int] = ..., num_choices: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., arrived_ns: _Optional[int] = ..., started_ns: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("queue", "reason", "num_requests")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    reason: str
    num_requests: int
    def __init__(self, queue: _Optional[str] = ..., reason: _Optional[str] = ..., num_requests: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("address", "lane", "ready", "reason", "warming", "boot_id", "epoch", "model", "num_gpu_blocks", "num_cpu_blocks", "draining", "num_running", "num_swapped", "num_free_gpu_blocks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    address: str
    lane: int
    ready: bool
    reason: str
    warming: bool
    boot_id: str
    epoch: int
    model: str
    num_gpu_blocks: int
    num_cpu_blocks: int
    draining: bool
    num_running: int
    num_swapped: int
    num_free_gpu_blocks: int
    def __init__(self, address: _Optional[str] = ..., lane: _Optional[int] = ..., ready: bool = ..., reason: _Optional[str] = ..., warming: bool = ..., boot_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., num_gpu_blocks: _Optional[int] = ..., num_cpu_blocks: _Optional[int] = ..., draining: bool = ..., num_running: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_free_gpu_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("undo", "worker", "move")
    UNDO_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    undo: bool
    worker: str
    move: bool
    def __init__(self, undo: bool = ..., worker: _Optional[str] = ..., move: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "adapter_id", "path", "num_bytes", "rank", "num_requests", "unavailable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    adapter_id: int
    path: str
    num_bytes: int
    rank: int
    num_requests: int
    unavailable: str
    def __init__(self, name: _Optional[str] = ..., adapter_id: _Optional[int] = ..., path: _Optional[str] = ..., num_bytes: _Optional[int] = ..., rank: _Optional[int] = ..., num_requests: _Optional[int] = ..., unavailable: _Optional[str] = ...) -> None: ...

class DumpRecordingRequest(_message.Message):
    __slots__ = ("since_segment", "follow")
    SINCE_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    since_segment: int
    follow: bool
    def __init__(self, since_segment: _Optional[int] = ..., follow: bool = ...) -> None: ...

class DumpRecordingResponse(_message.Message):
    __slots__ = ("beginning", "data", "segment", "num_steps", "num_left")
    BEGINNING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    beginning: bytes
    data: bytes
    segment: int
    num_steps: int
    num_left: int
    def __init__(self, beginning: _Optional[bytes] = ..., data: _Optional[bytes] = ..., segment: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_left: _Optional[int] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, settings: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("from_step", "changes")
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    changes: _containers.RepeatedCompositeFieldContainer[PolicyChange]
    def __init__(self, from_step: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[PolicyChange, _Mapping]]] = ...) -> None: ...

class PolicyChange(_message.Message):
    __slots__ = ("key", "old_value", "new_value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OLD_VALUE_FIELD_NUMBER: _ClassVar[int]
    NEW_VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    old_value: str
    new_value: str
    def __init__(self, key: _Optional[str] = ..., old_value: _Optional[str] = ..., new_value: _Optional[str] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "needs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    needs: bool
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., needs: bool = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("id", "episodes", "num_waits_not_searched", "others")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITS_NOT_SEARCHED_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    num_waits_not_searched: int
    others: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ..., num_waits_not_searched: _Optional[int] = ..., others: _Optional[_Iterable[str]] = ...) -> None: ...

class Episode(_message.Message):
    __slots__ = ("from_step", "to_step", "from_ns", "to_ns", "queue", "reason", "numbers", "sample", "needs")
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    TO_STEP_FIELD_NUMBER: _ClassVar[int]
    FROM_NS_FIELD_NUMBER: _ClassVar[int]
    TO_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    to_step: int
    from_ns: int
    to_ns: int
    queue: str
    reason: str
    numbers: _containers.RepeatedCompositeFieldContainer[Number]
    sample: int
    needs: _containers.RepeatedCompositeFieldContainer[Number]
    def __init__(self, from_step: _Optional[int] = ..., to_step: _Optional[int] = ..., from_ns: _Optional[int] = ..., to_ns: _Optional[int] = ..., queue: _Optional[str] = ..., reason: _Optional[str] = ..., numbers: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., sample: _Optional[int] = ..., needs: _Optional[_Iterable[_Union[Number, _Mapping]]] = ...) -> None: ...

class Number(_message.Message):
    __slots__ = ("name", "integer", "real", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    integer: int
    real: float
    text: str
    def __init__(self, name: _Optional[str] = ..., integer: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class WatchSchedulerRequest(_message.Message):
    __slots__ = ("since_step", "follow", "tables", "state")
    SINCE_STEP_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    since_step: int
    follow: bool
    tables: bool
    state: bool
    def __init__(self, since_step: _Optional[int] = ..., follow: bool = ..., tables: bool = ..., state: bool = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "epoch", "lane", "policy", "scheduled", "swap_in", "swap_out", "copy", "preempted", "queues", "free", "sampled", "computed_tokens", "tables", "error", "duration_ns", "times", "state", "granted_steps", "is_repeat", "revoked")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_REPEAT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    lane: int
    policy: str
    scheduled: _containers.RepeatedCompositeFieldContainer[ScheduledGroup]
    swap_in: _containers.RepeatedCompositeFieldContainer[BlockPair]
    swap_out: _containers.RepeatedCompositeFieldContainer[BlockPair]
    copy: _containers.RepeatedCompositeFieldContainer[BlockPair]
    preempted: _containers.RepeatedCompositeFieldContainer[Preempted]
    queues: Queues
    free: FreeBlocks
    sampled: _containers.RepeatedCompositeFieldContainer[SampledTokens]
    computed_tokens: int
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    error: str
    duration_ns: int
    times: StepTimes
    state: StepState
    granted_steps: int
    is_repeat: bool
    revoked: str
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., lane: _Optional[int] = ..., policy: _Optional[str] = ..., scheduled: _Optional[_Iterable[_Union[ScheduledGroup, _Mapping]]] = ..., swap_in: _Optional[_Iterable[_Union[BlockPair, _Mapping]]] = ..., swap_out: _Optional[_Iterable[_Union[BlockPair, _Mapping]]] = ..., copy: _Optional[_Iterable[_Union[BlockPair, _Mapping]]] = ..., preempted: _Optional[_Iterable[_Union[Preempted, _Mapping]]] = ..., queues: _Optional[_Union[Queues, _Mapping]] = ..., free: _Optional[_Union[FreeBlocks, _Mapping]] = ..., sampled: _Optional[_Iterable[_Union[SampledTokens, _Mapping]]] = ..., computed_tokens: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., error: _Optional[str] = ..., duration_ns: _Optional[int] = ..., times: _Optional[_Union[StepTimes, _Mapping]] = ..., state: _Optional[_Union[StepState, _Mapping]] = ..., granted_steps: _Optional[int] = ..., is_repeat: bool = ..., revoked: _Optional[str] = ...) -> None: ...

class StepState(_message.Message):
    __slots__ = ("requests", "cached_blocks")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    requests: ListRequestsResponse
    cached_blocks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requests: _Optional[_Union[ListRequestsResponse, _Mapping]] = ..., cached_blocks: _Optional[_Iterable[str]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("planned_ns", "schedule_ns", "finished_ns", "started_ns", "cache_ns", "prepare_ns", "model_ns", "sample_ns", "queued_ns")
    PLANNED_NS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_NS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_NS_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_NS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    planned_ns: int
    schedule_ns: int
    finished_ns: int
    started_ns: int
    cache_ns: int
    prepare_ns: int
    model_ns: int
    sample_ns: int
    queued_ns: int
    def __init__(self, planned_ns: _Optional[int] = ..., schedule_ns: _Optional[int] = ..., finished_ns: _Optional[int] = ..., started_ns: _Optional[int] = ..., cache_ns: _Optional[int] = ..., prepare_ns: _Optional[int] = ..., model_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., queued_ns: _Optional[int] = ...) -> None: ...

class ScheduledGroup(_message.Message):
    __slots__ = ("id", "seqs", "tokens", "computed_before", "prefill")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEQS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    id: str
    seqs: _containers.RepeatedScalarFieldContainer[str]
    tokens: int
    computed_before: int
    prefill: bool
    def __init__(self, id: _Optional[str] = ..., seqs: _Optional[_Iterable[str]] = ..., tokens: _Optional[int] = ..., computed_before: _Optional[int] = ..., prefill: bool = ...) -> None: ...

class BlockPair(_message.Message):
    __slots__ = ("src", "dst")
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    src: int
    dst: int
    def __init__(self, src: _Optional[int] = ..., dst: _Optional[int] = ...) -> None: ...

class Preempted(_message.Message):
    __slots__ = ("id", "mode")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    id: str
    mode: str
    def __init__(self, id: _Optional[str] = ..., mode: _Optional[str] = ...) -> None: ...

class Queues(_message.Message):
    __slots__ = ("waiting", "running", "swapped")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    swapped: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., swapped: _Optional[int] = ...) -> None: ...

class FreeBlocks(_message.Message):
    __slots__ = ("gpu", "cpu")
    GPU_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    gpu: int
    cpu: int
    def __init__(self, gpu: _Optional[int] = ..., cpu: _Optional[int] = ...) -> None: ...

class SampledTokens(_message.Message):
    __slots__ = ("sequence", "tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("sequence", "blocks")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence: str
    blocks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence: _Optional[str] = ..., blocks: _Optional[_Iterable[str]] = ...) -> None: ...

class GetBlocksRequest(_message.Message):
    __slots__ = ("memory", "cached", "max_requests")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    memory: bool
    cached: bool
    max_requests: int
    def __init__(self, memory: bool = ..., cached: bool = ..., max_requests: _Optional[int] = ...) -> None: ...

class GetBlocksResponse(_message.Message):
    __slots__ = ("block_size", "gpu", "cpu", "tables", "refs", "step", "memory", "cached_blocks", "requests", "num_state_blocks")
    class RefsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    REFS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    gpu: BlockPool
    cpu: BlockPool
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    refs: _containers.ScalarMap[str, int]
    step: int
    memory: MemoryReport
    cached_blocks: _containers.RepeatedScalarFieldContainer[str]
    requests: ListRequestsResponse
    num_state_blocks: int
    def __init__(self, block_size: _Optional[int] = ..., gpu: _Optional[_Union[BlockPool, _Mapping]] = ..., cpu: _Optional[_Union[BlockPool, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., refs: _Optional[_Mapping[str, int]] = ..., step: _Optional[int] = ..., memory: _Optional[_Union[MemoryReport, _Mapping]] = ..., cached_blocks: _Optional[_Iterable[str]] = ..., requests: _Optional[_Union[ListRequestsResponse, _Mapping]] = ..., num_state_blocks: _Optional[int] = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("paged", "contiguous")
    PAGED_FIELD_NUMBER: _ClassVar[int]
    CONTIGUOUS_FIELD_NUMBER: _ClassVar[int]
    paged: PagedMemory
    contiguous: ContiguousMemory
    def __init__(self, paged: _Optional[_Union[PagedMemory, _Mapping]] = ..., contiguous: _Optional[_Union[ContiguousMemory, _Mapping]] = ...) -> None: ...

class PagedMemory(_message.Message):
    __slots__ = ("num_sequences", "num_tokens", "logical_blocks", "physical_blocks", "waste_tokens", "max_waste_tokens")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WASTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_WASTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    num_tokens: int
    logical_blocks: int
    physical_blocks: int
    waste_tokens: int
    max_waste_tokens: int
    def __init__(self, num_sequences: _Optional[int] = ..., num_tokens: _Optional[int] = ..., logical_blocks: _Optional[int] = ..., physical_blocks: _Optional[int] = ..., waste_tokens: _Optional[int] = ..., max_waste_tokens: _Optional[int] = ...) -> None: ...

class ContiguousMemory(_message.Message):
    __slots__ = ("used", "reserved", "internal", "external", "num_regions", "num_left_out")
    USED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    NUM_REGIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    used: int
    reserved: int
    internal: int
    external: int
    num_regions: int
    num_left_out: int
    def __init__(self, used: _Optional[int] = ..., reserved: _Optional[int] = ..., internal: _Optional[int] = ..., external: _Optional[int] = ..., num_regions: _Optional[int] = ..., num_left_out: _Optional[int] = ...) -> None: ...

class BlockPool(_message.Message):
    __slots__ = ("total", "free", "cached")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ...) -> None: ...
