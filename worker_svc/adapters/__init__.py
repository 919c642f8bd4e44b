"""PEFT adapters of the loaded model."""
