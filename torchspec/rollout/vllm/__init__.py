"""vLLM as the rollout engine. Only this folder imports vLLM."""
