"""deploy/kubernetes as Kustomize builds it: valid, runnable with the real command line, hardened."""

import functools
import os
import re
import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy import kustomize
from quire.cli.options import common
from svc_common import health_probe
from svc_common.net.health import LIVENESS
from tests.support.cli_lines import parse_quire
from tests.support.kubernetes.cells import CELLS, NEEDS_KUSTOMIZE, cell, containers, every_container, kserve, pods
from tests.support.kubernetes.validity import check
from tests.support.tree import ROOT
from worker_svc.settings import DEFAULT_GROUP_PORT

pytestmark = NEEDS_KUSTOMIZE

Manifest = dict[str, Any]
PORTS = {
    "gateway": {
        "grpc": common.DEFAULT_GRPC_PORT,
        "http": common.DEFAULT_HTTP_PORT,
        "admin": common.DEFAULT_ADMIN_PORT,
        "lab": common.DEFAULT_ADMIN_HTTP_PORT,
    },
    "scheduler": {
        "grpc": common.DEFAULT_SCHEDULER_PORT,
        "admin": common.DEFAULT_SCHEDULER_ADMIN_PORT,
        "metrics": common.DEFAULT_SCHEDULER_METRICS_PORT,
    },
    "worker": {
        "grpc": common.DEFAULT_WORKER_PORT,
        "metrics": common.DEFAULT_WORKER_METRICS_PORT,
        "group": DEFAULT_GROUP_PORT,
    },
}
"""Where services listen without options, by the names in the manifests."""


@pytest.mark.parametrize("of", [*CELLS, "kserve"], ids=str)
def test_manifests_are_valid(of: Any) -> None:
    """Against Kubernetes' own strict schemas and those of the custom resources, pod templates of these included."""
    manifests = kserve() if of == "kserve" else cell(*of)
    for manifest in manifests:
        check(manifest)


@pytest.mark.parametrize("worker", kustomize.WORKERS)
def test_overlays_are_cells(worker: str) -> None:
    """What `kubectl apply -k` is given builds, all in one namespace."""
    made = kustomize.build(kustomize.FOLDER / "overlays" / worker)
    assert {manifest["metadata"]["namespace"] for manifest in made} == {"quire"}
    assert {m["metadata"]["name"] for m in cell(worker, False)} <= {m["metadata"]["name"] for m in made}


def test_the_validity_check_refuses_what_is_wrong() -> None:
    """Unknown fields, wrong types and missing ones, in built-in and custom resources and in their pods."""
    group = next(m for m in cell("tensor-parallel", True) if m["kind"] == "LeaderWorkerSet")
    gateway = next(m for m in cell("cpu", False) if m["kind"] == "Deployment")
    for manifest, path, wrong in (
        (gateway, ["spec", "template", "spec", "containers", 0], {"livenesProbe": {}}),
        (gateway, ["spec"], {"replicas": "two"}),
        (group, ["spec"], {"replica": 2}),
        (group, ["spec", "leaderWorkerTemplate"], {"restartPolicy": "Always"}),
        (group, ["spec", "leaderWorkerTemplate", "workerTemplate", "spec"], {"gracePeriod": 5}),
        (group, [], {"apiVersion": "leaderworkerset.x-k8s.io/v2"}),
    ):
        changed = deepcopy(manifest)
        functools.reduce(lambda found, key: found[key], path, changed).update(wrong)
        with pytest.raises(jsonschema.ValidationError):
            check(changed)


def test_what_the_page_shows_is_valid(tmp_path: Path) -> None:
    """The overlay of docs/kubernetes.md builds a valid cell, and the KServe service names the configuration."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    overlay, service = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    source = os.path.relpath(kustomize.FOLDER, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("../..", source), encoding="utf-8")
    made = {(m["kind"], m["metadata"]["name"]): m for m in kustomize.build(tmp_path)}
    for manifest in made.values():
        check(manifest)
    assert made["Deployment", "quire-gateway"]["spec"]["replicas"] == 4
    assert made["ConfigMap", "quire-model"]["data"] == {"name": "qwen"}
    check(yaml.safe_load(service))
    assert yaml.safe_load(service)["spec"]["baseRefs"] == [{"name": m["metadata"]["name"]} for m in kserve()]


# --- commands --------------------------------------------------------------------------------------------------------


def test_command_lines_are_those_of_the_real_cli() -> None:
    """Arguments after each image's entry point, and the command before a worker ends."""
    seen = set()
    for service, container, _ in every_container():
        seen.add(parse_quire(["serve", service, *container["args"]]))
        stop = container["lifecycle"]["preStop"]
        if "exec" in stop:
            drain, _, wait = stop["exec"]["command"][-1].partition("; ")
            seen.add(parse_quire(shlex.split(drain)[1:]))
            assert re.fullmatch(r"sleep \d+", wait)
    assert seen == {"quire serve gateway", "quire serve scheduler", "quire serve worker", "quire drain"}


def test_probes_ask_for_names_that_services_have() -> None:
    """Live and ready by name, over gRPC or by the probe's command, at the port of the service. A rank that listens has them all."""
    for service, container, _ in every_container():
        if service == "worker" and "startupProbe" not in container:
            assert "ports" not in container, "a rank above 0 listens on no port"
            continue
        asked = {name: _asked(container[f"{name}Probe"]) for name in ("startup", "liveness", "readiness")}
        port = PORTS[service]["http" if "httpGet" in container["livenessProbe"] else "grpc"]
        assert asked == {"startup": (port, LIVENESS), "liveness": (port, LIVENESS), "readiness": (port, "")}


def test_a_gateway_is_in_its_service_while_requests_wait_for_a_scheduler() -> None:
    """A service without endpoints would refuse what the gateways hold for --scheduler-away-s."""
    apart = [container for service, container, _ in every_container() if service == "gateway" and _waits(container)]
    assert len(apart) >= 2
    for container in apart:
        probe = container["readinessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == float(option(container, "--scheduler-away-s"))


def _waits(container: Manifest) -> bool:
    return any(word.startswith("--scheduler-away-s=") for word in container["args"])


def _asked(probe: Manifest) -> tuple[int, str]:
    if "httpGet" in probe:
        return probe["httpGet"]["port"], {"/health/live": LIVENESS, "/health": ""}[probe["httpGet"]["path"]]
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"].get("service", "")
    command = probe["exec"]["command"]
    assert command[:3] == ["python", "-m", "svc_common.health_probe"]
    given = health_probe._arguments(command[3:])
    return int(given.address.rpartition(":")[2]), given.service


# --- names and ports -------------------------------------------------------------------------------------------------


def option(container: Manifest, name: str) -> str:
    return next(word.partition("=")[2] for word in container["args"] if word.startswith(f"{name}="))


@pytest.mark.parametrize("of", CELLS, ids=str)
def test_services_find_each_other(of: tuple[str, bool]) -> None:
    """Ports are those where services listen; each address names a Service that selects pods with that port."""
    manifests = cell(*of)
    named = {(m["kind"], m["metadata"]["name"]): m for m in manifests}
    for pod in pods(manifests):
        for service, container in containers(pod):
            for port in container.get("ports", []):
                assert PORTS[service][port["name"]] == port["containerPort"]
    addresses = {"gateway": ("--scheduler", "scheduler"), "scheduler": ("--worker", "worker")}
    for pod in pods(manifests):
        for service, container in containers(pod):
            if service in addresses:
                name, role = addresses[service]
                host, _, port = option(container, name).removeprefix("dns:///").partition(":")
                ports = {p["name"]: p["port"] for p in named["Service", host]["spec"]["ports"]}
                assert ports["grpc"] == int(port) == PORTS[role]["grpc"]
    for (kind, _), manifest in named.items():
        if kind == "Service":
            role = manifest["spec"]["selector"]["app.kubernetes.io/component"]
            assert all(PORTS[role][p["targetPort"]] == p["port"] for p in manifest["spec"]["ports"])
    assert named["StatefulSet", "quire-scheduler"]["spec"]["serviceName"] == "quire-scheduler"


def test_schedulers_know_rank_0_only() -> None:
    """Of a LeaderWorkerSet the Service selects the leaders, and autoscaling scales the groups."""
    manifests = {(m["kind"], m["metadata"]["name"]): m for m in cell("tensor-parallel", True)}
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    assert manifests["Service", "quire-workers"]["spec"]["selector"][index] == "0"
    assert manifests["ScaledObject", "quire-worker"]["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


def test_policies_allow_the_ports_that_are_used() -> None:
    """Each port of a policy is one of the service it is about; what a service calls is open at both ends."""
    policies = {m["metadata"]["name"]: m["spec"] for m in cell("cpu", True) if m["kind"] == "NetworkPolicy"}
    assert policies["quire-default"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policies["quire-default"]
    for role, ports in PORTS.items():
        for rule in policies[f"quire-{role}"]["ingress"]:
            assert all(port["port"] in ports for port in rule.get("ports", []))
    for caller, called in (("gateway", "scheduler"), ("scheduler", "worker"), ("worker", "scheduler")):
        out = [r for r in policies[f"quire-{caller}"]["egress"] if _selects(r["to"], called) and "ports" in r]
        into = [r for r in policies[f"quire-{called}"]["ingress"] if _selects(r.get("from", []), caller)]
        opened = {PORTS[called][p["port"]] for r in into for p in r["ports"]}
        assert opened == {p["port"] for r in out for p in r["ports"]}, (caller, called)


def _selects(peers: list[Manifest], role: str) -> bool:
    labels = [peer.get("podSelector", {}).get("matchLabels", {}) for peer in peers]
    return any(of.get("app.kubernetes.io/component") == role for of in labels)


def test_metrics_are_read_where_they_are() -> None:
    """Ports of the pod monitor exist, and the metric that workers are added by is one of ours."""
    manifests = cell("cpu", True)
    monitor = next(m for m in manifests if m["kind"] == "PodMonitor")
    ports = {port for of in PORTS.values() for port in of}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
    scaled = next(m for m in manifests if m["kind"] == "ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    documented = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"### {name}\n" in documented for name in re.findall(r"(quire_\w+?)(?:_bucket)?\b", query))


# --- hardening and stopping ------------------------------------------------------------------------------------------


def test_pods_are_locked_down() -> None:
    """Non-root, seccomp, no token; each container without capabilities, read-only, with requests and a limit of memory."""
    for service, container, pod in every_container():
        of_pod = pod["securityContext"]
        assert (of_pod["runAsNonRoot"], of_pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        assert of_pod["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        resources = container["resources"]
        assert resources["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in resources["limits"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert all(mount.get("readOnly") for path, mount in mounts.items() if path != "/tmp")
        assert "/tmp" in mounts, service


STOP_S = {"gateway": 6, "scheduler": 6, "worker": 14}
"""Longest time from the stop signal to the end of the process, without --drain-s."""


def test_the_grace_period_is_long_enough() -> None:
    """preStop, drain and the rest of the stop end before the pod is killed."""
    for service, container, pod in every_container():
        stop = container["lifecycle"]["preStop"]
        before = (
            stop["sleep"]["seconds"] if "sleep" in stop else 5 + int(stop["exec"]["command"][-1].rpartition(" ")[2])
        )
        drains = [float(word.partition("=")[2]) for word in container["args"] if word.startswith("--drain-s=")]
        assert before + sum(drains) + STOP_S[service] < pod["terminationGracePeriodSeconds"], service


def test_with_mtls_nothing_is_in_plain_text() -> None:
    """No --insecure; each service has its own key, and health is asked with it."""
    for worker in kustomize.WORKERS:
        for pod in pods(cell(worker, True)):
            for service, container in containers(pod):
                assert not any("insecure" in word for word in container["args"])
                assert any(word.startswith("--peer-ca=/run/tls/") for word in container["args"])
                secrets = [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
                assert secrets == [f"quire-{service}-tls"]
                if "livenessProbe" in container:
                    assert f"--tls-name={service}" in container["livenessProbe"]["exec"]["command"]
    issued = {m["spec"]["secretName"]: m for m in cell("cpu", True) if m["kind"] == "Certificate"}
    for role in PORTS:
        assert role in issued[f"quire-{role}-tls"]["spec"]["dnsNames"]
