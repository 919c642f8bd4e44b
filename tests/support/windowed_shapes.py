"""Windows of the layers of models that have layers without one too, by published configurations where not said otherwise."""


def windows(num_layers: int, every: int, window: int) -> dict[int, int | None]:
    """A layer that sees everything after each `every - 1` windowed ones."""
    return {layer: None if layer % every == every - 1 else window for layer in range(num_layers)}


def _in_parts(of_layers: dict[int, int | None], count: int) -> dict[int, int | None]:
    """Each windowed layer `count` times."""
    each = [window for window in of_layers.values() for _ in range(1 if window is None else count)]
    return dict(enumerate(each))


SHAPES = {
    "gemma-3-1b": windows(26, 6, 512),
    "gemma-3-4b": windows(34, 6, 1024),
    "gemma-3-12b": windows(48, 6, 1024),
    "gemma-3-27b": windows(62, 6, 1024),
    "gpt-oss-20b": windows(24, 2, 128),
    "gpt-oss-120b": windows(36, 2, 128),
    "gemma-2-9b": windows(42, 2, 4096),
    "cohere2-7b": windows(32, 4, 4096),
    # As layers of the pool (worker_svc/model/cache/layer_cache.py): windowed layers of two parts, with twice the elements.
    # A shape like Gemma 4's: 8 kv heads of 256 in windowed layers, 2 of 512 in the others.
    "gemma-4-like": _in_parts(windows(30, 6, 1024), 2),
    # By the defaults of transformers' configuration.
    "mimo-v2-flash": _in_parts({layer: 129 if layer % 6 != 5 and layer else None for layer in range(48)}, 2),
}
