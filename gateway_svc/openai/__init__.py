"""The HTTP door: OpenAI's API as a bridge over the pipeline."""
