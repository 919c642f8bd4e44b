"""Journal of a pool's prefix map: which hashes became known or unknown, and what the blocks under them hold.

It is kept only for those who publish KV events; a pool without one pays nothing.
"""

from dataclasses import dataclass

from block_manager.hashing import HashChain, blocks_in


@dataclass(frozen=True, slots=True)
class BlockContents:
    """Tokens of a registered block, little-endian int32, at `index` in its sequence. `parent`: hash of the block before it."""

    parent: bytes | None
    index: int
    tokens: bytes
    lora_id: int


class PrefixJournal:
    """Owner of the contents of one pool's registered blocks. `changed`: hashes since `take`, in order, known now or not.

    Blocks of chains that were not admitted have no contents here.
    """

    def __init__(self) -> None:
        self.contents: dict[bytes, BlockContents] = {}
        self.changed: dict[bytes, None] = {}
        self._adapters: dict[bytes, int] = {}

    def admit(self, chain: HashChain, lora_id: int) -> None:
        """Note the contents of this chain's blocks from now on."""
        self._adapters[chain.seed] = lora_id

    def note(self, chain: HashChain, first: int, data: bytes, block_size: int) -> None:
        """Note the contents of the chain's blocks from `first` on, which are hashed. `data`: their tokens, int32."""
        lora_id = self._adapters.get(chain.seed)
        if lora_id is not None:
            for index, tokens in enumerate(blocks_in(data, block_size), first):
                parent = chain.hash_at(index - 1) if index else None
                self.contents[chain.hash_at(index)] = BlockContents(parent, index, tokens, lora_id)

    def take(self) -> list[bytes]:
        """Return the hashes that changed, and forget that they did."""
        taken, self.changed = list(self.changed), {}
        return taken
