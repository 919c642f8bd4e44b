"""Pods of deploy/kubernetes as containers of the engine, started, probed and ended as a kubelet does, without a cluster.

Taken from a manifest: image, arguments, environment, volumes, security context, limits, probes, preStop, grace period, names of
the Services that select it. Not taken: what only a cluster has, such as virtual addresses, spreading and budgets.
"""

import contextlib
import itertools
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.compose.stack import docker, until
from tests.support.commands import ROOT, Failure
from tests.support.debian import program

Manifest = Mapping[str, Any]
NETWORK, SUBNET = "quire-pods", "172.30.0.0/24"
MODEL = ROOT / "models" / "tiny"
FAILURES = 3
"""Probes in a row that must fail before a kubelet heeds them, where a manifest does not say."""
_UNITS = {"Mi": "m", "Gi": "g"}
_VARIABLE = re.compile(r"\$\((\w+)\)")


@dataclass
class Pod:
    """One running pod. `is_ready`: by its readiness probe; `faults`: liveness probes that failed as often as ends a container."""

    component: str
    address: str
    container: str
    manifest: Manifest
    is_ready: bool = False
    is_ending: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def spec(self) -> Manifest:
        """Its only container."""
        [container] = self.manifest["spec"]["containers"]
        return dict(container)

    @property
    def pid(self) -> int:
        """Of its first process, as this machine sees it."""
        return int(docker("inspect", "--format", "{{.State.Pid}}", self.container))

    def log(self) -> str:
        """The last lines of its log."""
        words = [program("docker"), "logs", "--tail", "40", self.container]
        return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout

    def probe(self, kind: str) -> bool:
        """One probe of that kind, as its manifest has it."""
        probe = self.spec[kind]
        request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
        with grpc.insecure_channel(f"{self.address}:{probe['grpc']['port']}") as channel:
            try:
                said = health_pb2_grpc.HealthStub(channel).Check(request, timeout=probe.get("timeoutSeconds", 1))
            except grpc.RpcError:
                return False
        return bool(said.status == health_pb2.HealthCheckResponse.SERVING)


class Cell:
    """Pods of one cell, by the manifests that Kustomize built. A context manager."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._manifests = manifests
        self._addresses = itertools.count(10)
        self._over = threading.Event()
        self._probers: list[threading.Thread] = []
        self.pods: list[Pod] = []

    def __enter__(self) -> "Cell":
        docker("network", "create", "--subnet", SUBNET, NETWORK)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for prober in self._probers:
            prober.join()
        for pod in self.pods:
            docker("rm", "--force", pod.container)
        docker("network", "rm", NETWORK)

    # --- as controllers and kubelet --------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """As many pods of each kind as the manifests want; returns when all are ready."""
        for manifest in self._manifests:
            for _ in range(
                manifest["spec"].get("replicas", 0) if manifest["kind"] in ("Deployment", "StatefulSet") else 0
            ):
                self.start(manifest["spec"]["template"])
        for pod in self.pods:
            self.wait_until_ready(pod)

    def start(self, template: Manifest) -> Pod:
        """One pod, probed from now on."""
        address = SUBNET.replace("0/24", str(next(self._addresses)))
        labels = template["metadata"]["labels"]
        words = [word for name in self._services(labels) for word in ("--network-alias", name)]
        container = docker(
            "run", "--detach", "--network", NETWORK, "--ip", address, *words, *self._words(template, address)
        )
        pod = Pod(labels["app.kubernetes.io/component"], address, container.strip(), template)
        self.pods.append(pod)
        prober = threading.Thread(target=self._keep_probing, args=(pod,))
        self._probers.append(prober)
        prober.start()
        return pod

    def wait_until_ready(self, pod: Pod) -> None:
        """`Failure` with its log if its startup probe gives up before."""
        limit = pod.spec["startupProbe"]
        limit_s = limit["periodSeconds"] * limit["failureThreshold"]
        try:
            until(lambda: pod.is_ready or pod.faults, f"{pod.component} ready", timeout_s=limit_s)
        except Failure as failure:
            raise Failure(f"{failure}\n{pod.log()}") from None
        if pod.faults:
            raise Failure(f"{pod.component}: {pod.faults}")

    def end(self, pod: Pod, *, at_signal: Callable[[], None] = lambda: None) -> tuple[int, float]:
        """preStop, then SIGTERM, as when a pod is deleted: exit status and seconds. `at_signal` is called between.

        `Failure` if it has not ended within its grace period.
        """
        began_s, grace_s = time.monotonic(), pod.manifest["spec"]["terminationGracePeriodSeconds"]
        pod.is_ending = True
        self._pre_stop(pod)
        at_signal()
        docker("kill", "--signal", "TERM", pod.container)
        left_s = grace_s - (time.monotonic() - began_s)
        command = [program("docker"), "wait", pod.container]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(left_s, 1), check=True)
            return int(done.stdout), time.monotonic() - began_s
        raise Failure(f"{pod.component} did not end within {grace_s} s\n{pod.log()}")

    def ready(self, component: str) -> list[Pod]:
        """Pods to which a Service sends."""
        return [pod for pod in self.pods if pod.component == component and pod.is_ready and not pod.is_ending]

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _pre_stop(self, pod: Pod) -> None:
        hook = pod.spec["lifecycle"]["preStop"]
        if "sleep" in hook:
            time.sleep(hook["sleep"]["seconds"])
        else:
            docker("exec", pod.container, *hook["exec"]["command"])

    def _keep_probing(self, pod: Pod) -> None:
        while not pod.probe("startupProbe"):
            if self._over.wait(pod.spec["startupProbe"]["periodSeconds"]) or pod.is_ending:
                return
        kinds = ("readinessProbe", "livenessProbe")
        num_failed, due_s = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, time.monotonic())
        while not (self._over.wait(0.1) or pod.is_ending):
            for kind in (one for one in kinds if time.monotonic() >= due_s[one]):
                due_s[kind] = time.monotonic() + pod.spec[kind]["periodSeconds"]
                num_failed[kind] = 0 if pod.probe(kind) else num_failed[kind] + 1
                self._heed(pod, kind, num_failed[kind])

    def _heed(self, pod: Pod, kind: str, num_failed: int) -> None:
        has_failed = num_failed >= pod.spec[kind].get("failureThreshold", FAILURES)
        if kind == "livenessProbe" and has_failed:
            pod.faults.append(f"{num_failed} liveness probes failed")
        elif kind == "readinessProbe" and (has_failed or not num_failed):
            pod.is_ready = not num_failed

    def _services(self, labels: Manifest) -> Iterator[str]:
        for manifest in self._manifests:
            if manifest["kind"] == "Service" and manifest["spec"]["selector"].items() <= labels.items():
                yield manifest["metadata"]["name"]

    def _words(self, template: Manifest, address: str) -> list[str]:
        [container] = template["spec"]["containers"]
        environ = {one["name"]: self._value(one, address) for one in container.get("env", ())}
        arguments = [_VARIABLE.sub(lambda found: environ[found[1]], text) for text in container["args"]]
        return [
            *_security({**template["spec"]["securityContext"], **container["securityContext"]}),
            *_limits(container["resources"]["limits"]),
            *(word for mount in container["volumeMounts"] for word in _mount(mount, template["spec"]["volumes"])),
            *(word for name, value in environ.items() for word in ("--env", f"{name}={value}")),
            container["image"],
            *arguments,
        ]

    def _value(self, variable: Manifest, address: str) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if source.get("fieldRef") == {"fieldPath": "status.podIP"}:
            return address
        wanted = source["configMapKeyRef"]
        found = {one["metadata"]["name"]: one["data"] for one in self._manifests if one["kind"] == "ConfigMap"}
        return str(found[wanted["name"]][wanted["key"]])


def _security(context: Manifest) -> list[str]:
    """Everything in a security context must be known here, so that nothing is left out."""
    known = {
        "runAsNonRoot": lambda value: [],
        "runAsUser": lambda value: ["--user", f"{value}:{context['runAsGroup']}"],
        "runAsGroup": lambda value: [],
        "fsGroup": lambda value: ["--group-add", str(value)],
        "seccompProfile": lambda value: {"RuntimeDefault": []}[value["type"]],
        "allowPrivilegeEscalation": lambda value: [] if value else ["--security-opt", "no-new-privileges"],
        "readOnlyRootFilesystem": lambda value: ["--read-only"] if value else [],
        "capabilities": lambda value: [word for name in value["drop"] for word in ("--cap-drop", name)],
    }
    return [word for name, value in context.items() for word in known[name](value)]


def _limits(limits: Manifest) -> list[str]:
    words = ["--memory", _bytes(limits["memory"])]
    if "cpu" in limits:
        words += ["--cpus", str(min(float(limits["cpu"]), os.cpu_count() or 1))]
    return words


def _mount(mount: Manifest, volumes: Sequence[Manifest]) -> list[str]:
    [volume] = [one for one in volumes if one["name"] == mount["name"]]
    if "emptyDir" in volume:
        assert volume["emptyDir"]["medium"] == "Memory"
        return ["--tmpfs", f"{mount['mountPath']}:size={_bytes(volume['emptyDir']['sizeLimit'])},mode=1777"]
    assert volume["persistentVolumeClaim"]["readOnly"] and mount["readOnly"]
    return ["--mount", f"type=bind,source={MODEL},target={mount['mountPath']},readonly"]


def _bytes(quantity: str) -> str:
    return quantity[:-2] + _UNITS[quantity[-2:]]
