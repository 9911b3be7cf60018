"""The configuration: sections with their defaults, loading, checks. Imports no torch."""

from torchspec.config.schema import Config, Data, Reward, TinyModel
from torchspec.errors import ConfigError

__all__ = ["Config", "ConfigError", "Data", "Reward", "TinyModel"]
