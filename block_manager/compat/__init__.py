"""Cache rules of older vLLM releases (2023 and 0.6.3), reproduced for their presets; the default policy uses none of this."""
