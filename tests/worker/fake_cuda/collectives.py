"""What NCCL does between fake devices of several processes: by Gloo, as launches that a recording repeats."""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from tests.worker.fake_cuda.recorder import RECORDER
from tests.worker.fake_cuda.tensors import DeviceTensor, WrongDevice


class _Done:
    def wait(self) -> bool:
        return True


class FakeCollectives:
    """See `paged_kernels.ranks.Collectives`."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout_s: float) -> None:
        self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._is_aborted = False

    def allreduce(self, tensors: list[torch.Tensor]) -> _Done:
        [values] = tensors
        return self._launch(self._sum, values)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor) -> _Done:
        return self._launch(self._gather, output, given)

    def abort(self) -> None:
        self._is_aborted = True

    def _launch(self, work: object, *tensors: torch.Tensor) -> _Done:
        if self._is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        for tensor in tensors:
            if not isinstance(tensor, DeviceTensor) or not tensor.is_contiguous():
                raise WrongDevice(
                    f"a collective of a tensor of {tensor.device}, which must be contiguous on the device"
                )
        call = partial(work, *(tensor.inner for tensor in tensors))
        RECORDER.note(call, None, is_kernel=True)
        call()
        return _Done()

    def _sum(self, values: torch.Tensor) -> None:
        self._group.allreduce([values]).wait()

    def _gather(self, output: torch.Tensor, given: torch.Tensor) -> None:
        self._group.allgather([list(output.unbind(0))], [given.view(output.shape[1:])]).wait()
