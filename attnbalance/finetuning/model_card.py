"""The README.md of a finished run: a model card that says what was trained, on what, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from attnbalance.finetuning.objectives.parse import parse_objective

CARD = "README.md"


def model_card(about: Mapping[str, Any], validation_loss: Mapping[int, float], *, adapter: bool) -> str:
    """The text of the card, with the metadata that the Hub reads.

    Args:
        about: What the run's attnbalance.json says (see `Run`).
        validation_loss: By step, the validation loss; the folder's weights are those of the lowest.
        adapter: Whether the folder holds an adapter; else whole weights.
    """
    kind = "peft" if adapter else "transformers"
    hub_id = None if Path(about["base"]).exists() else str(about["base"])  # the Hub refuses cards that name a folder
    metadata = ModelCardData(base_model=hub_id, library_name=kind, pipeline_tag="text-generation", tags=["attnbalance"])
    best = min(validation_loss, key=lambda step: validation_loss[step])
    before = about["base_loss"]
    return f"""---
{metadata.to_yaml().strip()}
---

# {"An adapter of" if adapter else "Finetuned from"} {_code(Path(about["base"]).name if hub_id is None else hub_id)}

- Data: {_data(about)}.
- Objective: {_code(about["objective"])}, which teaches {_taught(about)}.
- {about["trained"]}.
- These are the weights of step {best} of {max(validation_loss)}, the lowest objective in validation:
  {validation_loss[best]:.4g}{"" if before is None else f", before training {before:.4g}"}.
- Made with {", ".join(f"{name} {version}" for name, version in about["versions"].items())}.

`attnbalance.json` holds all settings, the fingerprint of the base and the hashes of these files.

```python
import attnbalance as ab

model = ab.load_model("path/to/this/folder")
```
"""


def _taught(about: Mapping[str, Any]) -> str:
    """Whose answers were taught, in words."""
    if not about["learns_answers"]:
        return "what the base model answers, not the labels"
    if about.get("split", {}).get("replay") and parse_objective(about["objective"]).keeps_answers:
        return "the answers of the train facts, and what the base model answers to the replay facts"
    return "the answers of the data"


def _data(about: Mapping[str, Any]) -> str:
    """What was trained on, in words."""
    if "split" not in about:
        rows = about["instructions"]
        return f"{rows['train']} instructions of {_code(rows['source'])}, validated on {rows['validation']}"
    split = about["split"]
    parts = ", ".join(f"{split[part]} {part}" for part in ("train", "validation", "heldout", "replay") if part in split)
    validated = "" if "validation" in split else "; validated on the train facts"
    return f"facts of the split {_code(split['name'])}: {parts}{validated}"


def _code(text: object) -> str:
    """A text of the user's as inline code of Markdown, on one line."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39))}`"
