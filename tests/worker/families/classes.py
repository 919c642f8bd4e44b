"""Which classes there are, and which of them are common text families."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def model_types() -> list[str]:
    """Model types of all causal language model classes of the installed transformers, in order of their names."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
