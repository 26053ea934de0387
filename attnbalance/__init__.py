"""Where finetuning takes a language model's attention off the subject of a question, and what that costs.

The public names are listed in `__init__.pyi`. Each is imported on first use, so that `import attnbalance` stays light.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
