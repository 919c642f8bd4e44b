"""Windows of the layers of models that have layers without a window too, by their published configurations."""


def windows(num_layers: int, every: int, window: int) -> dict[int, int | None]:
    """A layer that sees everything after each `every - 1` windowed ones."""
    return {layer: None if layer % every == every - 1 else window for layer in range(num_layers)}


SHAPES = {
    "gemma-3-1b": windows(26, 6, 512),
    "gemma-3-4b": windows(34, 6, 1024),
    "gemma-3-12b": windows(48, 6, 1024),
    "gemma-3-27b": windows(62, 6, 1024),
    "gpt-oss-20b": windows(24, 2, 128),
    "gpt-oss-120b": windows(36, 2, 128),
    "gemma-2-9b": windows(42, 2, 4096),
    "cohere2-7b": windows(32, 4, 4096),
}
