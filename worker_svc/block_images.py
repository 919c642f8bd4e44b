"""Images: copies of another worker's blocks in host memory, until a step places them into blocks of this worker.

A scheduler moves a sequence to another worker in this way (`scheduler_svc/core/workers/live_move`).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

MOST_IMAGES = 64


class BlockImages:
    """Owner of the images, by name; the engine's thread uses them. `block_bytes`: of a block over the layers of a cache group."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        """`num_blocks`: device blocks of the worker; an image cannot have more."""
        self._block_bytes, self._num_blocks = block_bytes, num_blocks
        self._images: dict[str, bytearray] = {}

    def put(self, image: str, num_before: int, data: bytes) -> None:
        """Append blocks to an image that has `num_before`, 0 = a new one.

        Raises InvalidArgument for pieces of a block, FailedPrecondition if it has another number of blocks,
        ResourceExhausted if there are too many images or blocks.
        """
        if len(data) % self._block_bytes:
            raise InvalidArgument.field("data", f"has {len(data)} bytes; a block has {self._block_bytes}")
        held = self._images.get(image, bytearray())
        if len(held) != num_before * self._block_bytes:
            raise FailedPrecondition(
                f"image {image} has {len(held) // self._block_bytes} blocks, not {num_before}; fetch it from its beginning",
                reason="IMAGE_DIFFERS",
            )
        self._check_room(image, len(held) + len(data))
        held += data
        self._images[image] = held

    def _check_room(self, image: str, num_bytes: int) -> None:
        if num_bytes > self._num_blocks * self._block_bytes:
            raise ResourceExhausted(f"image {image} has more than {self._num_blocks} blocks", reason="TOO_MANY_IMAGES")
        if image not in self._images and len(self._images) >= MOST_IMAGES:
            raise ResourceExhausted(f"this worker holds {MOST_IMAGES} images; drop one first", reason="TOO_MANY_IMAGES")

    def drop(self, image: str) -> None:
        """Forget an image; no-op for an unknown one."""
        self._images.pop(image, None)

    def clear(self) -> None:
        """Forget all images."""
        self._images.clear()

    def check(self, placed: Iterable[worker_pb2.PlacedImage]) -> None:
        """Raise InvalidArgument, naming the field, if a step's images cannot be placed."""
        for each in placed:
            held = self._images.get(each.image)
            if held is None:
                raise InvalidArgument.field("placed.image", f"there is no image {each.image}; fetch it first")
            pairs = pairs_of(each)
            most = np.maximum.reduce(pairs, axis=0, initial=-1)
            limits = len(held) // self._block_bytes, self._num_blocks
            if (most >= limits).any():
                raise InvalidArgument.field("placed.blocks", f"has block {most.tolist()}; must be below {list(limits)}")

    def take(self, image: str) -> bytearray:
        """Remove and return the contents of an image, block after block."""
        return self._images.pop(image)


def check_blocks(blocks: Sequence[int], num_blocks: int) -> None:
    """Raise InvalidArgument if a device block does not exist."""
    if blocks and max(blocks) >= num_blocks:
        raise InvalidArgument.field("block_ids", f"has block {max(blocks)}; must be below {num_blocks}")


def pairs_of(placed: worker_pb2.PlacedImage) -> NDArray[np.int32]:
    """int32 [m, 2]: (index in the image, device block). Raises InvalidArgument."""
    flat = wire_arrays.unpack(placed.blocks, "placed.blocks", minimum=0)
    if len(flat) % 2:
        raise InvalidArgument.field("placed.blocks", f"has {len(flat)} elements, which is not an even number")
    return flat.reshape(-1, 2)
