"""Families of decoders, one file each. Configs find a family by its path in this folder, Hugging Face folders by its
`architecture`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from rolljax.model.decoder import DecoderConfig


def known() -> dict[str, type[DecoderConfig]]:
    """Return the config class of each family by architecture and model type, as `config.json` names them."""
    found: dict[str, type[DecoderConfig]] = {}
    for module in pkgutil.iter_modules(__path__):
        members = vars(importlib.import_module(f"{__name__}.{module.name}"))
        for cls in members.values():
            if inspect.isclass(cls) and issubclass(cls, DecoderConfig) and not inspect.isabstract(cls):
                found |= {cls.architecture: cls, cls.model_type: cls}
                if cls.multimodal:
                    found[cls.multimodal.architecture] = cls
    return found
