"""Small vision models of timm, random weights."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hugging_face import BATCH, CLASSES, Made
from torch import Tensor


def _nothing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing(name, (), {})


class _Nothing(type):
    """A class that nothing is an instance of, and so is every attribute of it."""

    def __getattr__(cls, name: str) -> Any:
        return _nothing(name)


class _StandIn(types.ModuleType):
    """A module in which every name is such a class."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        return _nothing(name)


_UNUSED = (
    *("PIL", "PIL.Image", "torchvision", "torchvision.datasets", "torchvision.ops", "torchvision.ops.misc"),
    *("torchvision.transforms", "torchvision.transforms.functional"),
)


def _import_timm() -> Any:
    """timm, which imports names of torchvision and of PIL that its models do not use: stand-ins where they are not."""
    names = [n for n in _UNUSED if importlib.util.find_spec(n.partition(".")[0]) is None]
    with mock.patch.dict(sys.modules, {n: _StandIn(n) for n in names}):
        import timm

        imported = {k: v for k, v in sys.modules.items() if k not in names}
    sys.modules.update(imported)  # which the patch took away again
    return timm


@dataclass(frozen=True, slots=True)
class Vision:
    """A model of timm: ``options`` of ``timm.create_model`` make it small."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    size: int = 32
    kind: str = "timm"

    def make(self) -> Made:
        timm = _import_timm()
        torch.manual_seed(0)
        model = timm.create_model(self.name, num_classes=CLASSES, **self.options)
        torch.manual_seed(2)
        batch = {"x": torch.randn(BATCH, 3, self.size, self.size), "labels": torch.randint(0, CLASSES, (BATCH,))}
        return Made(model, batch, _loss)


def _loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])


_TWO = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}

VISION = (
    Vision("resnet18"),
    Vision("resnet50d"),
    Vision("seresnext26ts"),
    Vision("vit_tiny_patch16_224", _TWO),
    Vision("deit_tiny_patch16_224", _TWO),
    Vision("beit_base_patch16_224", _TWO),
    Vision("cait_xxs24_224", {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}),
    Vision("mixer_s16_224", {"img_size": 32}),
    Vision("convnext_atto"),
    Vision("efficientnet_b0"),
    Vision("mobilenetv3_small_050"),
    Vision("regnetx_002"),
    Vision("regnety_002"),
    Vision("densenet121", {"growth_rate": 5, "block_config": (2, 2)}),
    Vision(
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4},
    ),
    Vision("ghostnet_050"),
    Vision("poolformer_s12"),
    Vision("dla34"),
)
