"""Reading a config.json that others wrote: what is not known to be harmless is refused by name.

A key is taken with its type, or may have one value only, or is known to leave the mathematics alone. Whatever is
left over and switched on is refused. null counts as absent everywhere, as it does in transformers. An absent key
has the meaning that transformers and vLLM give it, which is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, NoReturn

from torchspec.errors import ConfigError

log = logging.getLogger(__name__)
_logged: set[str] = set()

HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures
    attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id hidden_dropout id2label initializer_range label2id length_penalty
    max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k
    top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16
    use_cache is_llama_config transformers.js_config
    """.split()  # noqa: SIM905
)
"""Keys of any model that say nothing about its mathematics here."""

LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_REQUIRED: Final[Any] = object()


class Rope(NamedTuple):
    """Rotary embedding: base, Llama 3.1's four numbers or None, and the share of a head that is rotated."""

    theta: float
    scaling: dict[str, float] | None
    partial: float


class ConfigJson:
    """One config.json, or a part of one.

    Args:
        where: the file, as messages name it.
        values: what it holds.

    Raises, with every method, a ConfigError that names the file and the key.
    """

    def __init__(self, where: object, values: dict[str, Any]) -> None:
        self.where, self.values = where, {key: x for key, x in values.items() if x is not None}
        self._known: set[str] = set(HARMLESS)

    def integer(self, name: str, default: Any = _REQUIRED, quiet: bool = False) -> int:
        """Return a whole number above 0. `quiet`: everybody leaves the key out, so its default needs no words."""
        value = self._take(name, default, quiet)
        if type(value) is not int or value < 1:
            self.refuse(name, "a whole number above 0 is needed")
        return value

    def number(self, name: str, default: Any = _REQUIRED, quiet: bool = False) -> float:
        """Return a number above 0."""
        value = self._take(name, default, quiet)
        if type(value) not in (int, float) or not value > 0:
            self.refuse(name, "a number above 0 is needed")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._take(name, default, quiet=True)
        if type(value) is not bool:
            self.refuse(name, "true or false is needed")
        return value

    def integers(self, name: str) -> list[int]:
        """Return a list of whole numbers; an absent one is []."""
        value = self._take(name, [], quiet=True)
        if not isinstance(value, list) or any(type(x) is not int for x in value):
            self.refuse(name, "a list of whole numbers is needed")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """Return an object; an absent one is {}."""
        value = self._take(name, {}, quiet=True)
        if not isinstance(value, dict):
            self.refuse(name, "an object is needed")
        return value

    def only(self, **allowed: Any) -> None:
        """Refuse keys that are there with another value than this one."""
        for name, value in allowed.items():
            if (found := self._take(name, value, quiet=True)) != value:
                raise ConfigError(f"{self.where}: {name} = {found!r}; only {value!r} is supported")

    def full_attention(self) -> None:
        """Refuse a sliding window that is switched on, in any of its spellings."""
        self.only(use_sliding_window=False)
        types = self._take("layer_types", [], quiet=True)
        if not isinstance(types, list) or set(types) - {"full_attention"}:
            self.refuse("layer_types", "sliding windows are not supported, only 'full_attention' is")
        self._known |= {"sliding_window", "max_window_layers"}
        said = "use_sliding_window" in self.values or types
        if "sliding_window" in self.values and not said:
            self.refuse("sliding_window", "sliding windows are not supported; set null for full attention")

    def window(self) -> int | None:
        """Return the sliding window of a model whose layers are all alike; None: full attention.

        layer_types decides where it is there, as in vLLM and transformers; else use_sliding_window does.
        """
        self._known.add("max_window_layers")
        types = self._take("layer_types", [], quiet=True)
        used = self.flag("use_sliding_window", False)
        size = self._take("sliding_window", None, quiet=True)
        if not isinstance(types, list) or set(types) not in (
            set(),
            {"full_attention"},
            {"sliding_attention"},
        ):
            self.refuse("layer_types", "all layers must be 'full_attention', or all 'sliding_attention'")
        if size is not None and not types and "use_sliding_window" not in self.values:
            self.refuse(
                "sliding_window", "nothing says whether it is used; add use_sliding_window or layer_types"
            )
        if not (set(types) == {"sliding_attention"} or (used and not types)):
            return None
        if type(size) is not int or size < 1:
            self.refuse("sliding_window", "a sliding window needs a number of positions, 1 or more")
        return size

    def rope(self, default_theta: float = 10000.0) -> Rope:
        """Return the rotary embedding, from rope_parameters (transformers 5) or rope_scaling and rope_theta."""
        given = [name for name in ("rope_parameters", "rope_scaling") if self.section(name)]
        if len(given) == 2 and self.values[given[0]] != self.values[given[1]]:
            self.refuse("rope_scaling", "rope_parameters says something else; leave one of them")
        inner = ConfigJson(f"{self.where}: {given[0]}", self.values[given[0]]) if given else None
        theta = self._either("rope_theta", inner, default_theta)
        partial = self._either("partial_rotary_factor", inner, 1.0, quiet=True)
        if inner is None:
            return Rope(theta, None, partial)
        kind = inner._take("rope_type", inner._take("type", "default", quiet=True), quiet=True)
        if kind not in ("default", "llama3"):
            raise ConfigError(
                f"{self.where}: RoPE scaling {kind!r} is not supported; use no scaling, or llama3"
            )
        scaling = None
        if kind == "llama3":
            positions = self.values.get("max_position_embeddings", _REQUIRED)
            scaling = {name: inner.number(name) for name in LLAMA3_SCALING[:3]}
            scaling[LLAMA3_SCALING[3]] = inner.number(LLAMA3_SCALING[3], positions)
        inner.finish()
        return Rope(theta, scaling, partial)

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse whatever was neither taken nor named, unless it is switched off."""
        for name, value in self.values.items():
            if name not in self._known and name not in harmless and value is not False:
                self.refuse(name, "this key is not known; remove it if it changes nothing in the model")

    def refuse(self, name: str, why: str) -> NoReturn:
        text = repr(self.values.get(name))
        raise ConfigError(
            f"{self.where}: {name} = {text[:60]}{'...' * (len(text) > 60)} is not allowed; {why}"
        )

    def say_once(self, text: str) -> None:
        """Log what a key, or an absent one, is taken to mean: once per process."""
        line = f"{self.where}: {text}"
        if line not in _logged:
            _logged.add(line)
            log.warning("%s", line)

    def _either(self, name: str, inner: ConfigJson | None, default: float, quiet: bool = False) -> float:
        """A number that stands at the top level or among the rotary embedding's."""
        if inner is None or name not in inner.values:
            return self.number(name, default, quiet)
        value = inner.number(name)
        if self.number(name, value, quiet=True) != value:
            self.refuse(name, f"{inner.where} has {value}; leave one of them")
        return value

    def _take(self, name: str, default: Any, quiet: bool = False) -> Any:
        self._known.add(name)
        if name in self.values:
            return self.values[name]
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}: key {name!r} is missing; is this a full checkpoint folder?")
        if not quiet:
            self.say_once(f"{name} is absent; {default} is taken, as vLLM does")
        return default
