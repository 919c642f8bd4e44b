"""Workers of one scheduler agree on what their block tables mean."""

import asyncio

import pytest

from protos.common.v1 import common_pb2
from scheduler_svc.workers.cache_agreement import CacheAgreement, CacheCounts
from svc_common.errors import FailedPrecondition

FIT = CacheCounts(100, 10, 16)


def limits(**values: object) -> common_pb2.ModelLimits:
    """Those of a small model."""
    return common_pb2.ModelLimits(
        model="m", model_digest="d" * 64, dtype="float32", max_model_len=64, block_size=16, **values
    )


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"cache_windows": [0, 512]}, "cache groups"),
        ({}, "cache groups"),
        ({"cache_windows": [1024, 0]}, "cache groups"),
    ],
)
def test_workers_have_the_same_cache_groups(values: dict[str, list[int]], field: str) -> None:
    """Block ids of other groups would be read as KV of other layers; a worker may come back with other ones itself."""
    agreement = CacheAgreement(None)
    asyncio.run(agreement.reach("a:1", limits(), FIT))
    asyncio.run(agreement.reach("a:1", limits(cache_windows=[0, 1024]), FIT))
    assert asyncio.run(agreement.reach("b:1", limits(cache_windows=[0, 1024]), FIT)) == FIT
    with pytest.raises(
        FailedPrecondition, match=r"its cache groups is .* and that of the worker at [ab]:1 is \[0, 1024\]"
    ) as error:
        asyncio.run(agreement.reach("c:1", limits(**values), FIT))
    assert error.value.metadata["field"] == field
