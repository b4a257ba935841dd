"""All models of the table, by name."""

from __future__ import annotations

from hugging_face import ARCHITECTURES
from pytorch_image_models import VISION

CATALOGUE = {a.name if a.kind != "timm" else f"timm/{a.name}": a for a in (*ARCHITECTURES, *VISION)}
