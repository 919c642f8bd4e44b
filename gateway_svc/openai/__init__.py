"""OpenAI's API over HTTP, as a bridge over the pipeline."""
