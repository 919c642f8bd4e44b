"""Preparing a worker's process: load the model, profile and allocate the KV cache, fetch the model bundle."""

import hashlib
import logging
from dataclasses import dataclass

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.policy.choice import PolicyChoice, WorkerSize
from scheduler_svc.readiness import WorkerReadiness
from scheduler_svc.workers.cache_agreement import CacheAgreement, CacheCounts
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import Internal, Unavailable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedWorker:
    """What a worker process reported; valid for its boot id. `slowest_step_s`: so far, including the profile."""

    boot_id: str
    limits: common_pb2.ModelLimits
    bundle: bytes
    cache: CacheCounts
    slowest_step_s: float
    device: str


class WorkerLoader:
    """Prepares one worker and reports the progress to `readiness`. Used only by its `WorkerLink`."""

    def __init__(
        self, address: str, choice: PolicyChoice, readiness: WorkerReadiness, agreement: CacheAgreement
    ) -> None:
        self.address = address
        self._choice = choice
        self._readiness = readiness
        self._agreement = agreement

    async def load(self, stub: worker_pb2_grpc.WorkerServiceStub, boot_id: str) -> LoadedWorker:
        """Prepare a new process. Raises typed or gRPC errors, and FailedPrecondition if it differs from the other workers."""
        limits = await self._load_model(stub)
        begin_ns = monotonic_ns()
        fit = await self._profile(stub, limits)
        largest_step_s = (monotonic_ns() - begin_ns) / NS_PER_S
        self._readiness.ready()
        cache = await self._agreement.reach(self.address, limits, fit)
        await stub.AllocateCache(
            worker_pb2.AllocateCacheRequest(num_gpu_blocks=cache.num_gpu_blocks, num_cpu_blocks=cache.num_cpu_blocks)
        )
        bundle = await self._fetch_bundle(stub, limits.bundle_digest)
        described = await stub.Describe(worker_pb2.DescribeRequest())
        return LoadedWorker(boot_id, limits, bundle, cache, largest_step_s, described.device)

    async def _load_model(self, stub: worker_pb2_grpc.WorkerServiceStub) -> common_pb2.ModelLimits:
        stage = ""
        async for progress in stub.LoadModel(worker_pb2.LoadModelRequest()):
            if progress.HasField("loaded"):
                log.info("worker %s has loaded %s", self.address, progress.loaded.model)
                limits: common_pb2.ModelLimits = progress.loaded
                limits.max_model_len = self._choice.max_model_len(limits.max_model_len)
                return limits
            if progress.stage.partition(":")[0] != stage:
                stage = progress.stage.partition(":")[0]
                log.info(
                    "worker %s is loading: %s (%d %%)", self.address, progress.stage, round(100 * progress.fraction)
                )
            self._readiness.not_ready(
                f"the worker is loading the model: {progress.stage} ({round(100 * progress.fraction)} %)", warming=True
            )
        raise Unavailable(f"the worker at {self.address} ended the load without a model", reason="LOAD_INCOMPLETE")

    async def _profile(self, stub: worker_pb2_grpc.WorkerServiceStub, limits: common_pb2.ModelLimits) -> CacheCounts:
        """Numbers of blocks that fit; the worker may shorten `limits`. ConfigError if the policy cannot serve its model."""
        tokens, seqs = self._choice.largest_step(limits.max_model_len)
        self._readiness.not_ready("the worker is measuring its memory", warming=True)
        profile = await stub.ProfileCache(
            worker_pb2.ProfileCacheRequest(max_num_batched_tokens=tokens, max_num_seqs=seqs)
        )
        log.info("memory of worker %s:\n%s", self.address, profile.readable)
        if profile.max_model_len:
            limits.max_model_len = self._choice.max_model_len(min(limits.max_model_len, profile.max_model_len))
        fit = self._choice.core_limits(WorkerSize.of(profile, limits))
        return CacheCounts(fit.num_gpu_blocks, fit.num_cpu_blocks, fit.block_size)

    async def _fetch_bundle(self, stub: worker_pb2_grpc.WorkerServiceStub, digest: str) -> bytes:
        known = self._readiness.known_bundle(digest)
        if known is not None:
            return known
        call = stub.GetModelBundle(worker_pb2.GetModelBundleRequest(digest=digest))
        bundle = b"".join([piece.chunk async for piece in call])
        found = hashlib.sha256(bundle).hexdigest()
        if found != digest:
            raise Internal(
                f"the worker's model bundle has digest {found}, it promised {digest}", reason="BUNDLE_DIGEST"
            )
        return bundle
