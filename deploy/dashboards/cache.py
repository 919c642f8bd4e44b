"""Dashboard of the KV cache: block usage, reuse, swaps and copies."""

from deploy.dashboards.grafana import Dashboard, Panel, Query
from deploy.dashboards.queries import RATE, rate

_TOKENS = "suffix: tokens/s"
_BLOCKS = "suffix: blocks/s"
_HITS = f"sum(rate(quire_prefix_cache_hit_tokens_total[{RATE}]))"
_QUERIES = f"sum(rate(quire_prefix_cache_queried_tokens_total[{RATE}]))"


def _pool(title: str, tier: str, text: str) -> Panel:
    states = ("used", "cached", "free")
    queries = tuple(Query(f'sum(quire_kv_blocks{{tier="{tier}",state="{state}"}})', state) for state in states)
    return Panel(title=title, text=text, unit="short", width=12, stacked=True, queries=queries)


CACHE = Dashboard(
    "cache",
    "KV cache",
    "Block usage, reuse of prompt prefixes, and moves between device and host.",
    (
        _pool(
            "Device blocks",
            "gpu",
            "Blocks on the device: used by sequences; cached (unreferenced, with a reusable prefix); free. The sum is the size of "
            "the pool. Free blocks are allocated first, then the least recently used cached ones.",
        ),
        _pool(
            "Host blocks",
            "cpu",
            "The same in host memory, for swapped requests. No data: swap space is off.",
        ),
        Panel(
            title="Blocks in use",
            text="Share of blocks that sequences use, on device (gpu) and host (cpu). At 100 % on the device requests wait or are "
            "preempted.",
            unit="percentunit",
            most=1,
            yellow=0.9,
            red=0.98,
            queries=(
                Query(
                    'sum by (tier) (quire_kv_blocks{state="used"}) / (sum by (tier) (quire_kv_blocks) > 0)', "{{tier}}"
                ),
            ),
        ),
        Panel(
            title="Prefix hits",
            text="Share of prompt tokens found in the cache, and therefore not computed, of requests when first scheduled.",
            unit="percentunit",
            most=1,
            queries=(Query(f"{_HITS} / ({_QUERIES} > 0)", "hits"),),
        ),
        Panel(
            title="Prompt tokens",
            text="Prompt tokens per second of requests when first scheduled: looked up in the cache, and found. The rest is "
            "computed.",
            unit=_TOKENS,
            queries=(Query(_QUERIES, "looked up"), Query(_HITS, "found")),
        ),
        Panel(
            title="Swaps",
            text="Blocks per second moved by steps: in = to the device, out = to the host. The cost of preemption by swap.",
            unit=_BLOCKS,
            queries=(rate("quire_kv_swap_blocks_total", "direction"),),
        ),
        Panel(
            title="Copies on write",
            text="Blocks per second copied because sequences that shared them (samples, beams) diverged.",
            unit=_BLOCKS,
            queries=(rate("quire_kv_copied_blocks_total"),),
        ),
        Panel(
            title="Preemptions",
            text="Preemptions per second, by mode. They cause swaps (swap) or repeated computation of tokens (recompute).",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_preemptions_total", "mode"),),
        ),
    ),
)
