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
    "Who holds blocks, how much of the prompts is reused, what is moved between device and host.",
    (
        _pool(
            "Device blocks",
            "gpu",
            "Blocks on the device: used by sequences, cached (held by nobody, with a prefix that can be reused), free. The sum is "
            "what there is. A new block is a free one, then the cached one that was used longest ago.",
        ),
        _pool(
            "Host blocks",
            "cpu",
            "The same in host memory, where swapped requests wait. None: swap space is switched off.",
        ),
        Panel(
            title="Blocks in use",
            text="Share that sequences hold, on device (gpu) and host (cpu). At 100 % of the device somebody waits or leaves.",
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
            text="Share of the prompt tokens of requests that started then, which were found in the cache and not computed.",
            unit="percentunit",
            most=1,
            queries=(Query(f"{_HITS} / ({_QUERIES} > 0)", "hits"),),
        ),
        Panel(
            title="Prompt tokens",
            text="Prompt tokens a second of requests that started: looked for in the cache, and found. Between them: computed.",
            unit=_TOKENS,
            queries=(Query(_QUERIES, "looked for"), Query(_HITS, "found")),
        ),
        Panel(
            title="Swaps",
            text="Blocks a second that steps moved: in = to the device, out = to the host. The price of preemption by swap.",
            unit=_BLOCKS,
            queries=(rate("quire_kv_swap_blocks_total", "direction"),),
        ),
        Panel(
            title="Copies on write",
            text="Blocks a second that were copied, as two sequences that shared them went different ways (samples, beams).",
            unit=_BLOCKS,
            queries=(rate("quire_kv_copied_blocks_total"),),
        ),
        Panel(
            title="Preemptions",
            text="A second, by mode: what the swaps and the tokens computed again come from.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_preemptions_total", "mode"),),
        ),
    ),
)
