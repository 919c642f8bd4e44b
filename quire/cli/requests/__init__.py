"""Commands that send requests: generate, chat, embed, models."""
