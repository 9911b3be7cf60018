"""Rollouts: what an engine is (`engine`), and vLLM as one (`vllm`, imported only where one is built)."""
