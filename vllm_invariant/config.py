# In a vLLM branch: vllm/config/determinism.py.
"""The project's own options, from ``additional_config["vllm_invariant"]``.

There is deliberately little to set: the promise follows from ``VLLM_BATCH_INVARIANT=1``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_invariant.arithmetic import ARITHMETICS, CHUNK, Arithmetic

KEY = "vllm_invariant"


@dataclass(frozen=True)
class InvariantConfig:
    """Options under ``additional_config["vllm_invariant"]``.

    Attributes:
        gdn_arithmetic: name of the GDN arithmetic.
        allow_untested_gpu: run on an NVIDIA GPU newer than SM90, on which nobody has yet shown
            the promise with this release.

    """

    gdn_arithmetic: str = CHUNK.name
    allow_untested_gpu: bool = False

    @property
    def arithmetic(self) -> Arithmetic:
        """The chosen `Arithmetic`."""
        return ARITHMETICS[self.gdn_arithmetic]

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "InvariantConfig":
        """Parse and check the options.

        Args:
            additional_config: vLLM's ``additional_config``, a mapping or any other object.  What
                is not a mapping holds no options for us.

        Raises:
            ValueError: on an unknown key or a bad value, naming the ones that work.

        """
        options = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(options, Mapping):
            raise ValueError(f'additional_config["{KEY}"] must be a mapping, got {options!r}')
        known = {f.name: f for f in fields(cls)}
        for name in options:
            if name not in known:
                raise ValueError(
                    f'unknown key {name!r} in additional_config["{KEY}"]; '
                    f"known keys: {', '.join(sorted(known))}"
                )
        config = cls(**options)
        if config.gdn_arithmetic not in list(ARITHMETICS):  # a list: the value may be unhashable
            raise ValueError(
                f"gdn_arithmetic={config.gdn_arithmetic!r} is not known; "
                f"use one of: {', '.join(sorted(ARITHMETICS))}"
            )
        if not isinstance(config.allow_untested_gpu, bool):
            raise ValueError(f"allow_untested_gpu must be true or false, got {config.allow_untested_gpu!r}")
        return config
