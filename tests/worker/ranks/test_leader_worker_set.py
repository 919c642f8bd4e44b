"""A rank's place from the pod of a LeaderWorkerSet, where the command line says nothing else."""

import pytest

from quire.cli.serving.serve_worker import in_set
from svc_common.errors import ConfigError

POD = {"LWS_LEADER_ADDRESS": "group-0.ranks", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}


def test_the_pod_says_the_rank() -> None:
    """Followers call the leader at the port of the group; the leader needs no address; options come first."""
    assert in_set({}, POD) == {"tensor_parallel": 4, "rank": 2, "leader": "group-0.ranks:50063"}
    assert in_set({"group_port": 7000}, POD)["leader"] == "group-0.ranks:7000"
    assert in_set({}, POD | {"LWS_WORKER_INDEX": "0"}) == {"tensor_parallel": 4, "rank": 0}
    assert in_set({"rank": 1, "leader": "a:1"}, POD) == {"rank": 1, "leader": "a:1"}
    assert in_set({"pipeline_parallel": 2}, POD)["tensor_parallel"] == 2
    assert in_set({"tensor_parallel": 2}, {}) == {"tensor_parallel": 2}


@pytest.mark.parametrize("wrong", [{"LWS_GROUP_SIZE": "many"}, {"LWS_LEADER_ADDRESS": ""}])
def test_wrong_variables_are_named(wrong: dict[str, str]) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        in_set({}, POD | wrong)


def test_stages_that_do_not_divide_the_pods() -> None:
    """Both values are named."""
    with pytest.raises(ConfigError, match="LWS_GROUP_SIZE is 4, which --pipeline-parallel 3 does not divide"):
        in_set({"pipeline_parallel": 3}, POD)
