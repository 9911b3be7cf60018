"""The policy over a pipeline of ranks, and the TapChannel that carries the draft's features."""
