from protos.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscribeKvEventsResponse(_message.Message):
    __slots__ = ("stored", "removed")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedCompositeFieldContainer[StoredBlock]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stored: _Optional[_Iterable[_Union[StoredBlock, _Mapping]]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class StoredBlock(_message.Message):
    __slots__ = ("block_hash", "parent_hash", "token_ids", "lora_id")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    block_hash: int
    parent_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    lora_id: int
    def __init__(self, block_hash: _Optional[int] = ..., parent_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., lora_id: _Optional[int] = ...) -> None: ...

class PutValueRequest(_message.Message):
    __slots__ = ("tenant", "key", "value")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    value: bytes
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class PutValueResponse(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    def __init__(self, kept: bool = ...) -> None: ...

class GetValueRequest(_message.Message):
    __slots__ = ("tenant", "key")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class GetValueResponse(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class DeleteValueRequest(_message.Message):
    __slots__ = ("tenant", "key")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class DeleteValueResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...

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

class FrontendMessage(_message.Message):
    __slots__ = ("hello", "submits", "stops", "cancels", "goodbye", "attaches", "detaches")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ATTACHES_FIELD_NUMBER: _ClassVar[int]
    DETACHES_FIELD_NUMBER: _ClassVar[int]
    hello: FrontendHello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    stops: _containers.RepeatedCompositeFieldContainer[Stopped]
    cancels: _containers.RepeatedCompositeFieldContainer[Cancel]
    goodbye: Goodbye
    attaches: _containers.RepeatedCompositeFieldContainer[Attach]
    detaches: _containers.RepeatedCompositeFieldContainer[Detach]
    def __init__(self, hello: _Optional[_Union[FrontendHello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., stops: _Optional[_Iterable[_Union[Stopped, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[Cancel, _Mapping]]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., attaches: _Optional[_Iterable[_Union[Attach, _Mapping]]] = ..., detaches: _Optional[_Iterable[_Union[Detach, _Mapping]]] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("handle", "request_id", "tenant")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    tenant: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class FrontendHello(_message.Message):
    __slots__ = ("identity", "frontend_id")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.PeerIdentity
    frontend_id: str
    def __init__(self, identity: _Optional[_Union[_common_pb2.PeerIdentity, _Mapping]] = ..., frontend_id: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "tenant", "token_ids", "sampling", "stop", "num_choices", "remaining_ns", "priority", "trace", "committed", "frontend_state", "resumable", "resubmitted", "arrival_age_ns", "cache_salt", "no_cache_reuse", "best_of", "beam", "adapter", "task")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    REMAINING_NS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_STATE_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    RESUBMITTED_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_AGE_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_REUSE_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    tenant: str
    token_ids: bytes
    sampling: _common_pb2.ResolvedSampling
    stop: _common_pb2.StopRules
    num_choices: int
    remaining_ns: int
    priority: int
    trace: _common_pb2.TraceContext
    committed: _containers.RepeatedCompositeFieldContainer[CommittedTokens]
    frontend_state: bytes
    resumable: bool
    resubmitted: bool
    arrival_age_ns: int
    cache_salt: str
    no_cache_reuse: bool
    best_of: int
    beam: _common_pb2.BeamRules
    adapter: str
    task: _common_pb2.Task
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.ResolvedSampling, _Mapping]] = ..., stop: _Optional[_Union[_common_pb2.StopRules, _Mapping]] = ..., num_choices: _Optional[int] = ..., remaining_ns: _Optional[int] = ..., priority: _Optional[int] = ..., trace: _Optional[_Union[_common_pb2.TraceContext, _Mapping]] = ..., committed: _Optional[_Iterable[_Union[CommittedTokens, _Mapping]]] = ..., frontend_state: _Optional[bytes] = ..., resumable: bool = ..., resubmitted: bool = ..., arrival_age_ns: _Optional[int] = ..., cache_salt: _Optional[str] = ..., no_cache_reuse: bool = ..., best_of: _Optional[int] = ..., beam: _Optional[_Union[_common_pb2.BeamRules, _Mapping]] = ..., adapter: _Optional[str] = ..., task: _Optional[_Union[_common_pb2.Task, str]] = ...) -> None: ...

class CommittedTokens(_message.Message):
    __slots__ = ("choice", "token_ids", "logprobs", "top_counts", "top_token_ids", "top_logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: bytes
    logprobs: bytes
    top_counts: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("handle", "choice", "token_offset")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    handle: int
    choice: int
    token_offset: int
    def __init__(self, handle: _Optional[int] = ..., choice: _Optional[int] = ..., token_offset: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle", "request_id", "tenant")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    tenant: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("welcome", "tokens", "finished", "failed", "started", "state", "prompt_logprobs", "embeddings", "attached", "queue")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    tokens: TokenColumns
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    failed: _containers.RepeatedCompositeFieldContainer[Failed]
    started: _containers.RepeatedCompositeFieldContainer[Started]
    state: ServiceState
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    attached: _containers.RepeatedCompositeFieldContainer[HeldRequest]
    queue: QueueState
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., tokens: _Optional[_Union[TokenColumns, _Mapping]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[Failed, _Mapping]]] = ..., started: _Optional[_Iterable[_Union[Started, _Mapping]]] = ..., state: _Optional[_Union[ServiceState, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ..., attached: _Optional[_Iterable[_Union[HeldRequest, _Mapping]]] = ..., queue: _Optional[_Union[QueueState, _Mapping]] = ...) -> None: ...

class QueueState(_message.Message):
    __slots__ = ("closed_for", "retry_after_ns")
    CLOSED_FOR_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_NS_FIELD_NUMBER: _ClassVar[int]
    closed_for: _containers.RepeatedScalarFieldContainer[str]
    retry_after_ns: int
    def __init__(self, closed_for: _Optional[_Iterable[str]] = ..., retry_after_ns: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("handle", "logprobs", "num_top", "top_token_ids", "top_logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    logprobs: bytes
    num_top: int
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, handle: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., num_top: _Optional[int] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("handle", "values")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    values: bytes
    def __init__(self, handle: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("identity", "limits", "held", "state", "admin_address", "queue")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.PeerIdentity
    limits: _common_pb2.ModelLimits
    held: _containers.RepeatedCompositeFieldContainer[HeldRequest]
    state: ServiceState
    admin_address: str
    queue: QueueState
    def __init__(self, identity: _Optional[_Union[_common_pb2.PeerIdentity, _Mapping]] = ..., limits: _Optional[_Union[_common_pb2.ModelLimits, _Mapping]] = ..., held: _Optional[_Iterable[_Union[HeldRequest, _Mapping]]] = ..., state: _Optional[_Union[ServiceState, _Mapping]] = ..., admin_address: _Optional[str] = ..., queue: _Optional[_Union[QueueState, _Mapping]] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("handle", "request_id", "token_offsets", "frontend_state", "submit")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_STATE_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    token_offsets: bytes
    frontend_state: bytes
    submit: Submit
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., token_offsets: _Optional[bytes] = ..., frontend_state: _Optional[bytes] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ...) -> None: ...

class FrontendState(_message.Message):
    __slots__ = ("model", "stop_strings", "chat_parsing", "partial_at_deadline", "include_stop", "special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    CHAT_PARSING_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_AT_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    chat_parsing: bytes
    partial_at_deadline: bool
    include_stop: bool
    special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., stop_strings: _Optional[_Iterable[str]] = ..., chat_parsing: _Optional[bytes] = ..., partial_at_deadline: bool = ..., include_stop: bool = ..., special_tokens: bool = ...) -> None: ...

class ServiceState(_message.Message):
    __slots__ = ("adapters", "serving", "reason", "limits", "warming")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    serving: bool
    reason: str
    limits: _common_pb2.ModelLimits
    warming: bool
    def __init__(self, adapters: _Optional[_Iterable[str]] = ..., serving: bool = ..., reason: _Optional[str] = ..., limits: _Optional[_Union[_common_pb2.ModelLimits, _Mapping]] = ..., warming: bool = ...) -> None: ...

class TokenColumns(_message.Message):
    __slots__ = ("handles", "choices", "token_offsets", "counts", "token_ids", "logprobs", "top_counts", "top_token_ids", "top_logprobs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    choices: bytes
    token_offsets: bytes
    counts: bytes
    token_ids: bytes
    logprobs: bytes
    top_counts: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, handles: _Optional[bytes] = ..., choices: _Optional[bytes] = ..., token_offsets: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("handle", "cached_prompt_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    cached_prompt_tokens: int
    def __init__(self, handle: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "choice", "reason", "stop_token_id", "num_output_tokens", "last", "account", "score")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    choice: int
    reason: _common_pb2.FinishReason
    stop_token_id: int
    num_output_tokens: int
    last: bool
    account: RequestAccount
    score: float
    def __init__(self, handle: _Optional[int] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., last: bool = ..., account: _Optional[_Union[RequestAccount, _Mapping]] = ..., score: _Optional[float] = ...) -> None: ...

class RequestAccount(_message.Message):
    __slots__ = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "queue_ns", "prefill_ns", "decode_ns", "preempted_ns", "num_preemptions", "num_migrations", "worker_id", "accepted_draft_tokens", "rejected_draft_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    preempted_ns: int
    num_preemptions: int
    num_migrations: int
    worker_id: str
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., preempted_ns: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_migrations: _Optional[int] = ..., worker_id: _Optional[str] = ..., accepted_draft_tokens: _Optional[int] = ..., rejected_draft_tokens: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("handle", "error", "account")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    error: _common_pb2.ErrorStatus
    account: RequestAccount
    def __init__(self, handle: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorStatus, _Mapping]] = ..., account: _Optional[_Union[RequestAccount, _Mapping]] = ...) -> None: ...
