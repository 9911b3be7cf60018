"""Ranks: the mesh, FSDP2, context parallelism, pipelines."""
