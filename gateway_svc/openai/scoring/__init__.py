"""vLLM's pooling routes: relevance of texts to each other (score, rerank), probabilities of label tokens, vectors."""
