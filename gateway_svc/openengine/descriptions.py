"""What OpenEngine's Control service tells of server, models and load. Pure."""

import time
from collections.abc import Iterable, Sequence

from gateway_svc.cell.cell_load import CellReading
from gateway_svc.checks.sampling_checks import MAX_CHOICES, MAX_TOP_LOGPROBS
from gateway_svc.generating.cell_model import ServedModel
from protos.common.v1 import common_pb2
from protos.inference.v1 import admin_pb2
from protos.routers.v1 import openengine_pb2 as pb
from svc_common.clock import NS_PER_S
from svc_common.version import VERSION

SCHEMA_REVISION = 1
SCHEMA_RELEASE = "4def7c50b05e0674a0c3b26917399155535966e4"
"""Commit of github.com/ai-dynamo/openengine that protos/routers/v1/openengine.proto is written from."""

_GUIDES = (
    pb.GUIDED_DECODING_MODE_JSON_SCHEMA,
    pb.GUIDED_DECODING_MODE_REGEX,
    pb.GUIDED_DECODING_MODE_CHOICE,
    pb.GUIDED_DECODING_MODE_JSON_OBJECT,
)


def server_info(
    instance_id: str, models: Iterable[str], limits: common_pb2.ModelLimits | None, reading: CellReading | None
) -> pb.ServerInfo:
    """The server. `limits`, `reading`: of the first scheduler; None = not known now, and left out."""
    return pb.ServerInfo(
        engine_name="quire",
        engine_version=VERSION,
        engine_role=pb.ENGINE_ROLE_AGGREGATED,
        instance_id=instance_id,
        supported_models=models,
        parallelism=pb.ParallelismInfo(data_parallel_size=1, data_parallel_rank=0),
        kv_connector=pb.KvConnectorInfo(enabled=False),
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=SCHEMA_REVISION,
        schema_release=SCHEMA_RELEASE,
        capacity=pb.DeploymentCapacity(
            kv_block_size=limits.block_size if limits else None,
            total_kv_blocks=_blocks(reading)[1] if reading else None,
            max_running_requests=reading.load.max_running if reading else None,
        ),
    )


def model_info(model: ServedModel, aliases: Sequence[str]) -> pb.ModelInfo:
    """A model or an adapter of one."""
    longest = model.limits.max_model_len
    return pb.ModelInfo(
        model_id=model.limits.model,
        served_model_name=model.name,
        served_model_aliases=aliases,
        max_context_length=longest,
        max_output_tokens=longest - 1,
        supports_text_input=True,
        supports_token_ids_input=True,
        generation=_generation_capabilities(),
        supports_multimodal=False,
    )


def _generation_capabilities() -> pb.GenerationCapabilities:
    logprobs = pb.LogprobCapabilities(
        supported=True,
        candidate_selection_modes=[pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
        max_top_n=MAX_TOP_LOGPROBS,
    )
    return pb.GenerationCapabilities(
        prompt_logprobs=logprobs,
        output_logprobs=logprobs,
        guided_decoding=pb.GuidedDecodingCapabilities(supported=True, modes=_GUIDES),
        max_num_sequences=MAX_CHOICES,
        supports_priority=True,
        supports_stop_in_output=True,
        supports_cache_salt=True,
        supports_prefix_cache_bypass=True,
    )


def load_info(instance_id: str, reading: CellReading, *, per_rank: bool) -> pb.LoadInfo:
    """The cell's load, as at /v1/loads."""
    used, total = _blocks(reading)
    rank = pb.RankLoadInfo(
        data_parallel_rank=0,
        running_requests=reading.num_running,
        queued_requests=reading.num_waiting,
        used_kv_blocks=used,
        total_kv_blocks=total,
    )
    return pb.LoadInfo(
        instance_id=instance_id,
        timestamp_unix_nanos=time.time_ns() - int(reading.age_s * NS_PER_S),
        running_requests=reading.num_running,
        queued_requests=reading.num_waiting,
        used_kv_blocks=used,
        total_kv_blocks=total,
        waiting_tokens=reading.load.num_waiting_tokens,
        ranks=[rank] if per_rank else [],
    )


def _blocks(reading: CellReading) -> tuple[int | None, int | None]:
    """KV blocks that running requests hold, and all; None before a worker has told its number."""
    pool = reading.load.gpu
    return (pool.total - pool.free, pool.total) if reading.load.HasField("gpu") else (None, None)


def lora_adapters(known: Iterable[admin_pb2.Adapter], *, with_paths: bool) -> list[pb.LoraAdapter]:
    """Adapters under the numbers that KV events have."""
    return [
        pb.LoraAdapter(lora_id=each.adapter_id, lora_name=each.name, source_path=each.path if with_paths else "")
        for each in known
    ]
